"""`launch/verdict.py`: its output and exit status. A mistake gives one line and status 2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import experiments
import pytest

from launch import verdict
from tuning.directories import held

BASE, OTHER, THIRD = "colocated_k1", "sync", "async_k1"
ROUNDS = 5
SAME = {BASE: (0.60, 0.62, 0.58, 0.61), OTHER: (0.61, 0.61, 0.58, 0.61)}


def write(directory: Path, arms: Mapping[str, Sequence[float]], **description: object) -> Path:
    """Write an experiment with a final held-out reward for each arm and seed.

    A trial takes 60 s, plus 6 s of evaluation.
    """
    experiments.write_experiment(directory, **description)
    for arm, rewards in arms.items():
        for seed, reward in enumerate(rewards):
            params = experiments.config(arm, seed, rounds=ROUNDS)
            rows = [
                experiments.row(
                    n,
                    time__wall_clock_s=12.0 * n,
                    time__eval_s=6.0 * (n == ROUNDS),
                    eval__round=5.0,
                    lag__max=float(params["lag"]),
                )
                for n in range(1, ROUNDS + 1)
            ]
            for row in rows:
                row["reward/eval_mean"] = reward
            rows[-1]["done"] = True
            experiments.write_trial(directory, params, rows)
    return directory


@pytest.fixture
def command(capsys):
    """Return a function that runs the command, and returns its status, output and errors."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = verdict.main([str(word) for word in argv])
        return (status, *capsys.readouterr())

    return run


def refused(outcome: tuple[int, str, str], *words: str) -> None:
    status, output, errors = outcome
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    for word in words:
        assert word in errors


@pytest.mark.parametrize(
    ("arms", "status"),
    [
        (SAME, 0),
        ({**SAME, THIRD: (0.70, 0.71, 0.69, 0.72)}, 0),
        ({**SAME, THIRD: (0.70, 0.40, 0.69, 0.50)}, 4),
        ({**SAME, THIRD: (0.30, 0.31, 0.29, 0.32)}, 3),
        ({OTHER: (0.7, 0.4, 0.6, 0.5), BASE: SAME[BASE], THIRD: (0.30, 0.31, 0.29, 0.32)}, 3),
    ],
)
def test_the_exit_status_is_that_of_the_worst_arm(command, tmp_path, arms, status):
    found, output, errors = command(write(tmp_path / "e", arms), "--margin", 0.03)

    assert (found, errors) == (status, "")
    assert "Can another arm replace colocated_k1" in output


def test_the_menu_is_a_paragraph_a_table_and_notes(command, tmp_path):
    arms = {**SAME, THIRD: (0.70, 0.40, 0.69, 0.50)}
    _, output, _ = command(write(tmp_path / "e", arms), "--margin", 0.03)

    told = " ".join(output.split())
    assert (
        "Yes, any loss is below the margin: sync (reward difference +0.000, at worst -0.0" in told
    )
    assert re.search(
        r"Undecided \(brackets: difference in reward\): async_k1 \([+-]0\.\d{3}\)\. ", told
    )
    (line,) = (line for line in output.splitlines() if line.startswith("sync "))
    assert "no worse" in line
    (line,) = (line for line in output.splitlines() if line.startswith("async_k1 "))
    assert "undecided" in line
    assert "seeds" in line
    assert "Holm's correction over 2 arms" in told
    assert told.endswith("samples). The report has the figures.")


def test_json_has_the_same_menu(command, tmp_path):
    experiment = write(tmp_path / "e", SAME)
    status, output, _ = command(experiment, "--margin", 0.03, "--json")
    menu = json.loads(output)

    assert menu["status"] == status == 0
    assert (menu["baseline"], menu["margin"], menu["mode"]) == (BASE, 0.03, "fixed")
    assert menu["arms"][OTHER]["verdict"] == "no worse"
    assert menu["arms"][OTHER]["seeds"] == 4
    assert menu["arms"][BASE]["verdict"] is None
    assert menu["price"] is None


def test_an_undecided_arm_says_what_a_decision_costs(command, tmp_path):
    # Each seed needs two trials of 66 s. One arm reserves one core, and the other reserves two.
    experiment = write(tmp_path / "e", {BASE: (0.6, 0.6, 0.6), OTHER: (0.62, 0.56, 0.6)})
    options = ("--margin", 0.03, "--max-seeds", 50)
    status, output, _ = command(experiment, *options, "--json")
    found = json.loads(output)["arms"][OTHER]
    missing = found["seeds_missing"]

    assert (status, found["verdict"]) == (4, "undecided")
    assert found["seeds_needed"] == missing + 3 > 3
    assert found["price"]["minutes"] == pytest.approx(missing * 2 * 66 / 60)
    assert json.loads(output)["price"] == pytest.approx(found["price"])
    assert found["price"]["device_hours"] == pytest.approx(missing * 66 * (1 + 2) / 3600, rel=0.06)


