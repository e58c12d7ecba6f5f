"""Answers to the question of a search space, with figures computed by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import experiments
import pytest

from grpo_trainable.config import GRPOConfig
from reports import answers
from reports.answers import Answer, answer
from reports.experiment import read_experiment
from reports.parquet_reader import read_files
from reports.report import write_report
from reports.summary import NONE_BY_KL, OLDER_RESPONSES, compare
from search_spaces import SPACES, Column, columns
from search_spaces.search_space import Question


def answered(directory: Path) -> Answer | None:
    experiment = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    return answer(experiment, compare(experiment.trials), files)


def write_arm(directory: Path, space: str, arm: str, seed: int, rows: list[dict[str, Any]]) -> Path:
    (trial,) = SPACES[space].trials({"arm": arm, "rounds": 2}, [seed])
    return experiments.write_trial(directory, trial.to_dict(), rows)


def two_rounds(reward: float, **second: float) -> list[dict[str, Any]]:
    evaluated = {"eval__round": 2.0, "reward__eval_mean": reward}
    return [experiments.row(1), experiments.row(2, **{**evaluated, **second})]


def test_differences_are_between_trials_of_one_seed(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm, rewards in (("lag0", (0.8, 0.6)), ("lag1", (0.7, 0.9)), ("lag4", (0.5, 0.5))):
        for seed, reward in enumerate(rewards):
            write_arm(directory, "lag", arm, seed, two_rounds(reward))
    found = answered(directory)
    assert found is not None
    assert found.header[:3] == ("arm", "held-out reward", "against lag0")
    # The seeds of lag0 have 0.8 and 0.6, so the differences of lag1 are 0.7 - 0.8 and
    # 0.9 - 0.6.
    assert [row[:3] for row in found.rows()] == [
        ("lag0", "0.700 (0.600 to 0.800)", "+0.000"),
        ("lag1", "0.800 (0.700 to 0.900)", "+0.100 (seeds: -0.100 to +0.300)"),
        ("lag4", "0.500", "-0.200 (seeds: -0.300 to -0.100)"),
    ]


def test_a_difference_is_the_mean_of_the_differences_as_in_the_menu(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm, rewards in (("lag0", (0.5, 0.5, 0.5)), ("lag1", (0.5, 0.5, 0.8))):
        for seed, reward in enumerate(rewards):
            write_arm(directory, "lag", arm, seed, two_rounds(reward))
    found = answered(directory)
    assert found is not None
    # The median would be 0.
    assert found.rows()[1][1:3] == ("0.500 (0.500 to 0.800)", "+0.100 (seeds: +0.000 to +0.300)")


def test_the_speed_of_a_slow_model_is_not_zero(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm in ("lag0", "lag1"):
        # 16 groups of 4 responses in 700 s
        write_arm(directory, "lag", arm, 0, two_rounds(0.5, time__wall_clock_s=700.0))
    found = answered(directory)
    assert found is not None
    place = found.header.index("samples/s")
    assert [row[place] for row in found.rows()] == ["0.091", "0.091"]


def test_early_reward_is_the_evaluation_nearest_to_a_quarter_of_the_rounds(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    rewards = {2: 0.4, 3: 0.5, 8: 0.9}  # 2 is a quarter of the eight rounds
    rows = [
        experiments.row(n, eval__round=float(n) if n in rewards else 0.0,
                        **({"reward__eval_mean": rewards[n]} if n in rewards else {}))
        for n in range(1, 9)
    ]  # fmt: skip
    for arm in ("lag0", "lag1"):
        (trial,) = SPACES["lag"].trials({"arm": arm, "rounds": 8}, [0])
        experiments.write_trial(directory, trial.to_dict(), rows)
    found = answered(directory)
    assert found is not None
    assert found.arms["lag1"]["early_reward"] == [0.4]
    assert "early held-out reward" in found.header
    assert "nearest to 25% of the rounds (here, after 25% of the rounds)." in found.note


def test_an_early_reward_that_was_not_measured_early_says_when_it_was(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm, measured in (("lag0", (0, 2, 2, 4)), ("lag1", (0, 0, 0, 4))):
        rows = [experiments.row(n, eval__round=at) for n, at in enumerate(measured, start=1)]
        (trial,) = SPACES["lag"].trials({"arm": arm, "rounds": 4}, [0])
        experiments.write_trial(directory, trial.to_dict(), rows)
    found = answered(directory)
    assert found is not None
    assert "nearest to 25% of the rounds (here, after 50% to 100% of the rounds)." in found.note


def test_without_an_evaluation_before_the_last_there_is_no_column_for_it(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm in ("lag0", "lag1"):
        write_arm(directory, "lag", arm, 0, two_rounds(0.5))
    found = answered(directory)
    assert found is not None
    assert "early held-out reward" not in found.header
    assert "early held-out reward" not in found.note
    assert len(found.rows()[0]) == len(found.header)
    assert found.arms["lag1"]["early_reward"] == [0.5]  # report.json keeps the figure


@pytest.mark.parametrize(
    ("errors", "start", "end"),
    [
        ((0.4, 0.8), "Trials measure some", "KL from sampler 0.25 to 0.5."),
        ((0.0, 0.8), "Only lag1 measured some", "KL from sampler 0.5."),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_figure_measured_on_samples_has_a_standard_error(tmp_path, errors, start, end, seeds):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm, error in zip(("lag0", "lag1"), errors, strict=True):
        rows = [
            experiments.row(n, kl__behaviour_nats=-1.0, kl__behaviour_nats_se=error)
            for n in range(1, 5)
        ]
        for trial in SPACES["lag"].trials({"arm": arm, "rounds": 4}, range(seeds)):
            experiments.write_trial(directory, trial.to_dict(), rows)
    found = answered(directory)
    assert found is not None
    # The standard error of a median is sqrt(pi / 2) times that of a mean, 0.4 / sqrt(4).
    assert found.caveats[-1].startswith(start)
    place = found.header.index("KL from sampler")
    cells = [row[place] for row in found.rows()]
    if seeds == 1:
        assert "± and the standard error follow the figure." in found.caveats[-1]
        assert cells == ["1 ± 0.25" if errors[0] else "1", "1 ± 0.5"]
    else:
        assert f"Their standard errors: {end}" in found.caveats[-1]
        assert "±" not in "".join(cells)
    (measured,) = (text for text in found.measured if text.startswith("KL from sampler"))
    assert ": in nats per response, " in measured


def test_a_share_that_the_objective_rules_out_is_not_0(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="objectives_by_lag")
    shares = {"loss__clip_fraction": 0.0, "loss__weights_bounded_fraction": 0.0}
    for arm in ("grpo_lag0", "sapo_lag0", "icepop_lag0"):
        write_arm(directory, "objectives_by_lag", arm, 0, two_rounds(0.5, **shares))
    found = answered(directory)
    assert found is not None
    places = [found.header.index(title) for title in ("clipped", "weights bounded")]
    cells = {row[0]: [row[place] for place in places] for row in found.rows()}
    assert cells == {
        "grpo_lag0": ["0.0%", "-"],
        "sapo_lag0": ["-", "-"],
        "icepop_lag0": ["0.0%", "0.0%"],
    }
    assert found.note.endswith(" -: not known, or ruled out by the arm's settings.")


def test_the_column_of_the_kl_to_the_reference_names_the_arms_to_compare(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="objectives_by_lag")
    for arm in ("grpo_lag0", "grpo_lag4"):
        rows = two_rounds(0.5, kl__reference_nats=1.0)
        write_arm(directory, "objectives_by_lag", arm, 0, rows)
    found = answered(directory)
    assert found is not None
    (kl,) = found.caveats
    (measured,) = (text for text in found.measured if text.startswith("KL to reference"))
    assert measured.startswith("KL to reference (kl/reference_nats): in nats per response, ")
    assert kl == f"KL to reference: {OLDER_RESPONSES} {NONE_BY_KL}"


def test_a_column_without_a_figure_is_left_out_of_the_table_but_not_of_the_data(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="objectives_by_lag")
    for arm in ("grpo_lag0", "grpo_lag4"):
        write_arm(directory, "objectives_by_lag", arm, 0, two_rounds(0.5))
    found = answered(directory)
    assert found is not None
    # An exact lag is not a bound.
    assert found.arms["grpo_lag4"]["lag_of_bound"] == [None]
    assert "share of the bound" not in found.header
    assert not any("share of the bound" in text for text in found.measured)


def test_shares_of_stages_leave_the_evaluation_out_as_the_console_does(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    seconds = {"time__rollout_s": 3.0, "time__optimize_s": 1.0, "time__eval_s": 16.0}
    for arm in ("lag0", "lag1"):
        write_arm(directory, "lag", arm, 0, two_rounds(0.5, **seconds))
    found = answered(directory)
    assert found is not None
    cells = dict(zip(found.header, found.rows()[0], strict=True))
    assert (cells["rollout"], cells["optimize"]) == ("75%", "25%")
    assert "sync" not in cells  # no round recorded it
    assert "a round's work, excluding evaluation" in found.measured[-1]


def test_drift_from_the_sampler_is_positive_and_speed_counts_samples(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    rows = [
        experiments.row(n, kl__behaviour_nats=-float(n), count__trained=8.0 * n)
        for n in range(1, 6)
    ]
    for arm in ("lag0", "lag1"):
        (trial,) = SPACES["lag"].trials({"arm": arm, "rounds": 5}, [0])
        experiments.write_trial(directory, trial.to_dict(), rows)
    found = answered(directory)
    assert found is not None
    assert found.arms["lag1"]["kl_sampler_nats"] == [3.0]
    # Rounds 3 to 5 take 6 s of wall-clock and train on 3 x 8 groups of 4.
    assert found.arms["lag1"]["samples_per_s"] == [16.0]


def test_a_disturbed_speed_is_not_shown(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm, share in (("lag0", 0.0), ("lag1", 0.9)):
        rows = [experiments.row(n, time__disturbed_fraction=share) for n in range(1, 6)]
        (trial,) = SPACES["lag"].trials({"arm": arm, "rounds": 5}, [0])
        experiments.write_trial(directory, trial.to_dict(), rows)
    found = answered(directory)
    assert found is not None
    assert [found.arms[arm]["samples_per_s"] for arm in ("lag0", "lag1")] == [[32.0], [None]]


def test_realised_lag_is_the_mean_over_rounds_beside_its_bound(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    write_arm(directory, "lag", "lag0", 0, two_rounds(0.5))
    rows = [
        experiments.row(1, lag__mean=1.0, lag__max=2.0),
        experiments.row(2, lag__mean=4.0, lag__max=4.0),
    ]
    write_arm(directory, "lag", "lag4", 0, rows)
    found = answered(directory)
    assert found is not None
    own = found.arms["lag4"]
    assert (own["lag"], own["lag_of_bound"], own["lag_max"]) == ([2.5], [0.625], [4.0])
    assert found.arms["lag0"]["lag_of_bound"] == [None]  # lag0 has no bound to reach


def test_uses_count_every_round_that_trained_on_a_group(tmp_path):
    directory = experiments.write_experiment(tmp_path / "replay", space="replay")
    write_arm(directory, "replay", "no_replay", 0, two_rounds(0.5))
    # One group was dropped, and one was waiting when the trial ended.
    rows = two_rounds(0.5, count__requested=5.0, count__dropped=1.0, count__trained=3.0)
    trial = write_arm(directory, "replay", "capacity4_fifo", 0, rows)
    # Each group has two responses. Group 1 is in both rounds, groups 2 and 3 in one each.
    experiments.write_part(trial, "rollouts", 1, [experiments.rollout(1, c) for c in (1, 1, 2, 2)])
    again = [experiments.rollout(2, 1, first_use=False)] * 2
    experiments.write_part(trial, "rollouts", 2, [*again, *[experiments.rollout(2, 3)] * 2])
    found = answered(directory)
    assert found is not None
    own = found.arms["capacity4_fifo"]
    assert own["uses"] == [pytest.approx(4 / 3)]
    assert own["never_trained"] == [pytest.approx(2 / 5)]


@pytest.mark.slow
@pytest.mark.parametrize("space", sorted(SPACES))
def test_every_space_has_an_answer(tmp_path, space):
    directory = experiments.write_experiment(tmp_path / space, space=space)
    for arm in SPACES[space].arms:
        write_arm(directory, space, arm, 0, two_rounds(0.5))
    found = answered(directory)
    assert found is not None
    assert [row[0] for row in found.rows()] == list(SPACES[space].arms)


def test_one_arm_or_a_search_of_ones_own_asks_nothing(tmp_path):
    one = experiments.write_experiment(tmp_path / "one", space="lag")
    write_arm(one, "lag", "lag0", 0, two_rounds(0.5))
    assert answered(one) is None
    own = experiments.write_experiment(tmp_path / "own", space=None)
    for arm in ("lag0", "lag1"):
        write_arm(own, "lag", arm, 0, two_rounds(0.5))
    assert answered(own) is None


def test_what_was_stopped_early_is_compared_with_nothing(tmp_path):
    directory = experiments.write_experiment(tmp_path / "lags", space="lag")
    for arm in ("lag0", "lag1"):
        write_arm(directory, "lag", arm, 0, two_rounds(0.5)[: 1 if arm == "lag1" else 2])
    found = answered(directory)
    assert found is not None
    assert [row[:3] for row in found.rows()] == [("lag0", "0.500", "+0.000"), ("lag1", "-", "-")]


MEASURED = {
    "last": 4.0,
    "mean": 2.5,
    "median": 2.5,
    "max": 4.0,
    "late": 4.0,  # the last eighth of four rounds, but at least one round
}


@pytest.mark.parametrize("over", MEASURED)
def test_a_column_reduces_the_rounds_of_a_trial_and_converts_the_unit(tmp_path, over):
    own = Column(name="norm", title="norm", metric="optim/grad_norm", over=over, factor=10.0)
    found = answered(asking(tmp_path / "own", own, [1.0, 2.0, 3.0, 4.0]))
    assert found is not None
    assert found.arms["a"]["norm"] == [10 * MEASURED[over]]


def asking(directory: Path, column: Column, values: list[float], **changes: Any) -> Path:
    """Write an experiment of two arms, `b` and `a`, whose search space no longer exists."""
    question = Question(text="whose?", arms=("b", "a"), columns=(column,)).to_dict() | changes
    experiments.write_experiment(directory, space="of_theirs", question=question)
    for arm in ("a", "b"):
        config = GRPOConfig.from_dict({"arm": arm, "rounds": len(values)}).to_dict()
        rows = [experiments.row(n, optim__grad_norm=v) for n, v in enumerate(values, start=1)]
        experiments.write_trial(directory, config, rows)
    return directory


NORM = Column(name="norm", title="gradient norm", metric="optim/grad_norm", form="{:.1f}")


@pytest.mark.slow
def test_a_question_needs_no_space_of_its_name(tmp_path):
    directory = asking(tmp_path / "own", NORM, [0.5, 0.25])
    found = answered(directory)
    assert found is not None
    assert [row[0] for row in found.rows()] == ["b", "a"]  # in the order of the question
    assert found.rows()[0][found.header.index("gradient norm")] == "0.2"
    assert "gradient norm (optim/grad_norm): the value in the last round." in found.measured
    page = write_report(directory, warn=[].append).read_text()
    assert "<h1>Whose?</h1>" in page
    assert ">gradient norm<" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": [{"name": "x"}]},
        {"columns": [asdict(NORM) | {"form": "{:999999999.1f}"}]},
        {"columns": [asdict(NORM) | {"form": "{0.__class__}"}]},
        {"columns": [asdict(NORM) | {"over": ["last"]}]},
        {"columns": [asdict(NORM) | {"factor": "10"}]},
        {"columns": [asdict(NORM) | {"factor": 1e308}]},
        {"columns": [asdict(NORM) | {"factor": 10**400}]},
        {"columns": [asdict(NORM) | {"title": None}]},
        {"columns": 3},
        {"arms": [["a"]]},
        {"text": None},
    ],
    ids=range(11),
)
def test_a_damaged_question_is_named(tmp_path, changes):
    experiment = read_experiment(asking(tmp_path / "own", NORM, [0.5, 0.25], **changes))
    (problem,) = experiment.problems
    assert problem.startswith("experiment.json: question: ")
    assert len(experiment.trials) == 2


@pytest.mark.slow
def test_a_damaged_question_is_logged_and_does_not_stop_the_report(tmp_path, caplog):
    directory = asking(tmp_path / "own", NORM, [0.5, 0.25], columns=3)
    assert ">gradient norm<" not in write_report(directory).read_text()
    assert caplog.messages == read_experiment(directory).problems


def test_every_reduction_and_every_derived_figure_can_be_measured():
    assert answers.OVER.keys() == columns.OVER.keys() == MEASURED.keys()
    assert answers.DERIVED.keys() == columns.DERIVED.keys()
