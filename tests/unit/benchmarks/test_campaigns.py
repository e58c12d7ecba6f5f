"""Campaigns grow slice by slice, and an interruption loses at most one slice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import campaigns
import measure
import pytest
from campaigns import CAMPAIGNS, Slice
from own_spaces import OWN
from real_model import wanted

from grpo_trainable.command_line import UsageError
from search_spaces.spaces import SPACES

SLICES = 8
SCRIPT = """
import pathlib, sys, time
sys.path[:0] = [{root!r}, {benchmarks!r}]
import campaigns, off_policy

here = pathlib.Path({here!r})
origin = {{"command": "x", "commit": "1", "dirty": False}}
campaigns.RESULTS = here
campaigns.provenance = lambda args: dict(origin)
campaigns.checked = lambda measurement: measurement
campaigns.CAMPAIGNS = {{
    "test": tuple(campaigns.Slice(f"s{{n}}", "space", ("a", "b"), "") for n in range({slices}))
}}

def measured(space, directory, options):
    with open(here / "begun", "a") as begun:
        print(directory.name, file=begun)
    time.sleep(0.02)
    return {{"options": options, "filling": "x" * 100_000}}

off_policy.measured = measured
sys.argv = ["campaigns.py", *sys.argv[1:], "--storage", str(here)]
campaigns.main()
"""


def begun(directory: Path) -> list[str]:
    """Return the names of the slices that have begun, in order."""
    return [line.removeprefix("test_") for line in (directory / "begun").read_text().split()]


def test_a_campaign_that_is_killed_at_any_moment_loses_at_most_one_slice(tmp_path: Path):
    root = measure.ROOT
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(
            root=str(root), benchmarks=str(root / "benchmarks"), here=str(tmp_path), slices=SLICES
        )
    )
    (tmp_path / "begun").touch()
    rng, kills, file = random.Random(0), 0, tmp_path / "campaign_test.json"
    while True:
        done = set(measure.measurements(measure.read(file)))
        before = len(begun(tmp_path))
        process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        while process.poll() is None and len(begun(tmp_path)) == before:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.08))
        process.kill()
        process.communicate()
        kept = measure.measurements(measure.read(file))  # the file is never half-written
        assert done <= set(kept)  # and never forgets a slice
        new = begun(tmp_path)[before:]
        assert len(set(new) - set(kept)) <= 1
        assert not set(new) & done  # a finished slice does not run again
        if len(kept) == SLICES:
            break
        kills += 1
    assert kills >= 3
    result = json.loads(file.read_text())
    assert result["finished"] == SLICES == len(result["planned"])
    assert result["s0"]["options"] == ["--set", "arm=a,b"]


def test_slices_are_continued_in_order_and_may_be_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(campaigns, "RESULTS", tmp_path)
    first, second, *_ = (own.name for own in CAMPAIGNS["atlas"])
    measure_of_first = {"command": "x", "commit": "1"}
    campaigns.file_of("atlas").write_text(json.dumps({"planned": [], first: measure_of_first}))
    assert campaigns.to_run("atlas", None)[0].name == second
    assert [own.name for own in campaigns.to_run("atlas", first)] == [first]
    assert campaigns.progress("atlas").startswith(f"atlas: 1 of {len(CAMPAIGNS['atlas'])} slices;")


def test_unknown_names_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    for words, error in (
        (["nothing"], "nothing: unknown campaign; valid: "),
        (["atlas", "--only", "ppo"], "ppo: not a slice of atlas"),
    ):
        monkeypatch.setattr(sys, "argv", ["campaigns.py", *words])
        with pytest.raises(UsageError, match=error):
            campaigns.main()


def test_every_slice_names_arms_of_a_space():
    for slices in CAMPAIGNS.values():
        for own in slices:
            if isinstance(own, Slice):
                assert set(own.arms) <= set({**SPACES, **OWN}[own.space].arms)
            else:
                assert own.trainer in wanted(Namespace(engines=["hf"]))
        assert len({own.name for own in slices}) == len(slices)
    assert len(CAMPAIGNS["atlas"]) >= 14
