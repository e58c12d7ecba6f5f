"""A PBT population is one arm. Its members copy each other, so they are not compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments import config, row, write_experiment, write_trial

from reports.experiment import read_experiment
from reports.records import ExperimentRecord
from reports.report_data import report_data
from reports.summary import compare, table

LR = "optim.lr"


def rows(settings: dict[str, Any], rounds: range, reward: float, **first: Any) -> list[dict]:
    """Return rows with evaluations in even rounds. `first` adds entries to the first row."""
    found = [
        row(
            n,
            eval__round=n - n % 2,
            reward__eval_mean=reward + 0.01 * (n - n % 2),
            time__wall_clock_s=10.0 * n,
        )
        for n in rounds
    ]
    return [{**own, "config": settings, **(first if n == 0 else {})} for n, own in enumerate(found)]


def write_member(
    directory: Path, seed: int, trained: list[dict], latest: dict[str, Any] | None = None
) -> None:
    """Write a member whose params.json has the `latest` settings, as Tune leaves it."""
    trial = write_trial(directory, config("sync", seed, rounds=8), trained)
    if latest is not None:
        (trial / "params.json").write_text(json.dumps(latest))


def settings(seed: int, lr: float) -> dict[str, Any]:
    return config("sync", seed, rounds=8, **{LR: lr})


def write_population(directory: Path, **description: Any) -> ExperimentRecord:
    """Write three members. After round 4, sync/0 copies sync/2 and its seed, but not its lr."""
    write_experiment(directory, scheduler="pbt", num_samples=3, **description)
    clone = settings(2, 2.4e-4)
    trained = rows(settings(0, 1e-4), range(1, 5), 0.3)
    trained += rows(clone, range(5, 9), 0.5, copied_from="sync-2-abc_00002")
    write_member(directory, 0, trained, clone)
    for seed in (1, 2):
        write_member(directory, seed, rows(settings(seed, 2e-4), range(1, 9), 0.4))
    return read_experiment(directory)


def test_a_population_is_one_arm_with_its_members_and_without_intervals(tmp_path):
    comparison = compare(write_population(tmp_path / "pbt").trials)
    assert list(comparison.arms) == ["sync (population of 3)"]
    (found, *_) = comparison.changes["sync (population of 3)"]
    assert (found.kind, found.names) == ("member", ["sync/0", "sync/1", "sync/2"])
    (members,) = comparison.arms.values()
    assert [member.seed for member in members] == [0, 1, 2]
    assert not comparison.has_ratios
    text = table(comparison)
    assert text.splitlines()[0] == "Medians over 3 members (minimum to maximum)."
    assert "interval for" not in text
    assert "95%" not in text


def test_failed_rewards_are_not_added_up_over_copies(tmp_path):
    record = write_population(tmp_path / "pbt")
    for trial, failed in zip(record.trials, (5, 2, 5), strict=True):
        trial.rows[-1]["count/reward_errors"] = failed
    (said,) = (text for text in compare(record.trials).footnotes() if "reward failed" in text)
    assert said.endswith("Failed responses of the member with the most: 5.")


def test_the_lineage_says_what_members_were_and_when_they_copied(tmp_path):
    comparison = compare(write_population(tmp_path / "pbt").trials)
    assert comparison.lineage == [
        ("sync/0", "1-4", "0", f"{LR}=0.0001", "-", "0.340 (round 4)"),
        ("sync/0", "5-8", "2", f"{LR}=0.00024", "sync/2 after round 4", "0.580 (round 8)"),
        ("sync/1", "1-8", "1", f"{LR}=0.0002", "-", "0.480 (round 8)"),
        ("sync/2", "1-8", "2", f"{LR}=0.0002", "-", "0.480 (round 8)"),
    ]
    text = table(comparison)
    assert "sync/2 after round 4" in text
    assert "So members are not independent, and no interval" in " ".join(text.split())


def test_members_are_a_population_before_the_first_copy_too(tmp_path):
    write_experiment(tmp_path / "pbt", scheduler="pbt")
    for seed in (0, 1):
        write_member(tmp_path / "pbt", seed, rows(settings(seed, 2e-4), range(1, 4), 0.4))
    comparison = compare(read_experiment(tmp_path / "pbt").trials)
    assert list(comparison.arms) == ["sync (population of 2)"]
    assert [cells[:5] for cells in comparison.lineage] == [
        ("sync/0", "1-3", "0", "-", "-"),
        ("sync/1", "1-3", "1", "-", "-"),
    ]


def test_a_population_of_a_users_own_tuner_shows_in_its_rows(tmp_path):
    """A user's own Tuner writes no experiment.json, and older rows do not name the copied trial."""
    directory = tmp_path / "own"
    directory.mkdir()
    clone = settings(1, 2.4e-4)
    trained = rows(settings(0, 1e-4), range(1, 5), 0.3) + rows(clone, range(5, 7), 0.5)
    write_member(directory, 0, trained, clone)
    write_member(directory, 1, rows(settings(1, 2e-4), range(1, 7), 0.4))
    comparison = compare(read_experiment(directory).trials)
    assert list(comparison.arms) == ["sync (population of 2)"]
    assert comparison.lineage[1][4] == "a member that is not known, after round 4"