def test_a_relative_margin_is_a_share_of_the_baseline(command, tmp_path):
    experiment = write(tmp_path / "e", SAME)
    status, output, _ = command(experiment, "--margin-relative", 0.05, "--json")
    menu = json.loads(output)

    assert status == 0
    assert menu["margin"] == pytest.approx(0.05 * 0.6025)
    assert menu["margin_relative"] == 0.05


def test_recorded_options_apply_and_the_command_line_overrides_them(command, tmp_path):
    experiment = write(tmp_path / "e", SAME, margin=0.2, baseline=OTHER)
    _, output, _ = command(experiment, "--json")
    assert (json.loads(output)["margin"], json.loads(output)["baseline"]) == (0.2, OTHER)
    _, output, _ = command(experiment, "--json", "--margin-relative", 0.1, "--baseline", BASE)
    menu = json.loads(output)
    assert (menu["margin_relative"], menu["baseline"]) == (0.1, BASE)


def test_at_any_time_means_before_all_planned_seeds_are_complete(command, tmp_path):
    arms = {BASE: (0.60, 0.62, 0.58, 0.61), OTHER: (0.601, 0.62, 0.58)}
    experiment = write(tmp_path / "e", arms)
    refused(command(experiment, "--margin", 0.2), "sync has 3 of 4 planned seeds", "--max-seeds N")
    status, output, _ = command(experiment, "--margin", 0.2, "--max-seeds", 20, "--json")
    assert status == 0
    assert json.loads(output)["mode"] == "anytime"


PLANNED = [(arm, seed) for arm in (BASE, OTHER, THIRD) for seed in range(4)]


def test_a_planned_arm_without_results_is_undecided(command, tmp_path):
    experiment = write(tmp_path / "e", SAME, planned=PLANNED)
    status, output, _ = command(experiment, "--margin", 0.03)

    assert status == 4
    assert "Undecided: async_k1." in output
    assert "async_k1 has no completed seed in common with colocated_k1." in output
    assert "A fixed number of seeds allows only one test" not in output
    line = next(line for line in output.splitlines() if line.startswith("async_k1 "))
    # No arm is undecided after a test, so there are no columns “power” and “to decide”.
    assert line.split() == ["async_k1", "-", "-", "-", "undecided", "0"]


def test_another_arm_does_not_silently_take_the_place_of_the_first(command, tmp_path):
    arms = {OTHER: SAME[OTHER], THIRD: SAME[BASE]}
    experiment = write(tmp_path / "e", arms, planned=PLANNED)
    refused(command(experiment, "--margin", 0.03), "the first arm, colocated_k1, has no results")
    assert command(experiment, "--margin", 0.03, "--baseline", OTHER)[0] == 4


def test_trials_that_failed_are_named(command, tmp_path):
    experiment = write(tmp_path / "e", {**SAME, BASE: (*SAME[BASE], 0.6)})
    failed = experiments.config(OTHER, 4, rounds=ROUNDS)
    experiments.write_trial(experiment, failed, [experiments.row(1)], error="ValueError: no")
    status, output, _ = command(experiment, "--margin", 0.03, "--max-seeds", 20)

    assert status == 0
    assert "do not count: 1 of sync." in " ".join(output.split())


@pytest.mark.parametrize("margin", ["0", "-0.03", "nan", "x"])
@pytest.mark.parametrize("option", ["--margin", "--margin-relative"])
def test_a_margin_must_be_above_0(command, tmp_path, option, margin):
    refused(command(tmp_path, f"{option}={margin}"), option, "must be a number", margin)


@pytest.mark.parametrize(
    ("margin", "advice"), [("5", "5 %, write 0.05"), ("1", "1 %, write 0.01"), ("100", "below 1")]
)
def test_a_relative_margin_is_no_percentage(command, tmp_path, margin, advice):
    refused(command(tmp_path, "--margin-relative", margin), "--margin-relative", advice)


def test_mistakes_are_one_line_and_status_2(command, tmp_path):
    experiment = write(tmp_path / "e", SAME)
    refused(command(experiment), "--margin is missing")
    options = ("--margin", 0.03)
    refused(command(experiment, *options, "--margin-relative", 0.1), "not allowed with")
    refused(command(experiment, *options, "--baseline", "synk"), "synk", "did you mean sync?")
    refused(command(experiment, *options, "--baseline", "x"), "the arms are colocated_k1, sync")
    refused(
        command(experiment, *options, "--max-seeds", 3),
        "--max-seeds 3: 4 seeds are already complete",
    )
    refused(command(experiment, *options, "--max-seeds", 2), "--max-seeds", "[3, 50]")
    refused(command(tmp_path / "none", *options), "does not exist")
    refused(command(tmp_path / "e" / "experiment.json", *options), "is not a directory")
    alone = write(tmp_path / "alone", {BASE: (0.6, 0.7)})
    refused(command(alone, *options), "results for only one arm")
    broken = write(tmp_path / "broken", SAME, margin="wide")
    refused(command(broken), "experiment.json: margin: must be a number above 0")
    below = write(tmp_path / "below", {arm: [-r for r in own] for arm, own in SAME.items()})
    refused(command(below, "--margin-relative", 0.1), "reward above 0", "use --margin")


