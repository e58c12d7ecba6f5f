"""A message for a trial that no node has room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from trials import FakeTrial

from callbacks.unplaceable_trials import LOOK_S, UnplaceableTrialsCallback


def test_a_trial_says_that_it_waits_for_room_and_when_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = FakeTrial(tmp_path / "trial")
    trial.placement_group_factory = SimpleNamespace(
        bundles=[{"CPU": 0.1}, {"CPU": 2.0}], strategy="PACK"
    )
    nodes, at_s = [{"CPU": 2.0}, {"CPU": 1.0}], 0.0
    callback = UnplaceableTrialsCallback(lambda: nodes, lambda: at_s)

    def look(status: str) -> str:
        nonlocal at_s
        trial.status = status
        at_s += LOOK_S
        callback.on_step_begin(iteration=0, trials=[trial])
        return capsys.readouterr().out

    assert look("PENDING") == ""  # the trial is about to start
    assert look("RUNNING") == ""
    nodes = [{"CPU": 1.0}]
    assert look("PENDING") == (
        "sync/0 waits for room: its actors need 0.1 CPUs, 2 CPUs, each on one node, but the nodes "
        "that are alive have 1 CPU. The trial continues when a node with room joins. If none will "
        "join, lower the trial's resources.*\n"
    )
    assert look("PENDING") == ""  # reported once
    nodes = [{"CPU": 1.0}, {"CPU": 2.0}]
    assert look("PENDING") == "sync/0: there is room again\n"
