"""Trials of a user's own Tuner that have not begun, counted from Tune's files."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from experiments import config, of_tune, row, write_state_of_tune
from ray import tune
from ray.tune.experiment import Experiment
from ray.tune.search import BasicVariantGenerator, Searcher, SearchGenerator

from reports.experiment import ExperimentError, read_experiment

DATE = "2026-11-28_21-17-36"


def name_of(seed: int, time: str = "21-17-36", id_: str = "45ecf") -> str:
    return f"GRPO_{id_}_0000{seed}_{seed}_seed={seed}_2026-11-28_{time}"


BEGUN = {name_of(0): "TERMINATED", name_of(1): "ERROR"}


@pytest.mark.parametrize(
    ("more", "planned", "options", "left"),
    [
        ({}, 2, {}, 0),
        ({}, 5, {}, 3),  # Tune has not created three trials yet
        ({}, 5, {"finished": True}, 0),  # such as after `time_budget_s`
        ({}, sys.maxsize, {}, 0),  # num_samples=-1
        ({name_of(2): "PENDING"}, 5, {}, 3),
        ({name_of(2): "PENDING"}, sys.maxsize, {}, 1),
        ({name_of(2): "RUNNING"}, 3, {}, 1),  # killed before the trial had written a file
    ],
)
def test_created_and_other_trials_that_have_not_begun_are_counted(
    tmp_path, more, planned, options, left
):
    for seed in (0, 1):
        of_tune(tmp_path, name_of(seed), config("sync", seed), [row(1)])
    write_state_of_tune(tmp_path, BEGUN | more, planned, DATE, **options)
    record = read_experiment(tmp_path)
    assert (record.waiting, record.several_runs, record.problems) == (left, False, [])


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", None])
def test_a_trial_has_begun_although_an_older_snapshot_does_not_say_so(tmp_path, status):
    for seed in (0, 1, 2):
        of_tune(tmp_path, name_of(seed), config("sync", seed), [row(1)])
    states = BEGUN | ({} if status is None else {name_of(2): status})
    write_state_of_tune(tmp_path, states, 4, DATE)
    assert read_experiment(tmp_path).waiting == 1


def test_after_a_restore_the_newest_snapshot_counts(tmp_path):
    for seed in (0, 1):
        of_tune(tmp_path, name_of(seed), config("sync", seed), [row(1)])
    write_state_of_tune(tmp_path, {name_of(0): "TERMINATED"}, 3, DATE)
    of_tune(tmp_path, name_of(2, "22-00-01"), config("sync", 2), [row(1)])
    write_state_of_tune(
        tmp_path,
        {name_of(0): "TERMINATED", name_of(1): "TERMINATED", name_of(2, "22-00-01"): "RUNNING"},
        3,
        "2026-11-28_22-00-00",
    )
    record = read_experiment(tmp_path)
    assert (record.waiting, record.several_runs) == (0, False)


def test_the_newest_snapshot_is_known_by_its_time_not_by_its_name(tmp_path):
    for seed in (0, 1):
        of_tune(tmp_path, name_of(seed), config("sync", seed), [row(1)])
    write_state_of_tune(tmp_path, {name_of(0): "TERMINATED"}, 4, "2026-11-28_23-00-00")
    # The restored run began an hour later, in another time zone.
    write_state_of_tune(tmp_path, BEGUN, 2, DATE)
    path = tmp_path / f"experiment_state-{DATE}.json"
    state = json.loads(path.read_text())
    state["stats"]["start_time"] += 10 * 3600
    path.write_text(json.dumps(state))
    assert read_experiment(tmp_path).waiting == 0


def test_a_second_run_under_the_same_name_is_noticed(tmp_path):
    of_tune(tmp_path, name_of(0), config("sync", 0), [row(1)])
    write_state_of_tune(tmp_path, {name_of(0): "TERMINATED"}, 1, DATE)
    second = name_of(1, "22-00-00", "c0ffe")
    of_tune(tmp_path, second, config("sync", 1), [row(1)])
    write_state_of_tune(tmp_path, {second: "TERMINATED"}, 1, "2026-11-28_22-00-00")
    record = read_experiment(tmp_path)
    assert (record.waiting, record.several_runs) == (0, True)


def test_a_trial_that_tune_did_not_know_when_it_restored_does_not_count(tmp_path):
    kept, unknown = name_of(0), "GRPO_8ee165a0_2_lr=1_2026-11-28_21-17-50"
    of_tune(tmp_path, kept, config("sync", 0), [row(1)])
    of_tune(tmp_path, unknown, config("sync", 1), [row(1)])
    write_state_of_tune(tmp_path, {kept: "TERMINATED"}, 2, DATE)
    # The snapshot of the first run is old, but no other run has begun.
    assert len(read_experiment(tmp_path).trials) == 2
    again = "GRPO_2d5e5c49_2_lr=1_2026-11-28_22-00-01"
    of_tune(tmp_path, again, config("sync", 1), [row(1)])
    states = {kept: "TERMINATED", again: "RUNNING"}
    write_state_of_tune(tmp_path, states, 2, "2026-11-28_22-00-00")
    record = read_experiment(tmp_path)
    assert [trial.name for trial in record.trials] == [kept, again]
    assert record.waiting == 0
    assert record.problems == [
        f"{unknown} still running or interrupted: round 1 of 96. It does not count, because no "
        "snapshot of Tune contains it, and a later run has begun"
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"trial_data": [["{}", ""]]}', '{"trial_data": [1]}', "{}", None]
)
def test_with_a_damaged_or_foreign_snapshot_the_number_is_unknown(tmp_path, text):
    of_tune(tmp_path, name_of(0), config(), [row(1)])
    name = f"experiment_state-{DATE}.json"
    if text is None:
        (tmp_path / name).symlink_to(tmp_path / name_of(0) / "params.json")
    else:
        (tmp_path / name).write_text(text)
    record = read_experiment(tmp_path)
    assert record.waiting is None
    assert any(name in problem for problem in record.problems)


@pytest.mark.parametrize("content", [b"", b"x", None])
def test_if_the_searchers_state_cannot_be_read_the_number_is_unknown(tmp_path, content):
    of_tune(tmp_path, name_of(0), config("sync", 0), [row(1)])
    write_state_of_tune(tmp_path, {name_of(0): "TERMINATED"}, 3, DATE)
    searcher = tmp_path / f"basic-variant-state-{DATE}.json"
    whole = searcher.read_bytes()
    searcher.write_bytes(whole[: len(whole) // 3] if content is None else content)
    assert read_experiment(tmp_path).waiting is None


def test_trials_of_a_run_whose_snapshot_is_damaged_still_count(tmp_path):
    of_tune(tmp_path, name_of(0), config("sync", 0), [row(1)])
    (tmp_path / f"experiment_state-{DATE}.json").write_text("{")
    second = name_of(1, "22-00-00", "c0ffe")
    of_tune(tmp_path, second, config("sync", 1), [row(1)])
    write_state_of_tune(tmp_path, {second: "TERMINATED"}, 1, "2026-11-28_22-00-00")
    record = read_experiment(tmp_path)
    assert (len(record.trials), record.waiting, record.several_runs) == (2, 0, True)


def test_before_the_first_trial_begins_the_error_says_so(tmp_path):
    (tmp_path / name_of(0)).mkdir()
    write_state_of_tune(tmp_path, {name_of(0): "PENDING"}, 2, DATE)
    with pytest.raises(ExperimentError, match="no trial has begun yet"):
        read_experiment(tmp_path)


class Zeros(Searcher):
    """A search algorithm that suggests the same values every time."""

    def suggest(self, trial_id):
        return {"lag": 0}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass

    def save(self, checkpoint_path):
        pass

    def restore(self, checkpoint_path):
        pass


GRID = {"lag": tune.grid_search([0, 1]), "total_samples": 64, "array": np.zeros(3)}


@pytest.mark.parametrize(
    ("searcher", "space", "planned"),
    [
        (BasicVariantGenerator(), GRID, 6),
        (BasicVariantGenerator(random_state=0), GRID, 6),
        (SearchGenerator(Zeros()), {}, 3),
    ],
    ids=["variants", "seeded", "searcher"],
)
def test_the_state_of_tunes_searchers_tells_the_number_of_trials(
    tmp_path, searcher, space, planned
):
    experiment = Experiment("e", print, config=space, num_samples=3, storage_path=str(tmp_path))
    searcher.add_configurations([experiment])
    searcher.save_to_dir(str(tmp_path), DATE)
    of_tune(tmp_path, name_of(0), config(), [row(1)])
    state = {"trial_data": [], "stats": {"start_time": 1.0}}
    (tmp_path / f"experiment_state-{DATE}.json").write_text(json.dumps(state))
    assert read_experiment(tmp_path).waiting == planned - 1