def test_a_baseline_without_seeds_in_common_is_refused(command, tmp_path):
    experiment = write(tmp_path / "e", {BASE: (0.6, 0.7)})
    rows = [experiments.row(n, eval__round=5.0) for n in range(1, ROUNDS + 1)]
    experiments.write_trial(experiment, experiments.config(OTHER, 7, rounds=ROUNDS), rows)
    refused(command(experiment, "--margin", 0.03), "seed in common with the baseline colocated_k1")


def test_an_experiment_of_a_running_command_is_refused(command, tmp_path):
    experiment = write(tmp_path / "e", SAME)
    with held(experiment):
        refused(command(experiment, "--margin", 0.03), "a command is running this experiment")
    assert command(experiment, "--margin", 0.03)[0] == 0


def test_a_fixed_number_of_seeds_gives_no_verdict_after_seeds_were_added(command, tmp_path):
    added = [{"started": "2026-11-21T15:00:00+00:00", "planned": [[BASE, 3], [OTHER, 3]]}]
    experiment = write(tmp_path / "e", SAME, extensions=added)
    refused(command(experiment, "--margin", 0.03), "seeds were added", "--max-seeds N")
    status, _, _ = command(experiment, "--margin", 0.03, "--max-seeds", 10)
    assert status in (0, 4)


def test_one_seed_allows_no_test_so_seeds_may_be_added_to_it_once(command, tmp_path):
    def of(*seeds: int) -> dict[str, object]:
        planned = [[arm, seed] for arm in (BASE, OTHER) for seed in seeds]
        return {"started": "2026-11-21T15:00:00+00:00", "planned": planned}

    once = write(tmp_path / "once", SAME, extensions=[of(1, 2, 3)])
    status, output, _ = command(once, "--margin", 0.03, "--json")
    assert (status, json.loads(output)["mode"], json.loads(output)["most_seeds"]) == (0, "fixed", 4)
    twice = write(tmp_path / "twice", SAME, extensions=[of(1, 2), of(3)])
    refused(command(twice, "--margin", 0.03), "seeds were added", "--max-seeds N")


def test_to_decide_counts_the_seeds_that_the_note_says_how_to_run(command, tmp_path):
    def told(arms: Mapping[str, Sequence[float]], *options: object) -> tuple[dict, str]:
        experiment = write(tmp_path / f"e{len(arms)}{len(arms[BASE])}{len(options)}", arms)
        _, output, _ = command(experiment, "--margin", 0.03, *options, "--json")
        menu = json.loads(output)
        _, output, _ = command(experiment, "--margin", 0.03, *options)
        return menu, " ".join(output.split())

    wide = {BASE: SAME[BASE], OTHER: (0.65, 0.57, 0.63, 0.56)}
    # After one seed, more seeds are added to the same experiment, but nothing tells how many.
    menu, text = told({BASE: (0.6,), OTHER: (0.7,)})
    assert menu["arms"][OTHER]["seeds_missing"] is None
    assert "To decide" not in text
    assert "launch/tune.py --extend --num-samples 3, with the --name and --storage of" in text
    # With a maximum, a forecast counts the seeds to add.
    menu, text = told(wide, "--max-seeds", 50)
    own = menu["arms"][OTHER]
    assert own["seeds_missing"] == own["seeds_needed"] - 4 > 0
    assert "To decide: the number of further seeds that" in text
    assert f"launch/tune.py --extend --num-samples {own['seeds_needed']}, with" in text
    assert "device-hours more." in text
    # After the test of a fixed number of seeds, a new experiment has to run all of them.
    menu, text = told(wide)
    own = menu["arms"][OTHER]
    assert own["seeds_missing"] == own["seeds_needed"] > 0
    assert "To decide: the number of seeds of a new experiment that" in text
    assert f"--num-samples {own['seeds_needed']} --seed 4 --name e240_new" in text
    assert "command includes" not in text
    assert "--extend" not in text
    assert "would probably take a new experiment of " in text
    # The printed command runs every arm, and the price counts the undecided arm.
    menu, text = told({**wide, THIRD: SAME[OTHER]}, "--max-seeds", 50)
    needed = menu["arms"][THIRD]["seeds_needed"]
    assert f"This command includes {needed} seeds of {OTHER}, so it takes longer" in text
    # A new experiment runs only the arms that need it.
    _, text = told({**wide, THIRD: SAME[OTHER]})
    assert f"--set arm={BASE},{OTHER} " in text


def test_a_recorded_maximum_is_used_and_no_other_is_accepted(command, tmp_path):
    experiment = write(tmp_path / "e", SAME, margin=0.03, max_seeds=10)
    _, output, _ = command(experiment, "--json")
    assert (json.loads(output)["mode"], json.loads(output)["most_seeds"]) == ("anytime", 10)
    refused(command(experiment, "--max-seeds", 20), "--max-seeds 20", "started with 10")
    experiment = write(tmp_path / "wrong", SAME, margin=0.03, max_seeds="ten")
    refused(command(experiment), "max_seeds: must be an integer in [3, 50]")