def test_members_with_the_same_seed_are_counted_and_named_by_tune(tmp_path):
    for name in ("GRPO_1bd_00000", "GRPO_1bd_00001"):
        own = rows(settings(0, 2e-4), range(1, 9), 0.4)
        own[4]["copied_from"] = "GRPO_1bd_00001_x"
        own = [{**values, "trial_id": name.removeprefix("GRPO_")} for values in own]
        trial = write_trial(tmp_path, config("sync", 0, rounds=8), own)
        params = json.loads((trial / "params.json").read_text())
        del params["arm"]
        (trial / "params.json").write_text(json.dumps(params))
        trial.rename(tmp_path / f"{name}_x")
    comparison = compare(read_experiment(tmp_path).trials)

    assert comparison.note() == "Medians over 2 members (minimum to maximum)."
    assert [(cells[0], cells[4]) for cells in comparison.lineage] == [
        ("GRPO_1bd_00000", "-"),
        ("GRPO_1bd_00000", "GRPO_1bd_00001 after round 4"),
        ("GRPO_1bd_00001", "-"),
        ("GRPO_1bd_00001", "GRPO_1bd_00001 after round 4"),
    ]


def write_asynchronous(directory: Path, donor: str | None) -> ExperimentRecord:
    """Write two members. After round 4, sync/0 copies sync/1, which is at round 6.

    The donor trains on 20 groups per round, and sync/0 on 16.
    """
    write_experiment(directory, scheduler="pbt", num_samples=2)
    clone = settings(1, 2.4e-4)
    trained = rows(settings(0, 1e-4), range(1, 5), 0.3)
    trained += rows(clone, range(7, 9), 0.5, copied_from=donor)
    for own, groups in zip(trained[4:], (136.0, 152.0), strict=True):
        own["count/trained"] = groups
    write_member(directory, 0, trained, clone)
    others = rows(settings(1, 2e-4), range(1, 9), 0.4)
    write_member(
        directory, 1, [{**own, "count/trained": 20.0 * n} for n, own in enumerate(others, 1)]
    )
    return read_experiment(directory)


def test_a_member_that_copies_a_later_round_has_only_its_own_rounds_and_samples(tmp_path):
    record = write_asynchronous(tmp_path / "pbt", "sync-1-abc_00001")
    comparison = compare(record.trials)
    assert [cells[:2] + cells[4:] for cells in comparison.lineage] == [
        ("sync/0", "1-4", "-", "0.340 (round 4)"),
        ("sync/0", "7-8", "sync/1 after round 6", "0.580 (round 8)"),
        ("sync/1", "1-8", "-", "0.480 (round 8)"),
    ]
    assert "its wall-clock time, device-hours and speed," in " ".join(table(comparison).split())
    assert "at a later round skips the rounds" in " ".join(table(comparison).split())
    (members,) = comparison.arms.values()
    size = record.trials[0].config.rollout.group_size
    assert [member.samples for member in members] == [6 * 16 * size, 8 * 20 * size]
    data = report_data(record, comparison, None, [], [], [], [], [], {})
    ranges = [(own["first_round"], own["last_round"]) for own in data["trials"][0]["lineage"]]
    assert ranges == [(1, 4), (7, 8)]


@pytest.mark.parametrize(
    ("donor", "replaced"),
    [("sync-9-abc_00009", False), (None, False), ("sync-1-abc_00001", True)],
    ids=["no such donor", "donor not recorded", "donor's row replaced after the copy"],
)
def test_the_samples_of_a_member_are_unknown_without_the_copied_row(tmp_path, donor, replaced):
    record = write_asynchronous(tmp_path / "pbt", donor)
    if replaced:
        path = record.trials[1].directory / "result.json"
        lines = path.read_text().splitlines()
        later = [{**json.loads(line), "timestamp": 1_796_000_000} for line in lines[5:]]
        path.write_text("\n".join([*lines[:5], *map(json.dumps, later)]))
    comparison = compare(read_experiment(tmp_path / "pbt").trials)
    (members,) = comparison.arms.values()
    size = members[1].samples
    assert [member.samples for member in members] == [None, size]
    assert size is not None


def test_a_copy_whose_rounds_were_repeated_is_told_once(tmp_path):
    """The driver was killed after round 6. The clone starts again from the donor's checkpoint."""
    directory = write_experiment(tmp_path / "pbt", scheduler="pbt")
    clone, donor = settings(1, 2.4e-4), "sync-1-abc_00001"
    trained = rows(settings(0, 1e-4), range(1, 5), 0.3)
    trained += rows(clone, range(5, 7), 0.5, copied_from=donor)
    trained += rows(clone, range(5, 9), 0.5, copied_from=donor)
    write_member(directory, 0, trained, clone)
    write_member(directory, 1, rows(settings(1, 2e-4), range(1, 9), 0.4))
    lineage = compare(read_experiment(directory).trials).lineage
    assert [cells[1] for cells in lineage] == ["1-4", "5-8", "1-8"]


def test_trials_of_another_scheduler_are_no_population(tmp_path):
    directory = write_experiment(tmp_path / "fifo")
    for seed in (0, 1):
        write_member(directory, seed, rows(settings(seed, 2e-4), range(1, 9), 0.4))
    comparison = compare(read_experiment(directory).trials)
    assert list(comparison.arms) == ["sync"]
    assert comparison.lineage == []


def test_the_lineage_is_in_the_data_of_the_report(tmp_path):
    record = write_population(tmp_path / "pbt")
    data = report_data(record, compare(record.trials), None, [], [], [], [], [], {})
    assert [trial["seed"] for trial in data["trials"]] == [0, 1, 2]
    assert data["trials"][0]["lineage"] == [
        {"first_round": 1, "last_round": 4, "settings": {LR: 1e-4}, "copied_from": None},
        {
            **{"first_round": 5, "last_round": 8, "settings": {LR: 2.4e-4}},
            "copied_from": "sync-2-abc_00002",
        },
    ]
    directory = write_experiment(tmp_path / "fifo")
    write_member(directory, 0, rows(settings(0, 2e-4), range(1, 9), 0.4))
    single = read_experiment(directory)
    data = report_data(single, compare(single.trials), None, [], [], [], [], [], {})
    assert data["trials"][0]["lineage"] is None
