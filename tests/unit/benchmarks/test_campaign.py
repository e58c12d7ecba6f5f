"""The fault campaign: results that it keeps and faults that it runs again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
from survival import Fault, Lost, Outcome

STRUCK: list[tuple[str, int]] = []


def fault(name: str, *, lost: bool = False) -> Fault:
    def strike(rng: Any, repeat: int) -> Outcome:
        STRUCK.append((name, repeat))
        if lost:
            raise Lost("a round is missing")
        return Outcome(survived=True, happened=name)

    return Fault(name, 3, strike)


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that runs the campaign with two fake faults.

    The function returns the faults that struck, and the written results.
    """
    about = {"command": "x", "commit": "1", "dirty": False, "workload": {}}
    monkeypatch.setattr(faults, "FAULTS", (fault("one"), fault("two", lost=True)))
    monkeypatch.setattr(faults, "provenance", lambda args: dict(about))
    monkeypatch.setattr(
        faults, "write", lambda out, result, **how: out.write_text(json.dumps(result))
    )
    out = tmp_path / "faults.json"

    def run(*options: str, commit: str = "1") -> tuple[list[tuple[str, int]], dict[str, Any]]:
        about["commit"] = commit
        monkeypatch.setattr(sys, "argv", ["faults.py", "--out", str(out), *options])
        STRUCK.clear()
        faults.main()
        return list(STRUCK), json.loads(out.read_text())["faults"]

    return run


def test_a_campaign_goes_on_where_it_was_cut_short_and_keeps_the_other_faults(campaign):
    struck, _ = campaign("--fault", "one", "--repeats", "1")
    assert struck == [("one", 0)]
    struck, written = campaign("--fault", "two", "--repeats", "2")
    assert struck == [("two", 0), ("two", 1)]
    assert [len(written[name]) for name in ("one", "two")] == [1, 2]
    struck, written = campaign()
    assert struck == [("one", 1), ("one", 2), ("two", 2)]
    assert {outcome["survived"] for outcome in written["one"]} == {True}
    assert written["two"][0] == {
        **written["two"][0],
        "survived": False,
        "happened": "a round is missing",
    }


def test_a_campaign_begins_anew_when_the_trials_have_changed(campaign, monkeypatch):
    campaign("--fault", "one", "--repeats", "1")
    monkeypatch.setattr(faults, "SETTINGS", {**faults.SETTINGS, "rollout.prompts": 8})
    _, written = campaign("--fault", "two", "--repeats", "1")
    assert list(written) == ["two"]


def test_a_campaign_starts_over_at_another_commit(campaign):
    campaign("--fault", "one", "--repeats", "1")
    struck, written = campaign("--fault", "two", "--repeats", "1", commit="2")
    assert struck == [("two", 0)]
    assert list(written) == ["two"]
