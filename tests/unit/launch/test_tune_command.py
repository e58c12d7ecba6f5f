"""`launch/tune.py`: the lines at the end of an experiment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import experiments
import pytest

from launch import tune


@pytest.mark.parametrize(
    ("done", "until_decided", "go_on"),
    [(True, False, False), (False, False, True), (True, True, True)],
)
def test_an_interrupt_after_the_last_round_leaves_nothing_to_continue(
    tmp_path, monkeypatch, capsys, done, until_decided, go_on
):
    """With --until-decided, more seeds may follow."""
    directory = experiments.write_experiment(tmp_path / "e")
    last = {**experiments.row(1), **({"done": True} if done else {})}
    experiments.write_trial(directory, experiments.config(rounds=1), [last])
    monkeypatch.setattr(tune, "go_on", lambda plan: "continue with: it")
    options = SimpleNamespace(baseline=None, until_decided=until_decided)
    plan: Any = SimpleNamespace(directory=directory, options=options)
    tune.tell(plan, directory, [], "python launch/report.py e", interrupted=True)

    out = capsys.readouterr().out
    assert "for a report of the results: python launch/report.py e" in out
    assert f"interrupted: {int(done)} of 1 trial done, 0 not started" in out
    assert ("continue with" in out) is go_on
