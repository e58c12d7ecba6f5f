"""`--until-decided` adds the right seeds, ends in time, and continues after it was killed."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import experiments
import pytest

from grpo_trainable.command_line import UsageError
from launch import tune, verdict
from reports.experiment import read_experiment
from reports.menu import VerdictOptions, menu_of
from reports.parquet_reader import read_all
from reports.summary import compare
from tuning import run as run_module
from tuning.blocks import Block, Limits, duration, next_block
from tuning.plan import Plan

BASE, OTHER, THIRD = "colocated_k1", "sync", "async_k1"
NEAR = (0.60, 0.62, 0.58, 0.61, 0.60)  # close to BASE: all differences are far above -0.1
FAR = (0.30, 0.31, 0.29, 0.32, 0.30)
WILD = (0.9, 0.2, 0.8, 0.3, 0.7)
REWARDS = {BASE: (0.6, 0.61, 0.59, 0.6, 0.61), OTHER: NEAR, THIRD: WILD}
MINUTE = 60.0


def write_trial(directory: Path, params: dict[str, Any], reward: float) -> None:
    """Write a trial that has taken a minute."""
    figures = {"eval__round": 5.0, "reward__eval_mean": reward, "lag__max": params["lag"]}
    rows = [experiments.row(n, time_total_s=MINUTE / 5 * n, **figures) for n in range(1, 6)]
    rows[-1]["done"] = True
    directory.mkdir(parents=True, exist_ok=True)
    experiments.write_trial(directory, params, rows)


def following(directory: Path, arms: dict[str, tuple], seeds: int, **limits: Any) -> Block | str:
    """Return the next block once each arm has run its first seeds, or the reason to stop."""
    if not directory.exists():
        experiments.write_experiment(directory)
    for arm, rewards in arms.items():
        for seed, reward in enumerate(rewards[:seeds]):
            write_trial(directory, experiments.config(arm, seed, rounds=5), reward)
    experiment = read_experiment(directory)
    comparison = compare(experiment.trials, experiment.not_begun)
    options = VerdictOptions(margin=0.1, max_seeds=5)
    menu = menu_of(experiment, comparison, read_all(experiment.trials), options)
    given = Limits(**{"max_seeds": 5, "budget_s": None, **limits})
    return next_block(experiment, menu, seeds, given)


def test_a_block_has_the_baseline_and_the_undecided_arms(tmp_path):
    assert following(tmp_path / "a", REWARDS, 2) == Block(
        arms=[BASE, OTHER, THIRD], seconds=3 * MINUTE
    )
    assert following(tmp_path / "b", REWARDS, 3) == Block(arms=[BASE, THIRD], seconds=2 * MINUTE)


def test_blocks_end_with_the_last_verdict_the_maximum_or_the_budget(tmp_path):
    decided = {BASE: REWARDS[BASE], OTHER: NEAR, THIRD: FAR}
    assert following(tmp_path / "a", decided, 4) == "every arm is decided"
    assert "maximum of 5 seeds" in following(tmp_path / "b", REWARDS, 5)
    # Nine trials have taken nine minutes, and the next block takes two.
    enough = following(tmp_path / "c", REWARDS, 3, budget_s=11 * MINUTE)
    assert isinstance(enough, Block)
    short = following(tmp_path / "d", REWARDS, 3, budget_s=10.5 * MINUTE)
    assert short.startswith(
        "the next seed would take about 120 s, but only 90 s of the budget are left"
    )


def test_an_arm_without_a_trial_to_compare_gets_no_more_seeds(tmp_path):
    directory = tmp_path / "e"
    experiments.write_experiment(directory)
    params = experiments.config(THIRD, 0, rounds=5)
    experiments.write_trial(directory, params, [experiments.row(1, done=True)])
    reason = following(directory, {BASE: REWARDS[BASE], OTHER: NEAR}, 3)
    assert reason == f"every arm that can be tested is decided; cannot test {THIRD}"


def test_nothing_is_called_decided_if_no_arm_can_be_tested(tmp_path):
    directory = tmp_path / "e"
    experiments.write_experiment(directory)
    without_lag = {"eval__round": 5.0, "reward__eval_mean": 0.5, "lag__max": 0.0}
    rows = [experiments.row(n, **without_lag) for n in range(1, 6)]
    experiments.write_trial(directory, experiments.config(THIRD, 0, rounds=5), rows)
    assert following(directory, {BASE: REWARDS[BASE]}, 1) == "no arm can be tested"


def test_durations_are_written_in_words():
    assert [duration(s) for s in (40, 720, 9000)] == ["40 s", "12 min", "2.5 h"]
    # Prices are rounded up and the time left is rounded down, so they never look equal by mistake.
    prices = [duration(s, math.ceil) for s in (119.6, 725, 9001)]
    assert prices == ["120 s", "13 min", "2.6 h"]
    assert [duration(s, math.floor) for s in (119.5, 724, 8999)] == ["119 s", "12 min", "2.4 h"]


class Killed(BaseException):
    """Stand-in for SIGKILL."""


@pytest.fixture
def until_decided(tmp_path, monkeypatch):
    """Return a function that runs `tune --until-decided` with fake trials.

    The trials write files but do not train. The command is killed after `killed_after` trials.
    """
    monkeypatch.chdir(tmp_path)
    begun: list[tuple[str, int]] = []
    shipped: list[dict[str, bytes]] = []

    @contextlib.contextmanager
    def started(plan: Plan):
        plan.shipped = {"reward.py": b"code"}
        yield []

    def run(*argv: str, killed_after: int | None = None) -> list[tuple[str, int]]:
        left = killed_after

        def fit(plan: Plan) -> list:
            nonlocal left
            there = Path(str(plan.run_directory))
            shipped.append(plan.shipped)
            for trial in plan.trials:
                if list(there.glob(f"{trial.arm}-{trial.seed}-*")):
                    continue
                if left == 0:
                    raise Killed
                left = None if left is None else left - 1
                begun.append((trial.arm, trial.seed))
                write_trial(there, trial.to_dict(), REWARDS[trial.arm][trial.seed])
            return []

        monkeypatch.setattr(run_module, "fit", fit)
        monkeypatch.setattr(run_module, "ray_started", started)
        monkeypatch.setattr(tune, "opening", lambda *_: [])
        monkeypatch.setattr(tune, "summarise", lambda *_, **__: 0)  # its plots take seconds
        tune.main([*argv, "--name", "mine", "--storage", str(tmp_path)])
        # Nodes that join the cluster later need the user's files in every block.
        assert all(shipped)
        return begun

    return run


SPACE_FILE = """\
from search_spaces import SearchSpace
MINE = SearchSpace(
    name="mine",
    question="may another arm replace colocated_k1?",
    arms={
        "colocated_k1": {"placement": "colocated", "rounds": 5},
        "sync": {"placement": "disaggregated", "lag": 0, "rounds": 5},
        "async_k1": {"placement": "disaggregated", "lag": 1, "rounds": 5},
    },
)
"""
START = ("--space", "mine.py", "--until-decided", "--margin", "0.1", "--max-seeds", "5")
DECIDED_AT_3 = {(BASE, s) for s in range(5)} | {(OTHER, s) for s in range(3)}
EXPECTED = DECIDED_AT_3 | {(THIRD, s) for s in range(5)}


@pytest.mark.slow
def test_seeds_are_added_until_the_maximum_and_only_for_undecided_arms(
    until_decided, tmp_path, capsys
):
    (tmp_path / "mine.py").write_text(SPACE_FILE)
    begun = until_decided(*START)
    output = capsys.readouterr().out

    assert (len(begun), set(begun)) == (len(EXPECTED), EXPECTED)
    assert "next: seed 3 of colocated_k1, async_k1, about 120 s" in output
    assert "no more seeds: the maximum of 5 seeds has been reached (--max-seeds)" in output
    record = read_experiment(tmp_path / "mine")
    assert [sorted(own.planned)[-1][1] for own in record.extensions] == [1, 2, 3, 4]
    # The report and verdict.py use the recorded maximum.
    assert verdict.main([str(tmp_path / "mine")]) == 4
    assert "from 3 to 5 (--max-seeds)" in " ".join(capsys.readouterr().out.split())
    assert verdict.main([str(tmp_path / "mine"), "--max-seeds", "9"]) == 2
    assert "the experiment was started with 5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [0, 7, len(EXPECTED) - 1])
def test_a_killed_command_is_resumed_without_a_trial_lost_or_doubled(
    until_decided, tmp_path, killed_after
):
    (tmp_path / "mine.py").write_text(SPACE_FILE)
    with pytest.raises(Killed):
        until_decided(*START, killed_after=killed_after)
    begun = until_decided("--resume")
    assert sorted(begun) == sorted(EXPECTED)


@pytest.mark.slow
def test_a_resume_with_a_larger_budget_continues(until_decided, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(SPACE_FILE)
    # Three seeds take nine minutes, and the fourth would take two more.
    assert len(until_decided(*START, "--budget", "9m")) == 9
    assert "to continue, use --resume with a larger --budget" in capsys.readouterr().out
    assert len(until_decided("--resume")) == 9
    assert set(until_decided("--resume", "--budget", "1h")) == EXPECTED


@pytest.mark.slow
def test_an_extension_without_more_seeds_gives_none_to_decided_arms(until_decided, tmp_path):
    (tmp_path / "mine.py").write_text(SPACE_FILE)
    until_decided(*START)
    with pytest.raises(UsageError, match="nothing to add"):
        extended(tmp_path)


def extended(tmp_path: Path, *argv: str) -> Plan:
    where = ("--name", "mine", "--storage", str(tmp_path))
    return tune.plan_of(tune.parse_arguments(["--extend", *argv, *where]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--until-decided",), "--until-decided needs --margin"),
        ((*START[2:], "--scheduler", "asha"), "cannot be combined with --scheduler asha"),
        ((*START[2:], "--set", "seed=3"), "--set seed fixes one"),
        ((*START[2:], "--set", "arm=sync"), "there is only one arm"),
        ((*START[2:-1], "2"), "--max-seeds 2: must be an integer in [3, 50]"),
        ((*START[2:], "--num-samples", "6"), "--num-samples 6 exceeds --max-seeds 5"),
        (("--max-seeds", "5"), "--max-seeds needs --until-decided"),
        ((*START[2:], "--budget", "2 days"), "such as 2h, 90m or 3600s"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, argv, said):
    (tmp_path / "mine.py").write_text(SPACE_FILE)
    argv = ("--space", str(tmp_path / "mine.py"), *argv, "--storage", str(tmp_path))
    with pytest.raises(UsageError) as error:
        tune.plan_of(tune.parse_arguments(argv))
    assert said in str(error.value)
