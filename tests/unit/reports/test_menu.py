"""The report's menu of arms: the Pareto set, sources of noise and prices, checked by hand."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import experiments
import pytest

from launch import verdict
from launch.tune import parse_arguments
from reports import menu_text
from reports.experiment import read_experiment
from reports.margin_tests import NO_WORSE, UNDECIDED
from reports.markup import escaped
from reports.menu import Menu, MenuError, MenuRow, VerdictOptions, menu_of
from reports.menu_text import menu_data, menu_or_reason, notes, paragraph, rows, shown, table
from reports.page import _menu_section
from reports.parquet_reader import read_files
from reports.report import write_report
from reports.summary import EXACT_LAG, compare

BASE, OTHER, THIRD = "colocated_k1", "sync", "async_k1"
ROUNDS = 5
# Rewards of two prompts for each seed.
Rewards = Sequence[tuple[float, float]]


def write_arm(directory: Path, arm: str, seconds: float, rewards: Rewards, *, eval_s=0.0) -> None:
    """Write one trial per seed. A round takes `seconds`."""
    for seed, of_prompts in enumerate(rewards):
        params = experiments.config(arm, seed, rounds=5)
        rows = [
            experiments.row(
                n,
                time__wall_clock_s=seconds * n,
                time__eval_s=eval_s * (n == ROUNDS),
                eval__round=5.0,
                lag__max=float(params["lag"]),
                reward__eval_mean=sum(of_prompts) / 2,
            )
            for n in range(1, ROUNDS + 1)
        ]
        trial = experiments.write_trial(directory, params, rows)
        answers = [experiments.evaluation(5, i, "x", r) for i, r in enumerate(of_prompts)]
        experiments.write_part(trial, "evaluations", ROUNDS, answers)


def menu(directory: Path, **options: float) -> Menu:
    experiment = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    comparison = compare(experiment.trials, experiment.not_begun)
    return menu_of(experiment, comparison, files, VerdictOptions(margin=0.1, **options))


def by_arm(found: Menu) -> Mapping[str, MenuRow]:
    return {row.arm: row for row in found.rows}


LOW: Rewards = [(0.5, 0.5), (0.52, 0.5), (0.5, 0.48)]
HIGH: Rewards = [(0.7, 0.7), (0.72, 0.74), (0.7, 0.68)]


@pytest.fixture
def directory(tmp_path):
    return experiments.write_experiment(tmp_path / "e")


@pytest.mark.parametrize(
    "changes", [{"scheduler": "asha"}, None], ids=["asha of launch/tune.py", "own Tuner"]
)
def test_trials_that_a_scheduler_chose_get_no_verdict(tmp_path, changes):
    directory = experiments.write_experiment(tmp_path / "e", **(changes or {}))
    if changes is None:
        (directory / "experiment.json").unlink()
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, LOW)
    stopped = next(directory.glob(f"{OTHER}-0-*")) / "result.json"
    kept = [json.loads(line) for line in stopped.read_text().splitlines()[:-1]]
    kept[-1]["done"] = True
    stopped.write_text("".join(json.dumps(row) + "\n" for row in kept))
    reason = "a scheduler or stopper ended trials early"
    with pytest.raises(MenuError, match=reason):
        menu(directory)
    experiment = read_experiment(directory)
    found = menu_or_reason(experiment, compare(experiment.trials), {}, directory)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].startswith(f"No verdicts: {reason}")


def test_one_seed_gives_neither_a_verdict_nor_a_forecast(directory):
    write_arm(directory, BASE, 2.0, LOW[:1])
    write_arm(directory, OTHER, 2.0, [(0.4, 0.5)])
    found = menu(directory, max_seeds=20)
    judgement = by_arm(found)[OTHER].judgement
    assert judgement is not None
    assert (judgement.verdict, judgement.seeds_needed) == (UNDECIDED, None)
    said = " ".join([*paragraph(found), *notes(found)])
    assert "probably" not in said
    assert "does not show how many seeds a verdict needs. Run at least 3 seeds" in said


@pytest.mark.parametrize(
    ("seeds", "options", "name"),
    [(1, {}, "another"), (3, {}, "another"), (3, {"max_seeds": 20}, "the same")],
)
def test_advice_on_more_seeds_fits_a_users_own_tuner(directory, seeds, options, name):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * seeds)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)][:seeds])
    (directory / "experiment.json").unlink()
    said = " ".join(notes(menu(directory, **options)))
    row = by_arm(menu(directory, **options))[OTHER].judgement
    assert row is not None
    new = 3 if seeds == 1 else row.seeds_missing
    assert f'"seed": tune.grid_search([…]) with {new} new seeds' in said
    assert f"start a new Tuner with {name} name and without a search algorithm" in said
    assert "launch/tune.py" not in said


@pytest.mark.parametrize("options", [{}, {"max_seeds": 20}])
@pytest.mark.parametrize("planned", [4, 6])
def test_a_verdict_waits_until_a_users_own_tuner_has_begun_all_trials(directory, planned, options):
    write_arm(directory, BASE, 2.0, LOW[:2])
    write_arm(directory, OTHER, 2.0, LOW[:2])
    (directory / "experiment.json").unlink()
    ended = {path.name: "TERMINATED" for path in directory.iterdir()}
    experiments.write_state_of_tune(directory, ended, planned, "2026-11-28_21-17-36")
    if planned == 4:
        assert menu(directory, **options).design.anytime is bool(options)
        return
    page = write_report(directory).read_text()
    assert ": 6 trials, 0 finished, 4 still running or interrupted, 2 not started" in page
    with pytest.raises(MenuError, match="2 trials of your own Tuner have not begun"):
        menu(directory, **options)
    (directory / "experiment_state-2026-11-28_21-17-36.json").write_text("{")
    with pytest.raises(MenuError, match="unknown whether all trials have begun"):
        menu(directory, **options)


def test_seeds_that_a_second_run_of_an_own_tuner_added_need_a_test_for_any_time(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, LOW)
    (directory / "experiment.json").unlink()
    names = sorted(path.name for path in directory.iterdir())
    first = {name: "TERMINATED" for name in names if "-2-" not in name}
    second = {name: "TERMINATED" for name in names if "-2-" in name}
    experiments.write_state_of_tune(directory, first, 4, "2026-11-28_21-17-36")
    experiments.write_state_of_tune(directory, second, 2, "2026-11-28_22-17-36")
    with pytest.raises(MenuError, match=r"several times under this name.* --max-seeds N, and oth"):
        menu(directory)
    assert menu(directory, max_seeds=20).design.anytime


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        (1, ", run at least 3 seeds, the same for every arm."),
        (2, ": python launch/verdict.py "),
    ],
)
def test_without_a_margin_a_line_says_what_a_margin_would_show(directory, seeds, says):
    write_arm(directory, BASE, 2.0, LOW[:seeds])
    write_arm(directory, OTHER, 2.0, HIGH[:seeds])
    experiment = read_experiment(directory)
    found, line = menu_or_reason(experiment, compare(experiment.trials), {}, directory)
    assert found is None
    assert line is not None
    to_see = (
        "To see which arms lose less held-out reward than a margin that you choose, such as 0.03"
    )
    assert line.startswith(to_see + says)


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ([[[BASE, 2], [OTHER, 2]]], "--margin 0.03 --max-seeds 20"),
        ([[[BASE, 1], [OTHER, 1], [BASE, 2], [OTHER, 2]]], "--margin 0.03"),  # one seed before
        ([[["sync", 0], ["sync", 1], ["sync", 2]]], "--margin 0.03"),  # an added arm
    ],
)
def test_the_line_without_a_margin_names_a_command_that_is_accepted(tmp_path, added, says):
    directory = experiments.write_experiment(
        tmp_path / "e",
        extensions=[{"started": "2026-11-21T15:00:00+00:00", "planned": own} for own in added],
    )
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, HIGH)
    experiment = read_experiment(directory)
    _, line = menu_or_reason(experiment, compare(experiment.trials), {}, directory)
    assert line is not None
    assert line.endswith(f"{directory} {says}")
    status = verdict.main(shlex.split(line.partition("verdict.py ")[2]))
    assert status == 0


def test_an_arm_that_another_beats_in_all_three_is_not_in_the_pareto_set(directory):
    write_arm(directory, BASE, 2.0, LOW)
    # One core, like the baseline, but faster, cheaper and higher in reward.
    write_arm(directory, "colocated_k2", 1.0, HIGH)
    # Two cores: faster than colocated_k2 but at a higher cost.
    write_arm(directory, OTHER, 0.8, LOW)
    # Slower, more expensive and lower in reward than colocated_k2.
    write_arm(directory, THIRD, 3.0, LOW)
    found = by_arm(menu(directory))

    inside = [arm for arm, row in found.items() if row.in_pareto_set]
    assert inside == ["colocated_k2", OTHER]
    assert found["colocated_k2"].verdict == "better"
    assert found["colocated_k2"].speed is not None
    assert found["colocated_k2"].speed.value == pytest.approx(2.0)
    marked = [cells[0] for cells in rows(menu(directory))]
    assert marked == [BASE, "colocated_k2 †", f"{OTHER} †", THIRD]


def test_the_noise_of_the_evaluation_is_the_part_that_differs_by_prompt_and_seed(directory):
    # The differences are (0.2, 0), (-0.2, 0) and (0, 0), with the means 0.1, -0.1 and 0 per seed.
    # The mean square between seeds is 2 x 0.02 / 2 = 0.02. The residual mean square is
    # 4 x 0.01 / 2 = 0.02.
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=2.5)
    row = by_arm(menu(directory))[OTHER]

    assert row.noise is not None
    assert row.noise.evaluation_share == pytest.approx(1.0)
    assert row.noise.evaluation_sd == pytest.approx((0.02 / 2) ** 0.5)  # of a mean over two prompts
    # Evaluations take 2.5 of 12.5 s. So four times as many prompts cost 1.6 times as much per seed,
    # and they divide the variance by 4.
    assert row.noise.relative_cost == pytest.approx(1.6 / 4)
    assert row.noise.cheaper == "prompts"
    assert row.verdict == UNDECIDED
    said = " ".join(notes(menu(directory)))
    assert "Noise of sync: nearly all of the variance between seeds comes from the evalu" in said
    # How many prompts the task holds out is not known here, so no number is advised.
    assert (
        "In a new experiment with eval.final_prompts=8 instead of 2, if the task holds out enough, "
        "25% of the seeds would give the same precision, at 40% of the cost."
    ) in said


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        # 1.5 times as many prompts cost 1.1 times as much per seed.
        (3, "eval.final_prompts=3 instead of 2, 67% of the seeds would give the same precision, "),
        (3, ", at 73% of the cost."),
        (100, "eval.final_prompts=8 instead of 2, 25% of the seeds would give the same precision"),
        (2, "Raise eval.samples or run more seeds: the last evaluation already has all 2"),
        ("2", "if the task holds out enough"),
    ],
)
def test_advice_on_prompts_knows_how_many_the_task_holds_out(tmp_path, held_out, said):
    directory = experiments.write_experiment(tmp_path / "e", held_out_prompts=held_out)
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=2.5)
    assert said in " ".join(notes(menu(directory)))


def test_the_command_says_how_many_seeds_are_enough_with_more_prompts(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e", held_out_prompts=100)
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=2.5)
    found = menu(directory)
    row = by_arm(found)[OTHER].judgement
    assert row is not None
    assert row.seeds_needed is not None
    # All noise comes from the evaluation, so 8 prompts instead of 2 need a quarter of the seeds.
    enough = math.ceil(row.seeds_needed / 4)
    assert 2 <= enough < row.seeds_needed
    said = f"With --set eval.final_prompts=8 in addition, {enough} seeds would probably be enough."
    assert said in notes(found)[-1]


def test_the_command_of_a_new_experiment_is_complete(tmp_path, monkeypatch):
    directory = experiments.write_experiment(
        tmp_path / "e",
        samples=64,
        scheduler="asha",
        max_concurrent=2,
        fixed={"optim.lr": 2e-4, "arm": "a,b", "task.reward": "my file.py:f"},
        trackers=["wandb"],
    )
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)])
    write_arm(directory, THIRD, 2.0, [(0.7, 0.7), (0.71, 0.7), (0.72, 0.7)])  # decided
    (note,) = (text for text in notes(menu(directory)) if "To run the new experiment" in text)
    prose, _, line = note.partition("\n")
    assert "seeds of each of its arms. One after another, its trials would take " in prose
    assert " It runs 2 at a time, so expect about 1 min. To run " in prose
    assert prose.endswith("To run the new experiment (add --storage, as for this experiment):")
    monkeypatch.setattr(menu_text, "STORAGE", str(tmp_path))
    assert notes(menu(directory))[-1].endswith(f"To run the new experiment:\n{line}")
    given = parse_arguments(shlex.split(line[line.index("--space") :]))
    assert (given.space, given.samples, given.margin) == ("async_vs_sync", 64, 0.1)
    assert given.assignments == [
        *("optim.lr=0.0002", f"arm={BASE},{OTHER}", "task.reward=my file.py:f"),
    ]
    assert (given.seed, given.name, given.trackers) == (3, "e_new", ["wandb"])
    assert (given.scheduler, given.max_concurrent) == ("asha", 2)
    row = by_arm(menu(directory))[OTHER].judgement
    assert row is not None
    assert given.num_samples == row.seeds_needed
    assert line in table(menu(directory)).splitlines()  # in one piece, to copy
    assert f"<pre>{escaped(line)}</pre>" in _menu_section(menu(directory))


def test_a_new_experiment_includes_the_arms_that_an_extension_added(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e", fixed={"arm": f"{BASE},{OTHER}"})
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    for arm in (OTHER, THIRD):
        write_arm(directory, arm, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)])
    assert f"--set arm={BASE},{THIRD},{OTHER} " in notes(menu(directory))[-1].replace(
        f"{OTHER},{THIRD}", f"{THIRD},{OTHER}"
    )


def test_a_new_experiment_repeats_clear_differences(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=2.5)
    # Clearly lower, but the difference equals the margin.
    write_arm(directory, THIRD, 2.0, [(0.38, 0.4), (0.42, 0.4), (0.4, 0.4)], eval_s=2.5)
    write_arm(directory, "async_k4", 2.0, [(0.7, 0.7), (0.71, 0.7), (0.72, 0.7)])  # decided
    prose, _, line = notes(menu(directory))[-1].partition("\n")
    row = by_arm(menu(directory))[OTHER].judgement
    assert row is not None
    assert (
        f"The following command runs {row.seeds_needed} seeds of each of its arms, also of {THIRD} "
        "to check the difference in reward."
    ) in prose
    # A trial takes 5 rounds of 2 s and 2.5 s of evaluation. Three arms run.
    minutes = 3 * row.seeds_needed * 12.5 / 60
    assert f"One after another, its trials would take {minutes:.0f} min and " in prose
    assert f"a new experiment of {minutes:.0f} min and " in " ".join(paragraph(menu(directory)))
    assert f"--set arm={BASE},{THIRD},{OTHER} " in line.replace(
        f"{OTHER},{THIRD}", f"{THIRD},{OTHER}"
    )


def test_bounds_that_rest_on_seeds_that_agree_by_chance_are_named(directory):
    # The means of the seeds are 0.4, while each prompt differs from seed to seed by 0.02.
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 2.0, [(0.38, 0.42), (0.42, 0.38), (0.405, 0.4)])
    (note,) = (text for text in notes(menu(directory)) if text.startswith("Noise of sync"))
    assert "by chance, the standard deviation between its seeds (0.001) is below" in note
    assert "So its bounds may be too narrow." in note


def test_noise_that_is_the_same_for_all_prompts_needs_more_seeds(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.7), (0.3, 0.3), (0.5, 0.5)], eval_s=2.5)
    row = by_arm(menu(directory))[OTHER]

    assert row.noise is not None
    assert row.noise.evaluation_share == pytest.approx(0.0)
    assert row.noise.relative_cost == pytest.approx(1.6)
    assert row.noise.cheaper == "seeds"
    said = notes(menu(directory))
    assert any(text.startswith("Noise of sync: hardly any of the variance") for text in said)
    assert not any("the same precision" in text for text in said)


def test_a_clear_loss_is_named_although_it_may_be_acceptable(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.39, 0.39), (0.41, 0.41), (0.4, 0.4)], eval_s=2.5)
    write_arm(directory, "async_k4", 2.0, [(0.38, 0.4), (0.42, 0.4), (0.4, 0.4)], eval_s=2.5)
    write_arm(directory, THIRD, 2.0, [(0.7, 0.7), (0.3, 0.3), (0.5, 0.4)], eval_s=2.5)
    found = menu(directory)
    assert {row.verdict for row in found.others} == {UNDECIDED}
    clear = [text for text in paragraph(found) if "clearly below" in text]
    assert clear == [
        f"By the report's list “Which arms differ”, {OTHER} and async_k4 are "
        f"clearly below {BASE} in reward, but the stricter bounds of the menu do not show whether "
        "they lose more than 0.1."
    ]
    # The difference equals the margin, so no number of seeds would be enough.
    (far,) = (text for text in paragraph(found) if OTHER in text and "more than 50 seeds" in text)
    assert far.startswith(f"{OTHER} (at the margin)")
    # So a note advises more prompts if they help, but never more seeds.
    noise = {
        arm: [t for t in notes(found) if t.startswith(f"Noise of {arm}:")] for arm in by_arm(found)
    }
    assert noise[OTHER] == []
    assert len(noise["async_k4"]) == 1
    assert any("at 40% of the cost" in text for text in notes(found))


@pytest.mark.parametrize(
    ("eval_s", "said"),
    [
        (0.0, "at 25% of the cost"),
        (100.0, "more prompts cost about as much as more seeds."),
    ],
)
def test_a_note_on_noise_names_the_cheaper_way_to_reduce_it(directory, eval_s, said):
    # The whole scatter comes from the evaluation, so four times as many prompts quarter it.
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=eval_s)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=eval_s)
    assert said in " ".join(notes(menu(directory)))


def test_arms_with_the_same_advice_on_noise_share_a_note(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3, eval_s=2.5)
    write_arm(directory, OTHER, 2.0, [(0.7, 0.5), (0.3, 0.5), (0.5, 0.5)], eval_s=2.5)
    write_arm(directory, THIRD, 2.0, [(0.5, 0.7), (0.5, 0.3), (0.5, 0.5)])
    (note,) = (text for text in notes(menu(directory)) if text.startswith("sync and async_k1: "))
    assert note == (
        "sync and async_k1: in a new experiment with eval.final_prompts=8 instead of 2, if the "
        "task holds out enough, 25% of the seeds would give the same precision, at 33% to 40% of "
        "the cost."
    )


def test_one_seed_is_not_clearly_better_or_worse(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.52)])
    write_arm(directory, OTHER, 2.0, [(0.4, 0.4199)])
    (row,) = menu(directory, max_seeds=20).others
    assert row.reward is not None
    assert row.reward.told_apart
    said = " ".join(paragraph(menu(directory, max_seeds=20)))
    assert " is clearly below " not in said


def test_faster_arms_are_named_first(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 1.0, [(0.5, 0.5)] * 3)
    write_arm(directory, THIRD, 1.9, [(0.5, 0.5)] * 3)
    first, *_ = paragraph(menu(directory))
    assert first.startswith(
        f"Faster than {BASE}: {OTHER} (2.00 times as many samples per second, 95% interval: "
    )


def test_the_price_in_the_data_is_that_of_the_new_experiment(directory):
    # A trial of an arm takes 1, 2 and 3 minutes.
    write_arm(directory, BASE, 12.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 24.0, [(0.6, 0.6), (0.5, 0.5), (0.4, 0.4)])
    write_arm(directory, THIRD, 36.0, [(0.7, 0.7), (0.5, 0.5), (0.3, 0.3)])
    found = menu(directory)
    needed = [row.judgement and row.judgement.seeds_needed for row in found.others]
    assert None not in needed
    assert needed[0] < needed[1]
    # The command runs the larger number of seeds of all arms.
    assert menu_data(found)["price"]["minutes"] == pytest.approx(6 * needed[1])


def test_a_speed_that_may_be_wrong_does_not_make_an_arm_the_fastest(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 1.0, [(0.5, 0.5)] * 3)
    write_arm(directory, THIRD, 2.5, [(0.5, 0.5)] * 3)
    spoil(directory, OTHER)  # it may be faster, so nothing is said
    assert paragraph(menu(directory))[0].startswith("Can another arm replace")
    spoil(directory, THIRD)
    assert paragraph(menu(directory))[0].startswith("Speeds cannot be compared")


def test_trials_at_a_time_shorten_the_estimate_by_whole_trials(tmp_path):
    # A trial takes one minute.
    directory = experiments.write_experiment(tmp_path / "e", max_concurrent=7)
    write_arm(directory, BASE, 12.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 12.0, [(0.6, 0.6), (0.5, 0.5), (0.4, 0.4)])
    found = menu(directory)
    (row,) = found.others
    assert row.judgement is not None
    seeds = row.judgement.seeds_needed or 0
    minutes = math.ceil(2 * seeds / 7)
    assert f" It runs 7 at a time, so expect about {minutes} min." in notes(found)[-1]


def test_the_price_counts_the_trials_of_the_baseline_once(directory):
    write_arm(directory, BASE, 12.0, [(0.5, 0.5)] * 3)
    for arm, seconds in ((OTHER, 24.0), (THIRD, 6.0)):
        write_arm(directory, arm, seconds, [(0.6, 0.6), (0.5, 0.5), (0.4, 0.4)])
    found = menu(directory, max_seeds=50)

    first, second = (row.judgement and row.judgement.seeds_missing for row in found.others)
    assert first == second
    assert first is not None
    assert first > 0
    assert found.price is not None
    assert found.price.minutes == pytest.approx(first * (1 + 2 + 0.5))
    price = by_arm(found)[OTHER].price
    assert price is not None
    assert price.minutes == pytest.approx(first * (1 + 2))
    (said,) = (text for text in paragraph(found) if text.startswith("Deciding"))
    assert said.startswith(f"Deciding them would probably take {found.price.minutes:.0f} min and ")


def test_only_an_arm_with_the_same_rounds_is_a_copy(directory):
    """Write two arms with perfect rewards. Only one equals the baseline in every round."""
    perfect: Rewards = [(1.0, 1.0)] * 3
    for arm in (BASE, OTHER, THIRD):
        write_arm(directory, arm, 2.0, perfect)
    for path in directory.glob(f"{THIRD}-*/result.json"):
        path.write_text(
            path.read_text().replace('"reward/train_mean": 0.4', '"reward/train_mean": 0.5')
        )
    found = by_arm(menu(directory))

    assert (found[OTHER].verdict, found[THIRD].verdict) == (NO_WORSE, UNDECIDED)


def spoil(directory: Path, arm: str) -> None:
    """Mark every round of an arm as disturbed by other processes."""
    for path in directory.glob(f"{arm}-*/result.json"):
        path.write_text(
            path.read_text().replace('"lag/max"', '"time/disturbed_fraction": 0.9, "lag/max"')
        )


def load(directory: Path) -> None:
    """Mark every round as disturbed, and count disturbed rounds."""
    for arm in (BASE, OTHER):
        spoil(directory, arm)
    for path in directory.glob("*/params.json"):
        params = json.loads(path.read_text())
        params["callbacks"]["leave_out_disturbed"] = False
        path.write_text(json.dumps(params))


def test_the_opening_names_a_speed_only_if_it_differs_clearly_in_undisturbed_rounds(directory):
    def opening() -> str:
        (said,) = (text for text in paragraph(menu(directory)) if text.startswith("Yes"))
        return said.partition("; ")[2]

    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 1.0, LOW)  # two cores instead of one, so the cost is equal
    assert opening() == ("2.00 times as fast; no clear difference in samples per device-hour).")
    # Now the three seeds are 2, 1 and 0.67 times as fast.
    for slower, path in enumerate(sorted(directory.glob(f"{OTHER}-*/result.json")), 1):
        changed = [json.loads(line) for line in path.read_text().splitlines()]
        for row in changed:
            row["time/wall_clock_s"] *= slower
        path.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
    assert opening() == "no clear difference in speed or samples per device-hour)."
    load(directory)
    assert opening() == "other processes disturbed the speeds)."
    told = notes(menu(directory))
    counted = f"({BASE}: 15 of 15 rounds, 90%; {OTHER}: 15 of 15 rounds, 90%)."
    assert any(
        text.startswith(f"*: this speed includes rounds that other processes disturbed {counted}")
        for text in told
    )
    (cells,) = (cells for cells in rows(menu(directory)) if cells[0].startswith(OTHER))
    assert cells[1].endswith(" *")


def starred(directory: Path) -> list[str]:
    return [row.arm for row in menu(directory).rows if row.in_pareto_set]


def test_a_disturbed_arm_has_no_speed_and_still_a_verdict(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, LOW)
    spoil(directory, OTHER)
    row = by_arm(menu(directory))[OTHER]

    assert (row.speed, row.cost, row.verdict) == (None, None, NO_WORSE)
    told = paragraph(menu(directory))
    assert (
        f"Yes, any loss is below the margin: {OTHER} (it learned exactly the same as {BASE})."
        in told
    )
    assert any(text.startswith("Speeds cannot be compared, because other") for text in told)
    # Nothing is compared with the baseline, so it has no ratio either.
    assert [cells[1:3] for cells in rows(menu(directory))] == [("-", "-"), ("?", "?")]
    assert shown(menu(directory))[0] == ("arm", "reward difference", "verdict", "seeds")


def test_a_price_says_if_other_processes_slowed_the_trials(directory):
    write_arm(directory, BASE, 2.0, [(0.5, 0.5)] * 3)
    write_arm(directory, OTHER, 2.0, [(0.6, 0.6), (0.5, 0.5), (0.4, 0.4)])
    doubt = "These times are rough, because other processes slowed some of the trials."
    assert doubt not in " ".join(notes(menu(directory)))
    assert "roughly" not in " ".join(paragraph(menu(directory)))
    spoil(directory, OTHER)
    assert doubt in notes(menu(directory))[-1]
    assert "a new experiment of roughly" in " ".join(paragraph(menu(directory)))


def test_only_an_undecided_arm_has_a_power_and_an_explanation_of_it(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, LOW)
    (note, *_) = notes(menu(directory))
    assert "Power if equal:" not in note
    assert "To decide:" not in note
    assert "The bounds are valid if you test once, after all planned seeds (3)." in note

    write_arm(directory, THIRD, 2.0, [(0.7, 0.7), (0.3, 0.3), (0.5, 0.4)])
    powers = {cells[0].removesuffix(" †"): cells[6] for cells in rows(menu(directory))}
    assert by_arm(menu(directory))[THIRD].verdict == UNDECIDED
    assert powers[OTHER] == "-"
    assert powers[THIRD].endswith("%")
    assert "Power if equal: the chance" in " ".join(notes(menu(directory)))


def test_an_arm_that_is_worse_has_a_least_loss(directory):
    write_arm(directory, BASE, 2.0, HIGH)
    write_arm(directory, OTHER, 2.0, [(0.4, 0.4), (0.4, 0.42), (0.39, 0.4)])
    row = by_arm(menu(directory))[OTHER]
    assert row.judgement is not None
    assert row.judgement.high is not None
    (said,) = (text for text in paragraph(menu(directory)) if text.startswith("No, the loss"))
    assert f", a loss of at least {-row.judgement.high:.3f};" in said


def test_the_speed_of_an_exact_lag_is_not_asked_for(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, THIRD, 2.0, LOW)
    spoil(directory, THIRD)
    for path in directory.glob(f"{THIRD}-*/params.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "lag_mode": "exact"}))
    said = paragraph(menu(directory))
    assert said[-1] == EXACT_LAG
    assert "cannot be compared" not in " ".join(said)


@pytest.mark.slow
def test_a_menu_without_speeds_has_no_plot_and_no_heading_of_one(tmp_path):
    from reports.report import write_report

    directory = experiments.write_experiment(tmp_path / "e", margin=0.1)
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, OTHER, 2.0, LOW)
    assert "The menu as a plot" in write_report(directory, warn=lambda text: None).read_text()
    spoil(directory, OTHER)
    assert "The menu as a plot" not in write_report(directory, warn=lambda text: None).read_text()
    assert not (directory / "plots" / "menu.png").exists()


def test_an_arm_without_a_speed_gets_no_dagger(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, "colocated_k2", 1.0, HIGH)
    assert starred(directory) == ["colocated_k2"]
    spoil(directory, "colocated_k2")
    # Only the baseline has a speed now, so no arms can be compared.
    assert starred(directory) == []
    assert "speed-up" not in shown(menu(directory))[0]
    assert not any("†" in note or "dagger" in note for note in notes(menu(directory)))
    write_arm(directory, OTHER, 0.8, LOW)
    assert starred(directory) == [BASE, OTHER]
    (speed,) = (row[1] for row in shown(menu(directory)) if row[0] == "colocated_k2")
    assert speed == "?"
    left_out = "Left out, because not all three can be compared: colocated_k2."
    assert notes(menu(directory))[0].endswith(f"(Pareto set). {left_out}")


def test_an_exact_lag_gets_no_dagger_and_its_arms_are_named(directory):
    write_arm(directory, BASE, 2.0, LOW)
    write_arm(directory, THIRD, 1.0, HIGH)
    write_arm(directory, "async_k4", 0.8, LOW)
    for path in directory.glob(f"{THIRD}-*/params.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "lag_mode": "exact"}))
    assert starred(directory) == [BASE, "async_k4"]
    assert notes(menu(directory))[0].endswith(f"not all three can be compared: {THIRD}.")
    assert paragraph(menu(directory))[-1] == f"{EXACT_LAG} Arms with an exact lag: {THIRD}."
