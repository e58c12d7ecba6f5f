"""Differences between arms in simulated experiments: their size, comparability and wording."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiments
import numpy as np
import pytest
from a_a import drawn, verdict
from matplotlib.figure import Figure

from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE
from reports import changes
from reports.canvas import LIGHT, Plot
from reports.contrasts import Contrast, reward_difference, speed_up
from reports.every_pair import every_pair, neighbours
from reports.experiment import read_experiment
from reports.intervals import Estimate, Spread
from reports.own_files import changed_code
from reports.pace import pace_of
from reports.page import _clear_elsewhere
from reports.parquet_reader import read_files, scores_text
from reports.plots import BANDS, _held_out_of, _sampled, sections
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import (
    ADVICE,
    COVERS,
    EXACT_LAG,
    MOST_OTHERS,
    OTHER_WEIGHTS,
    UNEQUAL,
    Comparison,
    compare,
    on_equal_devices,
    relative_to,
    show,
    table,
)
from reports.verdicts import (
    ONE_SEED,
    _advice,
    before_and_after,
    quantities,
    short_answer,
    verdicts,
)
from search_spaces import SPACES

BASE, OTHER, THIRD = "colocated_k1", "sync", "async_k1"
ROUNDS = 16


def rows(
    rng: np.random.Generator, slower: float = 1.0, others: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Return rounds of about one second. Rounds scatter by 8 %, and whole runs by 4 %."""
    drift = slower * math.exp(rng.normal(0, 0.04))
    wall_clock_s = np.cumsum(drift * np.exp(rng.normal(0, 0.08, ROUNDS)))
    shares = [*others, *[0.01] * (ROUNDS - len(others))]
    return [
        experiments.row(n, time__wall_clock_s=float(at), time__disturbed_fraction=share)
        for n, (at, share) in enumerate(zip(wall_clock_s, shares, strict=True), start=1)
    ]


def write(directory: Path, arms: Mapping[str, Sequence[list[dict[str, Any]]]]) -> ExperimentRecord:
    """Write one trial per seed with `ROUNDS` rounds of 64 responses."""
    experiments.write_experiment(directory)
    for arm, seeds in arms.items():
        for seed, own in enumerate(seeds):
            experiments.write_trial(directory, experiments.config(arm, seed, rounds=ROUNDS), own)
    return read_experiment(directory)


def told(record: ExperimentRecord) -> list[str]:
    comparison = compare(record.trials)
    files = {trial.name: read_files(trial) for trial in record.trials}
    return verdicts(quantities(record, comparison, files), comparison)


@pytest.mark.slow
def test_equal_arms_are_not_told_apart_and_one_slowed_by_15_percent_is(tmp_path):
    """Check 20 experiments of five seeds, read from disk."""
    apart = {OTHER: 0, THIRD: 0}
    for repeat in range(20):
        rng = np.random.default_rng(repeat)
        arms = {BASE: 1.0, OTHER: 1.0, THIRD: 1.15}
        runs = {arm: [rows(rng, slower) for _ in range(5)] for arm, slower in arms.items()}
        speed = compare(write(tmp_path / str(repeat), runs).trials).speed
        for arm in apart:
            apart[arm] += speed[arm].told_apart is True
        assert speed[THIRD].value == pytest.approx(1 / 1.15, rel=0.12)

    assert apart[OTHER] <= 1
    assert apart[THIRD] >= 19


def test_cost_is_charged_for_the_cores_that_an_arm_reserves(tmp_path):
    rng = np.random.default_rng(0)
    runs = [rows(rng)] * 3
    found = compare(write(tmp_path / "e", {BASE: runs, OTHER: runs}).trials)

    assert found.speed[OTHER].value == pytest.approx(1.0)
    assert found.cost[OTHER].value == pytest.approx(0.5)  # two cores for the same speed
    assert found.cost[OTHER].interval is not None
    assert found.cost[OTHER].interval.high == pytest.approx(0.5)


# ---- Disturbed rounds ------------------------------------------------------------------------


def one(tmp_path: Path, own: list[dict[str, Any]]) -> TrialRecord:
    (trial,) = write(tmp_path / "one", {BASE: [own]}).trials
    return trial


def test_a_disturbed_round_is_left_out_of_the_speed(tmp_path):
    # The rounds take 1, 1, 9 and 1 s for 64 responses each. The third was disturbed by other work.
    at = (1.0, 2.0, 11.0, 12.0)
    shares = (0.0, DISTURBED_ABOVE, DISTURBED_ABOVE + 0.01, 0.0)
    own = [
        experiments.row(n, time__wall_clock_s=seconds, time__disturbed_fraction=share)
        for n, (seconds, share) in enumerate(zip(at, shares, strict=True), start=1)
    ]
    # Another clean round, so that four clean rounds remain.
    own.append(experiments.row(5, time__wall_clock_s=13.0, time__disturbed_fraction=0.0))
    found = one(tmp_path, own).pace

    assert found is not None
    assert (found.rounds, found.disturbed, found.comparable) == (5, 1, True)
    assert found.samples_per_s == pytest.approx(64.0)


@pytest.mark.parametrize(
    ("disturbed", "rounds", "comparable"),
    [(0, 1, True), (0, 3, True), (1, 3, False), (8, 16, True), (9, 16, False), (4, 7, False)],
)
def test_half_of_the_rounds_and_four_of_them_must_be_undisturbed(
    tmp_path, disturbed, rounds, comparable
):
    own = [
        experiments.row(n, time__wall_clock_s=float(n), time__disturbed_fraction=float(share))
        for n, share in enumerate([0.9] * disturbed + [0.0] * (rounds - disturbed), start=1)
    ]
    found = one(tmp_path, own).pace

    assert found is not None
    assert found.comparable is comparable
    # Without enough undisturbed rounds, all rounds count.
    assert len(found.seconds) == (rounds - disturbed if comparable else rounds)


def test_no_round_is_left_out_where_the_trial_says_so(tmp_path):
    own = [
        experiments.row(n, time__wall_clock_s=float(n), time__disturbed_fraction=0.9)
        for n in range(1, 9)
    ]
    trial = one(tmp_path, own)
    callbacks = replace(trial.config.callbacks, leave_out_disturbed=False)
    found = pace_of(trial.rows, replace(trial.config, callbacks=callbacks))

    assert found is not None
    assert (len(found.seconds), found.comparable) == (8, True)
    assert (found.disturbed, found.others) == (8, pytest.approx(0.9))


def counting(directory: Path, runs: Mapping[str, list[dict[str, Any]]]) -> ExperimentRecord:
    """Write one trial per arm, with settings that include disturbed rounds in the speed."""
    asked = {"rounds": ROUNDS, "callbacks.leave_out_disturbed": False}
    experiments.write_experiment(directory)
    for arm, own in runs.items():
        experiments.write_trial(directory, experiments.config(arm, 0, **asked), own)
    return read_experiment(directory)


def test_disturbed_rounds_that_count_are_named_wherever_their_speed_is(tmp_path):
    rng = np.random.default_rng(0)
    loaded = {BASE: [0.3] * 4, OTHER: [0.4] * 16, THIRD: []}
    runs = {arm: rows(rng, 1.6, load) for arm, load in loaded.items()}
    record = counting(tmp_path / "counted", runs)
    comparison = compare(record.trials)
    cells = {row[0]: row for row in comparison.rows()}
    base, other = f"{BASE}: 4 of 16 rounds, 30%", f"{OTHER}: 16 of 16 rounds, 40%"

    assert [cells[arm][4].endswith("*") for arm in loaded] == [True, True, False]
    # their speed-ups are relative to a disturbed baseline
    assert all(cells[arm][5].endswith("*") for arm in (OTHER, THIRD))
    words = " ".join(table(comparison).split())
    assert (
        f"*: speeds include rounds that other processes disturbed "
        f"(callbacks.leave_out_disturbed=false): {base}; " in words
    )
    assert (
        f"{base}; {other}. The percentage is the share of the machine's CPU time "
        "that other processes took." in words
    )
    assert "Excluded from speed comparisons" not in words
    speed = [sentence for sentence in told(record) if "samples per second" in sentence]
    assert any(f"disturbed ({base}; {other})" in text for text in speed)
    assert any(f"disturbed ({base}))" in text for text in speed)
    assert not any("disturbed" in text for text in told(record) if "reward" in text)


def test_the_answer_says_whether_disturbed_rounds_count_for_a_faster_arm(tmp_path):
    rng = np.random.default_rng(0)
    record = counting(
        tmp_path / "e", {BASE: rows(rng, 1.6, [0.4] * 16), OTHER: rows(rng), THIRD: rows(rng, 1.6)}
    )
    faster = answered(record, {})[0]
    assert faster.startswith(f"Faster than {BASE}: {OTHER} (1.")
    assert ", disturbed rounds included; " in faster


@pytest.mark.slow
def test_the_report_keeps_the_true_counts_of_disturbed_rounds_that_count(tmp_path):
    from reports.report import write_report

    rng = np.random.default_rng(0)
    runs = {BASE: rows(rng), OTHER: rows(rng, 1.6, [0.4] * 16)}
    counting(tmp_path / "counted", runs)
    page = write_report(tmp_path / "counted", warn=lambda text: None)
    data = json.loads((page.parent / "report.json").read_text())

    first, second = data["trials"]
    assert (first["disturbed_rounds"], first["disturbed_counted"]) == (0, False)
    assert (second["disturbed_rounds"], second["disturbed_counted"]) == (16, True)
    assert second["disturbed_share"] == pytest.approx(0.4)
    assert second["comparable"] is True
    assert second["samples_per_s"] == pytest.approx(40, rel=0.2)
    assert data["arms"][OTHER]["disturbed_counted"] is True
    assert data["pairs"][OTHER]["speed_up"]["disturbed_counted"] is True
    text = page.read_text()
    said = f"disturbed (callbacks.leave_out_disturbed=false): {OTHER}: 16 of 16"
    table_ = text.partition('<section id="arms"')[2].partition("</section>")[0]
    figure = text.partition('<figure id="speed_up"')[2].partition("</figure>")[0]
    assert said in table_
    assert said in figure


def test_rows_without_the_metric_are_undisturbed(tmp_path):
    found = one(tmp_path, [experiments.row(n) for n in range(1, 9)]).pace

    assert found is not None
    assert (found.disturbed, found.comparable) == (0, True)


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (1_795_000_020, "No two trials of this experiment ran at the same time."),
        (1_795_000_010, "Other trials that run at the same time count as other processes."),
    ],
)
def test_a_note_says_if_no_trials_ran_at_the_same_time(tmp_path, begun, said):
    rng = np.random.default_rng(0)
    late = [
        {**own, "timestamp": begun + n, "time_total_s": n}
        for n, own in enumerate(rows(rng, 1.6, [0.4] * 12))
    ]
    found = compare(write(tmp_path / "e", {BASE: [rows(rng)], OTHER: [late]}).trials)
    assert said in " ".join(found.footnotes())
    assert found.rows()[0][5] == "1.00x"  # the baseline was not disturbed


def test_the_heading_of_all_pairs_counts_clear_differences_without_the_baseline(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng)] * 3, OTHER: [rows(rng)] * 3, THIRD: [rows(rng, 3.0)] * 3}
    record = write(tmp_path / "e", runs)
    files = {trial.name: read_files(trial) for trial in record.trials}
    pairs = every_pair(record, compare(record.trials), files)
    # THIRD is clearly slower and more expensive than OTHER.
    assert "(2 clear differences between arms other" in _clear_elsewhere(pairs, BASE)
    assert _clear_elsewhere(pairs[:2], BASE) == ""  # pairs with the baseline


def test_exactly_the_disturbed_arms_are_marked_with_their_reason(tmp_path):
    rng = np.random.default_rng(0)
    load = [0.4] * 12
    runs = {BASE: [rows(rng)], OTHER: [rows(rng, 1.6, load)], THIRD: [rows(rng)]}
    record = write(tmp_path / "loaded", runs)
    comparison = compare(record.trials)
    cells = {row[0]: row for row in comparison.rows()}
    reason = "sync, seed 0: other processes took 40% of the machine in 12 of 16 rounds"

    assert [arm for arm in cells if "?" in " ".join(cells[arm])] == [OTHER]
    assert cells[OTHER][4:7] == ("?", "?", "?")  # samples/s, speed-up, at equal cost
    assert OTHER not in comparison.speed
    assert OTHER not in comparison.cost
    assert comparison.not_comparable == {OTHER: reason}
    assert cells[OTHER][3].endswith(" ?")  # wall-clock
    assert cells[OTHER][7].endswith(" ?")  # device-hours
    words = " ".join(table(compare(record.trials)).split())
    shared = "because other processes disturbed too many rounds"
    seeds = "sync, seed 0 (40% in 12 of 16 rounds)"
    excluded = "Trials excluded from speeds and costs"
    assert f"{excluded} {shared}: {seeds}. The percentage" in words
    assert f"disturbed if the share is above {DISTURBED_ABOVE:.0%}. At least half" in words
    assert "In a trial of fewer than 4 rounds" not in words
    assert "include these disturbed rounds" not in words
    said = told(record)
    busy = "because other processes used the machine"
    assert f"Not comparable with {BASE} in speed or cost, {busy}: {OTHER}." in said
    assert not any(f" {OTHER} (" in sentence for sentence in said if "Slower" in sentence)


def test_actors_that_ran_behind_every_other_process_are_named(tmp_path):
    rng = np.random.default_rng(0)
    nice = [{**row, "fleet/niceness": 15.0} for row in rows(rng)]
    plain = [{**row, "fleet/niceness": 0.0} for row in rows(rng)]
    record = write(tmp_path / "nice", {BASE: [plain], OTHER: [nice]})
    words = " ".join(table(compare(record.trials)).split())
    assert (
        f"The actors of {OTHER} ran at niceness 15, so any ordinary process on the machine" in words
    )
    assert f"actors of {BASE}" not in words


def test_a_disturbed_baseline_puts_every_speed_up_in_doubt_but_marks_its_own_speed_alone(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng, 1.6, [0.4] * 16)], OTHER: [rows(rng)], THIRD: [rows(rng)]}
    record = write(tmp_path / "loaded", runs)
    comparison = compare(record.trials)
    cells = {row[0]: row for row in comparison.rows()}

    assert [arm for arm in cells if cells[arm][4] == "?"] == [BASE]
    assert cells[OTHER][5:7] == cells[THIRD][5:7] == ("?", "?")
    assert cells[BASE][5:7] == ("?", "?")  # in place of the baseline's 1.00x
    assert "colocated_k1, seed 0" in comparison.not_comparable[OTHER]
    assert [sentence for sentence in told(record) if "compar" in sentence] == [
        "No arm can be compared with colocated_k1 in speed or cost: other processes took 40% of "
        "the machine in 16 of 16 rounds of seed 0."
    ]


def test_a_baseline_with_a_known_speed_keeps_its_ratio_without_a_comparable_arm(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng)], OTHER: [rows(rng, 1.6, [0.4] * 16)]}
    comparison = compare(write(tmp_path / "loaded", runs).trials)
    cells = {row[0]: row for row in comparison.rows()}

    assert cells[BASE][4] != "?"  # its own speed is known
    assert cells[BASE][5:7] == ("1.00x", "1.00x")
    assert cells[OTHER][5:7] == ("?", "?")


def test_a_disturbed_pair_of_arms_has_a_mark_in_place_of_its_reasons(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng)], OTHER: [rows(rng, 1.6, [0.4] * 16)], THIRD: [rows(rng)]}
    record = write(tmp_path / "loaded", runs)
    pairs = every_pair(
        record, compare(record.trials), {t.name: read_files(t) for t in record.trials}
    )

    cells = {pair.cells()[:2]: pair.cells()[2:4] for pair in pairs}
    assert cells[OTHER, BASE] == cells[THIRD, OTHER] == ("?", "?")
    assert "x" in cells[THIRD, BASE][0]


def test_speeds_that_cannot_be_compared_come_with_the_cause_and_a_remedy(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng, 1.6, [0.15] * 16)], OTHER: [rows(rng, 1.6, [0.49] * 16)]}
    record = write(tmp_path / "loaded", runs)

    setting = "callbacks.leave_out_disturbed=false"
    remedy = f"or with --set {setting}, which includes disturbed rounds."
    assert answered(record, {OTHER: difference(0.0, 0.1)})[0] == (
        "Speeds cannot be compared: other processes took 15% to 49% of the machine. Run the "
        f"experiment again on an idle machine, {remedy}"
    )
    assert remedy in " ".join(table(compare(record.trials)).split())


def test_the_notes_say_how_uncertain_a_held_out_reward_is(tmp_path):
    record = write(tmp_path / "few", {BASE: [rows(np.random.default_rng(0))]})
    (prompts,) = {trial.config.eval.prompts for trial in record.trials}
    # For rewards that are 0 or 1 with equal odds, rounded up.
    assert 0.044 < (0.25 / prompts) ** 0.5 < 0.045
    text = " ".join(compare(record.trials).footnote().split())
    assert (
        f"the mean over {prompts} prompts. If rewards lie between 0 and 1, its standard error is "
        "at most 0.045. Tokens per" in text
    )


def test_a_larger_last_evaluation_counts_with_its_own_prompts(tmp_path):
    params = experiments.config(rounds=ROUNDS, **{"eval.prompts": 16, "eval.final_prompts": 64})
    complete = rows(np.random.default_rng(0))
    trial = experiments.write_trial(
        experiments.write_experiment(tmp_path / "e"), params, complete[:8]
    )

    def said() -> str:
        return " ".join(compare(read_experiment(tmp_path / "e").trials).footnote().split())

    assert "the mean over 16 prompts. If" in said()
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in complete))
    assert "the mean over 16 prompts before training and over 64 prompts at the" in said()
    assert "at most 0.125 before training and at most 0.063 at the latest evaluation." in said()


@pytest.mark.parametrize("key", ["task.eval_file", "task.train_file"])
def test_prompts_that_may_repeat_promise_no_precision(tmp_path, key):
    params = experiments.config(rounds=ROUNDS, **{key: "rows.jsonl"})
    directory = experiments.write_experiment(tmp_path / "e")
    experiments.write_trial(directory, params, rows(np.random.default_rng(0)))
    text = " ".join(compare(read_experiment(directory).trials).footnote().split())
    most = params["eval"]["prompts"]
    said = f"Held-out reward: the mean over the held-out prompts, at most {most}. Tokens per"
    assert said in text


def test_an_exact_lag_is_not_asked_for_its_speed(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: rows(rng), THIRD: rows(rng, 1.6, [0.4] * 16)}
    experiments.write_experiment(tmp_path / "e")
    for arm, own in runs.items():
        exact = {"lag_mode": "exact"} if arm == THIRD else {}
        params = experiments.config(arm, rounds=ROUNDS, **exact)
        experiments.write_trial(tmp_path / "e", params, own)
    record = read_experiment(tmp_path / "e")

    assert answered(record, {THIRD: difference(0.0, 0.1)})[0] == EXACT_LAG
    notes = compare(record.trials).footnotes()
    assert EXACT_LAG in notes
    assert ADVICE not in " ".join(notes)


def test_before_two_arms_are_complete_only_the_exact_lag_and_the_wait_are_told(tmp_path):
    experiments.write_experiment(tmp_path / "e")
    for arm, share in ((BASE, 0.5), (THIRD, 0.01)):
        own = rows(np.random.default_rng(0), 1.0, [share] * 16)[:8]
        params = experiments.config(arm, rounds=ROUNDS, lag_mode="exact")
        experiments.write_trial(tmp_path / "e", params, own)
    record = read_experiment(tmp_path / "e")
    first, second = answered(record, {})
    assert first == EXACT_LAG
    assert second.startswith("Held-out rewards can be compared once")
    # Other processes disturbed the baseline, but no speed is compared with it.
    assert not any("used the machine" in text or "in speed" in text for text in told(record))


def test_an_arm_has_no_speed_relative_to_an_exact_lag(tmp_path):
    rng = np.random.default_rng(0)
    experiments.write_experiment(tmp_path / "e")
    for arm in (BASE, THIRD):
        params = experiments.config(
            arm, rounds=ROUNDS, lag_mode="exact" * (arm == THIRD) or "bounded"
        )
        experiments.write_trial(tmp_path / "e", params, rows(rng))
    record = read_experiment(tmp_path / "e")
    alone = compare(record.trials, preferred=THIRD)
    assert alone.baseline == THIRD
    assert not alone.speed
    assert "speed-up" not in alone.header


def test_beside_a_bounded_lag_the_arms_with_an_exact_lag_are_named(tmp_path):
    rng = np.random.default_rng(0)
    experiments.write_experiment(tmp_path / "e")
    for arm, slower, mode in (
        (BASE, 1.0, "bounded"),
        ("async_k4", 0.7, "bounded"),
        (THIRD, 0.5, "exact"),
    ):
        params = experiments.config(arm, rounds=ROUNDS, lag_mode=mode)
        experiments.write_trial(tmp_path / "e", params, rows(rng, slower))
    record = read_experiment(tmp_path / "e")
    note = f"{EXACT_LAG} Arms with an exact lag: {THIRD}."

    faster, second, *_ = answered(record, {THIRD: difference(0.0, 0.1)})
    assert faster.startswith(f"Faster than {BASE}: async_k4 (1.")
    assert second == note
    assert note in compare(record.trials).footnotes()


def test_the_least_number_of_undisturbed_rounds_is_that_of_the_trials(tmp_path):
    experiments.write_experiment(tmp_path / "e")
    params = experiments.config(rounds=3)
    experiments.write_trial(tmp_path / "e", params, rows(np.random.default_rng(0), 1.6, [0.4])[:3])
    words = " ".join(compare(read_experiment(tmp_path / "e").trials).footnote().split())
    assert "In a trial of fewer than 4 rounds, all rounds must be undisturbed." in words
    assert "At least half" not in words


def test_an_interval_that_excludes_equality_does_not_seem_to_include_it():
    def shown(neutral: float, low: float, high: float, form: str) -> str:
        interval = Estimate((low + high) / 2, low, high)
        own = Contrast(value=interval.value, neutral=neutral, seeds=[0, 1], interval=interval)
        return own.shown_interval(form)

    assert shown(0.0, -0.1014, -0.00004, "{:+.3f}") == "-0.10140 to -0.00004"
    assert shown(0.0, -0.1014, 0.00004, "{:+.3f}") == "-0.101 to +0.000"
    assert shown(1.0, 1.004, 1.2, "{:.2f}x") == "1.004x to 1.200x"
    assert shown(1.0, 1.2, 250.0, "{:.2f}x") == "1.20x to more than 100"
    # Rewards of other tasks can be large: only ratios are capped.
    assert shown(0.0, 150.0, 250.0, "{:+.3f}") == "+150.000 to +250.000"


@pytest.mark.parametrize(("ratio", "forecasts"), [(1.004, False), (1.006, True)])
def test_a_ratio_that_looks_equal_has_no_forecast(ratio, forecasts):
    spread = Spread(0.001)
    own = Contrast(value=ratio, neutral=1.0, seeds=[0, 1, 2], spread=spread)
    assert bool(_advice(own, "{:.2f}x")) == forecasts


def test_beside_a_menu_rewards_have_no_second_number_of_seeds(tmp_path):
    rng = np.random.default_rng(0)
    record = write(tmp_path / "e", {arm: [rows(rng) for _ in range(3)] for arm in (BASE, OTHER)})
    for trial in record.trials:
        rewards = rng.uniform(0.2, 0.8, 8)
        last = [experiments.evaluation(ROUNDS, n, "x", float(r)) for n, r in enumerate(rewards)]
        experiments.write_part(trial.directory, "evaluations", ROUNDS, last)
    files = {trial.name: read_files(trial) for trial in record.trials}
    comparison = compare(record.trials)
    found = quantities(record, comparison, files)

    def forecasts(**options: bool) -> list[str]:
        said = verdicts(found, comparison, **options)
        return [
            sentence for sentence in said if "of this size" in sentence and "reward" in sentence
        ]

    assert len(forecasts()) == 1
    assert forecasts(has_menu=True) == []


def test_plots_of_seconds_begin_with_the_arms_that_cannot_be_compared(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng)], OTHER: [rows(rng, 1.6, [0.4] * 16)]}
    record = write(tmp_path / "loaded", runs)
    files = {trial.name: read_files(trial) for trial in record.trials}
    shown = sections(record, compare(record.trials), files)
    looks = {plot.name: plot.look for section in shown for plot in section.plots}
    for name in ("reward_wall_clock", "stages"):
        assert looks[name].startswith(
            f"Not comparable, because other processes used the machine: {OTHER}. "
        )
    assert all(section.note == "" for section in shown)  # one seed has no bands


def test_plots_of_seconds_leave_out_the_trials_that_the_table_leaves_out(tmp_path):
    rng = np.random.default_rng(0)
    seeds = [rows(rng), rows(rng), rows(rng, 3.0, [0.5] * 16)]
    for own, stage in zip(seeds, (1.0, 3.0, 20.0), strict=True):
        for one_row in own:
            one_row |= {"time/optimize_s": stage, "eval/round": 16.0 * (one_row is own[-1])}
    record = write(tmp_path / "e", {BASE: seeds})
    files = {trial.name: read_files(trial) for trial in record.trials}
    comparison = compare(record.trials)
    shown = sections(record, comparison, files)
    plots = {plot.name: plot for section in shown for plot in section.plots}
    last = float(np.median([own[-1]["time/wall_clock_s"] for own in seeds[:2]]))
    assert drawn_ends(plots["reward_wall_clock"]) == pytest.approx([last])
    for name in ("reward_wall_clock", "stages", "stages_over_rounds"):
        assert plots[name].look.startswith(f"Disturbed trials of {BASE} are left out. ")
    # 16 rounds of 64 responses: 2 s for 64 responses are 3.125 s for 100.
    assert "optimize 3.1 s" in plots["stages"].alt


def drawn_ends(plot: Plot) -> list[float]:
    """Return the largest x of each arm's points."""
    figure = Figure()
    plot.draw(figure, LIGHT)
    (axes,) = figure.axes
    return [max(map(float, xs)) for line in axes.lines if len(xs := line.get_xdata())]


def test_an_exact_lag_has_no_column_and_no_plot_of_speed(tmp_path):
    rng = np.random.default_rng(0)

    def looks(modes: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
        directory = experiments.write_experiment(tmp_path / "-".join(modes.values()))
        for arm, mode in modes.items():
            params = experiments.config(arm, rounds=ROUNDS, lag_mode=mode)
            experiments.write_trial(directory, params, rows(rng))
        record = read_experiment(directory)
        files = {trial.name: read_files(trial) for trial in record.trials}
        comparison = compare(record.trials)
        shown = sections(record, comparison, files)
        return comparison.header, {p.name: p.look for own in shown for p in own.plots}

    header, found = looks({BASE: "bounded", THIRD: "exact"})
    assert "speed-up" not in header
    assert "speed_up" not in found
    assert "With an exact lag of L, round 1 samples L + 1 batches" in found["stages_over_rounds"]
    assert "its generators are slower" not in found["lag_histogram"]

    header, _ = looks({BASE: "bounded", OTHER: "bounded", THIRD: "exact"})
    assert "speed-up" in header  # of `sync`
    header, found = looks({BASE: "bounded", THIRD: "bounded"})
    assert "speed-up" in header
    assert "speed_up" in found
    assert "With an exact lag" not in found["stages_over_rounds"]
    assert "its generators are slower" in found["lag_histogram"]


def test_arms_disturbed_in_different_seeds_have_no_bar_of_a_ratio(tmp_path):
    rng = np.random.default_rng(0)
    loaded, quiet = rows(rng, 1.6, [0.4] * 16), rows(rng)
    record = write(tmp_path / "e", {BASE: [loaded, quiet], OTHER: [quiet, loaded]})
    files = {trial.name: read_files(trial) for trial in record.trials}
    shown = sections(record, compare(record.trials), files)
    (plot,) = (own for section in shown for own in section.plots if own.name == "speed_up")
    assert plot.missing == "Other processes disturbed an arm or the baseline in too many seeds."


@pytest.mark.parametrize("of", ["frontier", "reward_rounds", "reward_samples", "reward_wall_clock"])
def test_two_evaluations_of_an_arm_are_points_without_a_line(tmp_path, of):
    def plotted(name: str, evaluated: Sequence[int]) -> tuple[str, list[str]]:
        """Return the style of the arm's line, and the kinds of the bands or vertical lines."""
        seeds = [
            [
                experiments.row(n, kl__reference_nats=n + seed, eval__round=at, **reward)
                for n, at in enumerate(evaluated, start=1)
                for reward in [{"reward__eval_mean": 0.5 + 0.1 * seed}]
            ]
            for seed in (0, 1)
        ]
        record = write(tmp_path / name, {BASE: seeds})
        files = {trial.name: read_files(trial) for trial in record.trials}
        shown = sections(record, compare(record.trials), files)
        assert shown[0].note == BANDS
        (plot,) = (own for section in shown for own in section.plots if own.name == of)
        said_before = of in ("reward_samples", "reward_wall_clock")  # below “reward_rounds”
        expected = name == "two" and not said_before
        assert ("An arm with only two points" in plot.look) == expected
        figure = Figure()
        plot.draw(figure, LIGHT)
        (axes,) = figure.axes
        line, *_ = axes.lines
        return str(line.get_linestyle()), [type(own).__name__ for own in axes.collections]

    assert plotted("two", (0, 0, 3)) == ("None", ["LineCollection"])
    style, drawn = plotted("three", (0, 2, 3))
    assert style == "-"
    assert drawn != ["LineCollection"]


def test_a_plot_says_which_arms_measure_the_kl_on_a_sample(tmp_path):
    def said(errors: Mapping[str, float]) -> str:
        runs = {
            arm: [[experiments.row(1, kl__reference_nats=1.0, kl__reference_nats_se=error)]]
            for arm, error in errors.items()
        }
        record = write(tmp_path / "-".join(map(str, errors.values())), runs)
        return _sampled(record.arms)

    sample = "are measured on 16 responses of each round, drawn at random, so"
    assert said({BASE: 0.1, OTHER: 0.1}).startswith(f" The figures {sample} the bands reach ")
    assert said({BASE: 0.1, OTHER: 0.0}).startswith(
        f" The figures of {BASE} {sample} its band reaches "
    )
    assert said({BASE: 0.0, OTHER: 0.0}) == ""


@pytest.mark.slow
def test_a_disturbed_seed_of_several_is_left_out_of_the_pairs(tmp_path):
    rng = np.random.default_rng(0)
    loaded = rows(rng, 3.0, [0.5] * 16)
    runs = {BASE: [rows(rng) for _ in range(4)], OTHER: [loaded, *(rows(rng) for _ in range(3))]}
    record = write(tmp_path / "loaded", runs)
    comparison = compare(record.trials)

    words = " ".join(comparison.footnote().split())
    assert f"These speed-ups rest on only some of the seeds: {OTHER} (3 of 4 seeds)." in words
    assert any("3 of 4 seeds" in sentence for sentence in told(record))
    assert list(comparison.speed[OTHER].seeds) == [1, 2, 3]
    assert comparison.not_comparable == {}
    assert comparison.speed[OTHER].value == pytest.approx(1.0, abs=0.1)
    assert comparison.comparable(OTHER)
    # Totals leave the disturbed seed out too.
    (cells,) = (row for row in comparison.rows() if row[0] == OTHER)
    kept = [trial.last("time/wall_clock_s") for trial in record.arms[OTHER][1:]]
    assert cells[3] == show(kept, "{:.1f}")
    assert "?" not in " ".join(cells)


def test_runs_without_a_common_seed_are_not_compared(tmp_path):
    record = write(tmp_path / "e", {BASE: [rows(np.random.default_rng(0))]})
    (trial,) = record.trials

    assert speed_up([trial], []) is None


# ---- Rewards ---------------------------------------------------------------------------------


def test_rewards_are_paired_by_seed_and_prompt():
    base = {0: {"a": 0.0, "b": 1.0, "c": 0.5}, 1: {"a": 0.0, "b": 0.0, "c": 1.0}, 2: {"a": 1.0}}
    # In the arm, prompt c has no score with seed 1, and seed 2 was not run.
    arm = {0: {"a": 0.5, "b": 1.0, "c": 0.0}, 1: {"a": 1.0, "b": 0.5}}
    found = reward_difference(arm, base)

    assert found is not None
    assert list(found.seeds) == [0, 1]
    assert found.value == pytest.approx((0.5 + 0.0 + 1.0 + 0.5) / 4)


def test_arms_that_answer_every_prompt_alike_have_no_interval_of_no_width():
    rewards = {"a": 0.3, "b": 1.0, "c": 0.5}
    found = reward_difference({0: rewards, 1: rewards}, {0: rewards, 1: rewards})
    assert found is not None
    assert (found.value, found.interval, found.told_apart, found.identical) == (0.0, None, False, 3)


def test_the_same_difference_in_every_prompt_says_nothing_about_others():
    base = {"a": 0.1, "b": 0.3, "c": 0.5}
    arm = {name: reward + 0.2 for name, reward in base.items()}
    found = reward_difference({0: arm}, {0: base})
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert (found.interval, found.told_apart, found.identical) == (None, None, 0)


def test_a_report_says_in_how_many_prompts_there_is_no_difference(tmp_path):
    rng = np.random.default_rng(0)
    directory = write(tmp_path / "e", {BASE: [rows(rng)], OTHER: [rows(rng)]}).directory
    for trial in read_experiment(directory).trials:
        last = [experiments.evaluation(ROUNDS, n, "x", 0.5) for n in range(4)]
        experiments.write_part(trial.directory, "evaluations", ROUNDS, last)
    said = " ".join(told(read_experiment(directory)))
    assert f"{OTHER} (+0.000, no difference in any of 4 prompts)" in said
    assert "+0.000 to +0.000" not in said


def test_held_out_rewards_are_the_means_over_a_prompts_responses_at_the_end(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    trial = experiments.write_trial(
        directory, experiments.config(rounds=2), [experiments.row(1), experiments.row(2)]
    )
    first = [experiments.evaluation(0, 7, "x", 0.0)]
    experiments.write_part(trial, "evaluations", 1, first)
    last = [
        experiments.evaluation(2, 7, "x", 1.0, index=0),
        experiments.evaluation(2, 7, "y", 0.0, index=1),
        experiments.evaluation(2, 8, "z", 1.0),
        experiments.evaluation(2, 9, "z", math.nan),
    ]
    experiments.write_part(trial, "evaluations", 2, last)
    (record,) = read_experiment(directory).trials

    assert read_files(record).held_out == {"prompt 7": 0.5, "prompt 8": 1.0}


def test_a_prompt_that_the_held_out_set_repeats_counts_once(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    trial = experiments.write_trial(
        directory, experiments.config(rounds=2), [experiments.row(1), experiments.row(2)]
    )
    # Two prompts with three responses each.
    last = [
        experiments.evaluation(2, place, "x", float(place < 2), prompt=f"prompt {place % 2}")
        for place in range(6)
    ]
    experiments.write_part(trial, "evaluations", 2, last)
    (record,) = read_experiment(directory).trials

    assert read_files(record).held_out == {
        "prompt 0": pytest.approx(1 / 3),
        "prompt 1": pytest.approx(1 / 3),
    }


# ---- Wording ---------------------------------------------------------------------------------


def test_one_seed_says_that_it_says_nothing_about_other_runs(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: [rows(rng)], OTHER: [rows(rng, 1.5)]}
    said = told(write(tmp_path / "e", runs))

    assert said[0].startswith(
        f"Slower than {BASE} in these runs (fewer samples per second): {OTHER} (0."
    )
    assert said[-1].startswith("All results above rest on one seed")
    assert not any("hance alone" in sentence for sentence in said)


@pytest.mark.slow
def test_one_sound_seed_of_several_is_not_taken_for_an_interval_over_seeds(tmp_path):
    rng = np.random.default_rng(0)
    loaded = rows(rng, 3.0, [0.5] * 16)
    runs = {
        BASE: [rows(rng), rows(rng)],
        OTHER: [loaded, rows(rng)],
        THIRD: [rows(rng), rows(rng)],
    }
    record = write(tmp_path / "e", runs)
    notes, said = compare(record.trials).footnotes(), told(record)

    assert {COVERS[False], COVERS[True]} <= set(notes)
    (alone,) = [sentence for sentence in said if "these runs only" in sentence]
    assert alone.startswith(
        f"These results rest on one seed and hold for these runs only: speed (samples per second) "
        f"of {OTHER}, cost (samples per device-hour) of {OTHER}. Their intervals"
    )
    assert said[-1].startswith(
        "For each quantity, 5% of experiments show a clear difference between two equal arms by"
    )
    # Without the third arm, no sentence about several seeds is left.
    del runs[THIRD]
    two = write(tmp_path / "two", runs)
    assert COVERS[True] not in compare(two.trials).footnotes()
    assert not any("hance alone" in sentence for sentence in told(two))


def test_a_trial_that_has_hardly_begun_is_no_seed_of_an_interval(tmp_path):
    rng = np.random.default_rng(0)
    runs = {
        BASE: [rows(rng) for _ in range(3)],
        OTHER: [rows(rng), rows(rng), rows(rng, 5.0)[:3]],
    }
    found = compare(write(tmp_path / "e", runs).trials).speed[OTHER]
    assert list(found.seeds) == [0, 1]
    assert found.value == pytest.approx(1.0, abs=0.1)

    begun = {arm: [own[:3] for own in seeds] for arm, seeds in runs.items()}
    found = compare(write(tmp_path / "begun", begun).trials).speed[OTHER]
    assert list(found.seeds) == [0, 1, 2]
    assert (found.interval, found.spread) == (None, None)


def test_unequal_samples_are_named_beside_the_rewards(tmp_path):
    rng = np.random.default_rng(0)
    twice = [{**own, "count/trained": 2 * own["count/trained"]} for own in rows(rng)]
    record = write(tmp_path / "unequal", {BASE: [rows(rng)], OTHER: [twice]})
    assert UNEQUAL in compare(record.trials).footnotes()
    assert UNEQUAL in told(record)

    assert OTHER_WEIGHTS not in [*compare(record.trials).footnotes(), *told(record)]

    # A running trial has fewer samples only for now.
    record = write(tmp_path / "running", {BASE: [rows(rng)], OTHER: [rows(rng)[:8]]})
    assert UNEQUAL not in [*compare(record.trials).footnotes(), *told(record)]


def test_a_part_that_was_not_evaluated_after_training_has_no_second_figure(tmp_path):
    first = {"eval_part/brief_first": 0.75, "eval_part/brief_mean": 0.75, "eval/round": 0.0}
    row = experiments.row(1, **first)
    comparison = compare(write(tmp_path / "e", {BASE: [[row]]}).trials)
    (note,) = [note for note in comparison.footnotes() if note.startswith("Parts of")]
    assert note.endswith("without their weights: brief 0.750 -> -.")


def test_the_parts_of_a_reward_are_shown_before_and_after_training(tmp_path):
    shown = {"eval_part/brief_first": 0.75, "part/brief_mean": 0.5}
    own = [
        experiments.row(
            n, eval__round=float(n), **shown, **{"eval_part/brief_mean": 0.75 + n / 100}
        )
        for n in (1, 2)
    ]
    record = write(tmp_path / "e", {BASE: [own]})
    comparison = compare(record.trials)
    assert (
        f"Parts of the held-out reward of {BASE}, before training and at the latest evaluation, "
        "without their weights: brief 0.750 -> 0.770."
    ) in comparison.footnotes()
    files = {trial.name: read_files(trial) for trial in record.trials}
    found = {own.title: own.plots for own in sections(record, comparison, files)}
    (plot,) = found["What was learned in each part of the reward"]
    assert (plot.title, plot.missing) == ("Part brief", None)
    assert plot.alt.endswith("0.77.")
    assert list(_held_out_of("eval_part/brief")(record.trials[0])) == [
        (0, 0, 0.75),
        (1, 1, 0.76),
        (2, 2, 0.77),
    ]
    without = write(tmp_path / "without", {BASE: [rows(np.random.default_rng(0))]})
    titles = [own.title for own in sections(without, compare(without.trials), files)]
    assert "What was learned in each part of the reward" not in titles


def test_the_parts_of_a_reward_follow_the_reward_of_a_response():
    row = {"reward": 0.5, "format_reward": None, "answer_reward": 0.5, "parts": '{"brief": 0.25}'}
    assert scores_text(row) == "reward 0.50, brief 0.25"
    assert scores_text({**row, "parts": None}) == "reward 0.50"
    assert scores_text({**row, "parts": '["brief"]'}) == "reward 0.50"


def test_rewards_with_other_weights_are_not_to_be_compared(tmp_path):
    rng = np.random.default_rng(0)
    experiments.write_experiment(tmp_path / "e")
    for arm, weights in ((BASE, '{"answer": 1}'), (OTHER, '{"answer": 2}')):
        params = experiments.config(arm, rounds=ROUNDS, task={"reward_weights": weights})
        experiments.write_trial(tmp_path / "e", params, rows(rng))
    record = read_experiment(tmp_path / "e")
    assert OTHER_WEIGHTS in compare(record.trials).footnotes()
    assert OTHER_WEIGHTS in told(record)


def test_an_arm_whose_rewards_taught_nothing_in_most_rounds_is_named(tmp_path):
    """One arm has 9 of 16 rounds without signal, and the other has 8. A critic needs no signal."""

    def without(number: int) -> list[dict[str, Any]]:
        return [
            experiments.row(n, group__zero_advantage_fraction=1.0 if n <= number else 0.9)
            for n in range(1, ROUNDS + 1)
        ]

    write(tmp_path / "e", {BASE: [without(9)], OTHER: [without(8)]})
    critic = experiments.config(THIRD, 0, rounds=ROUNDS, **{"loss.advantage": "gae"})
    experiments.write_trial(tmp_path / "e", critic, without(16))
    comparison = compare(read_experiment(tmp_path / "e").trials)
    (line,) = [note for note in comparison.footnotes() if "learned nothing" in note]
    assert line.startswith(f"{BASE} learned nothing in 9 of 16 rounds: in these rounds, all")
    assert "learned nothing in 9 of 16 rounds" in table(comparison)


def test_a_few_rounds_without_signal_are_no_reason_for_alarm(tmp_path):
    for number, named in ((3, False), (4, True)):
        settings = experiments.config(BASE, rounds=number)
        still = [
            experiments.row(n, group__zero_advantage_fraction=1.0) for n in range(1, number + 1)
        ]
        directory = experiments.write_experiment(tmp_path / f"{number}")
        experiments.write_trial(directory, settings, still)
        notes = compare(read_experiment(directory).trials).footnotes()
        assert any("learned nothing" in note for note in notes) is named


@pytest.mark.parametrize(("rounds", "lag", "named"), [(4, 1, True), (4, 0, False), (16, 1, False)])
def test_a_lag_in_a_short_trial_lowers_the_speed_up(tmp_path, rounds, lag, named):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, own in ((BASE, {}), (OTHER, {"lag": lag, "placement": "disaggregated"})):
        settings = experiments.config(arm, rounds=rounds, **own)
        timed = [experiments.row(n) for n in range(1, rounds + 1)]
        experiments.write_trial(directory, settings, timed)
    notes = compare(read_experiment(directory).trials).footnotes()
    found = [note for note in notes if "do not overlap yet" in note]
    assert bool(found) is named
    assert not named or found[0].endswith(f"lowers its speed-up: {OTHER}+lag_1 (4 rounds).")


def test_a_round_that_trained_on_nothing_stood_still(tmp_path):
    skipped = [experiments.row(n) for n in range(1, ROUNDS + 1)]
    for row in skipped[1:]:
        del row["reward/train_mean"]
    comparison = compare(write(tmp_path / "e", {BASE: [skipped]}).trials)
    assert any(
        note.startswith(f"{BASE} learned nothing in 15 of 16") for note in comparison.footnotes()
    )


def test_what_is_not_told_apart_comes_with_the_seeds_that_would_tell(tmp_path):
    rng = np.random.default_rng(3)
    runs = {
        BASE: [rows(rng) for _ in range(3)],
        OTHER: [rows(rng, 1.06) for _ in range(3)],
    }
    record = write(tmp_path / "e", runs)
    needed = compare(record.trials).speed[OTHER].seeds_needed
    (sentence,) = [s for s in told(record) if s.startswith("No clear difference")]

    assert needed is not None
    assert f"{needed - 3} more seed" in sentence
    assert "would probably show a difference of this size" in sentence
    assert "95%" in sentence


def test_the_share_of_chance_findings_grows_with_the_arms(tmp_path):
    rng = np.random.default_rng(0)
    runs = {arm: [rows(rng), rows(rng)] for arm in (BASE, OTHER, THIRD)}
    said = told(write(tmp_path / "e", runs))

    assert said[-1].startswith("If 2 arms equalled the baseline, up to 10% of")  # 1 - 0.95²


def test_chance_findings_are_mentioned_only_if_something_was_found(tmp_path):
    rng = np.random.default_rng(0)
    record = write(tmp_path / "e", {arm: [rows(rng), rows(rng)] for arm in (BASE, OTHER, THIRD)})
    comparison = compare(record.trials)
    (_, _, reward) = quantities(record, comparison, {t.name: read_files(t) for t in record.trials})

    def last(clear: float) -> str:
        found = {OTHER: difference(0.0, 0.1), THIRD: difference(clear, 0.1)}
        return verdicts([replace(reward, contrasts=found)], comparison)[-1]

    assert "by chance" in last(0.2)
    assert "by chance" not in last(0.0)


def test_one_arm_is_compared_with_nothing(tmp_path):
    assert told(write(tmp_path / "e", {BASE: [rows(np.random.default_rng(0))]})) == []


@pytest.mark.slow
def test_report_json_holds_what_the_page_says(tmp_path):
    from reports.report import write_report

    rng = np.random.default_rng(0)
    load = [0.4] * 12
    runs = {BASE: [rows(rng), rows(rng)], OTHER: [rows(rng, 1.6, load), rows(rng, 1.6, load)]}
    record = write(tmp_path / "loaded", runs)
    page = write_report(record.directory, warn=lambda text: None)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads((page.parent / "report.json").read_text(), parse_constant=refuse)
    assert (data["format"], data["baseline"]) == (1, BASE)
    assert data["arms"][BASE]["comparable"] is True
    assert data["arms"][BASE]["why_not"] is None
    assert data["arms"][BASE]["samples_per_s"]["median"] == pytest.approx(64, rel=0.1)
    assert data["arms"][OTHER]["comparable"] is False
    assert "seed 1: other processes took 40%" in data["arms"][OTHER]["why_not"]
    pair = data["pairs"][OTHER]["speed_up"]
    assert pair == {
        **dict.fromkeys(("value", "low", "high", "told_apart", "seeds_needed")),
        **{"seeds": [], "comparable": False, "why_not": data["arms"][OTHER]["why_not"]},
        "disturbed_counted": False,
    }
    assert data["arms"][OTHER]["samples_per_s"] is None
    assert [trial["samples_per_s"] for trial in data["trials"][2:]] == [None, None]
    speeds = [trial["disturbed_samples_per_s"] for trial in data["trials"]]
    assert speeds == [None, None, pytest.approx(40, rel=0.2), pytest.approx(40, rel=0.2)]
    assert data["pairs"][OTHER]["reward_difference"] is None  # no evaluations were kept
    assert [trial["disturbed_rounds"] for trial in data["trials"]] == [0, 0, 12, 12]
    assert all(sentence in page.read_text() for sentence in data["told"])
    hours = page.read_text().partition('<figure id="device_hours"')[2]
    assert re.search(r'alt="Bars\. colocated_k1 [\d.]+, sync \? not comparable\."', hours)
    ratios = page.read_text().partition('<figure id="speed_up"')[2].partition("</figure>")[0]
    assert "Not drawn. Other processes on the machine disturbed sync." in ratios


# ---- benchmarks/a_a.py ---------------------------------------------------------------------------


@pytest.mark.slow
def test_experiments_resampled_from_equal_arms_are_seldom_told_apart_and_slowed_ones_are(tmp_path):
    rng = np.random.default_rng(1)
    arms = {BASE: 1.0, OTHER: 1.0, THIRD: 1.15}
    runs = {arm: [rows(rng, slower) for _ in range(5)] for arm, slower in arms.items()}
    trials = write(tmp_path / "e", runs).arms
    found = trials[BASE][0].pace
    again = drawn(trials[BASE][0], random.Random(0)).pace

    assert found is not None
    assert again is not None
    assert again.rounds == ROUNDS
    seconds = {round(own, 6) for own in found.seconds}
    assert {round(own, 6) for own in again.seconds} < seconds  # rounds drawn with replacement
    equal = verdict(trials[OTHER], trials[BASE], 20, random.Random(0), swap=True)
    slowed = verdict(trials[THIRD], trials[BASE], 20, random.Random(0), swap=False)
    assert (equal["told_apart"], slowed["told_apart"]) == (False, True)
    assert equal["repeats_told_apart"] <= 2
    assert slowed["repeats_told_apart"] >= 18


# ---- Pairs that differ in few settings -----------------------------------------------------------


def beside(directory: Path, space: str, arms: Sequence[str], **fixed: Any) -> list[tuple[str, ...]]:
    """Return the first three cells of the table of neighbours for arms of a shipped space."""
    experiments.write_experiment(directory, space=space)
    for arm in arms:
        (trial,) = SPACES[space].trials({"arm": arm, **fixed}, [0], samples=1024)
        timed = [
            experiments.row(n, time__wall_clock_s=2.0 * n, count__trained=16.0 * n)
            for n in range(1, trial.rounds + 1)
        ]
        experiments.write_trial(directory, trial.to_dict(), timed)
    record = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in record.trials}
    pairs = every_pair(record, compare(record.trials), files)
    return [row[:3] for row in neighbours(pairs, record.arms)]


def test_arms_that_differ_in_one_setting_are_neighbours(tmp_path):
    found = beside(tmp_path / "a", "async_vs_sync", list(SPACES["async_vs_sync"].arms))
    separate, more = "placement disaggregated, not colocated", "1.9 CPUs reserved, not 0.95 CPUs"
    assert found == [
        ("colocated_k1_two_cores", "colocated_k1", "resources.worker_cpus 1.9, not 0.95"),
        ("colocated_k2", "colocated_k1", "k 2, not 1"),  # k8 and k1 are not, because k2 is between
        ("sync", "colocated_k1", f"{separate}; 1.9 CPUs reserved, not 0.95 CPUs"),
        ("sync", "colocated_k1_two_cores", f"{separate}; CPUs of the learner 0.95, not 1.9"),
        ("colocated_k4", "colocated_k2", "k 4, not 2"),
        ("colocated_k8", "colocated_k4", "k 8, not 4"),
        (
            "async_k4",
            "colocated_k4",
            f"{separate}; lag 1, not 0; {more}",
        ),  # no arm has one of the two
        ("async_k1", "sync", "lag 1, not 0"),
        ("async_k4", "async_k1", "k 4, not 1"),
    ]


def test_the_cpus_of_the_learner_differ_even_if_they_are_different_settings(tmp_path):
    (row,) = beside(tmp_path / "a", "async_vs_sync", ["colocated_k1_two_cores", "sync"])
    assert row[2] == ("placement disaggregated, not colocated; CPUs of the learner 0.95, not 1.9")


def test_without_the_arm_between_two_arms_they_are_neighbours(tmp_path):
    arms = ["colocated_k1", "colocated_k8", "async_k1", "async_k4"]
    found = beside(tmp_path / "a", "async_vs_sync", arms)
    assert found == [
        ("colocated_k8", "colocated_k1", "k 8, not 1"),
        (
            *("async_k1", "colocated_k1"),
            "placement disaggregated, not colocated; lag 1, not 0; "
            "1.9 CPUs reserved, not 0.95 CPUs",
        ),
        ("async_k4", "async_k1", "k 4, not 1"),
    ]


def test_a_setting_of_a_users_task_makes_arms_differ(tmp_path):
    """The keyword task, which the user's task is not, has a setting of the same name."""
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, number in (("a", 1), ("b", 5)):
        task = {"name": "/home/me/t.py:T", "keywords_per_prompt": number}
        config = GRPOConfig.from_dict({"arm": arm, "rounds": 4, "task": task}).to_dict()
        timed = [experiments.row(n) for n in range(1, 5)]
        experiments.write_trial(directory, config, timed)
    record = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in record.trials}
    pairs = every_pair(record, compare(record.trials), files)
    (row,) = neighbours(pairs, record.arms)
    assert row[2] == "task.keywords_per_prompt 5, not 1"


def test_arms_with_different_numbers_of_samples_have_no_neighbours(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, rounds in ((BASE, 4), (OTHER, 8)):
        own = experiments.config(arm, rounds=rounds)
        experiments.write_trial(directory, own, [experiments.row(1)])
    record = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in record.trials}
    pairs = every_pair(record, compare(record.trials), files)
    assert len(pairs) == 1
    assert neighbours(pairs, record.arms) == []


# ---- The answer in short ---------------------------------------------------------------------


def answered(record: ExperimentRecord, rewards: Mapping[str, Contrast]) -> list[str]:
    """Return the short answer for the speeds of the record and the reward differences `rewards`."""
    comparison = compare(record.trials, record.not_begun)
    files = {trial.name: read_files(trial) for trial in record.trials}
    speed, cost, reward = quantities(record, comparison, files)
    return short_answer([speed, cost, replace(reward, contrasts=rewards)], comparison)


def difference(value: float, half: float, seeds: int = 3) -> Contrast:
    interval = Estimate(value=value, low=value - half, high=value + half)
    return Contrast(value=value, neutral=0.0, seeds=range(seeds), interval=interval)


def test_the_answer_names_the_faster_arms_and_every_clear_difference_in_reward(tmp_path):
    rng = np.random.default_rng(0)
    runs = {BASE: 1.0, OTHER: 0.5, THIRD: 0.8}
    three = {arm: [rows(rng, slower) for _ in range(3)] for arm, slower in runs.items()}
    record = write(tmp_path / "e", three)
    rewards = {OTHER: difference(0.05, 0.02), THIRD: difference(-0.04, 0.01)}

    faster, reward = answered(record, rewards)
    compared = compare(record.trials)
    first, second = (
        f"{arm} ({compared.speed[arm].value:.2f} times as many samples per second, 95% interval: "
        f"{compared.speed[arm].shown_interval('{:.2f}x')}"
        for arm in (OTHER, THIRD)
    )
    cost = f"{compared.cost[THIRD].value:.2f} times as many per device-hour"
    assert not compared.cost[OTHER].told_apart
    assert faster == f"Faster than {BASE}: {first}) and {second}; {cost})."
    assert compared.on_equal_devices[0] == (
        f"{OTHER} and {THIRD} reserve 2 times as many CPUs as {BASE}."
    )
    assert compared.on_equal_devices[1].startswith(
        f"Among the arms that reserve as many as {OTHER}, it is clearly faster than {THIRD} ("
    )
    assert reward == (
        f"Compared with {BASE}, the held-out reward is clearly higher for {OTHER} (+0.050), and "
        f"clearly lower for {THIRD} (-0.040)."
    )


@pytest.mark.parametrize(
    ("slower", "said"), [(1.0, "clearly faster than"), (0.72, "not clearly faster than")]
)
def test_a_faster_arm_with_more_devices_is_compared_on_equal_devices_too(tmp_path, slower, said):
    """`sync` reserves as many cores as `async_k1`, and `colocated_k1` half as many."""
    rng = np.random.default_rng(1)
    other = [rows(rng, slower), rows(rng, slower * 1.3), rows(rng, slower)]
    runs = {BASE: [rows(rng) for _ in range(3)], OTHER: other}
    record = write(tmp_path / "e", {**runs, THIRD: [rows(rng, 0.7) for _ in range(3)]})
    _, reward = answered(record, {THIRD: difference(-0.01, 0.02), OTHER: difference(0.1, 0.02)})

    own = speed_up(record.arms[THIRD], record.arms[OTHER])
    assert isinstance(own, Contrast)
    interval = f"95% interval: {own.shown_interval('{:.2f}x')}"
    compared = compare(record.trials)
    assert compared.on_equal_devices == [
        f"{THIRD} reserves 2 times as many CPUs as {BASE}.",
        f"Among the arms that reserve as many as {THIRD}, it is {said} {OTHER} ({own.value:.2f}x; "
        f"{interval}).",
    ]
    assert " ".join(compared.on_equal_devices) in compared.footnotes()
    assert reward.endswith(f"{OTHER} (+0.100), and not clearly different for {THIRD} (-0.010).")


def test_the_comparison_on_equal_devices_is_short_and_ignores_rounded_cores(tmp_path):
    """Three generators reserve 1.8998 cores together with the learner, and one 1.9."""
    rng = np.random.default_rng(2)
    directory = experiments.write_experiment(tmp_path / "e")
    slower = {BASE: 1.0, "three": 0.4, **{f"one{number}": 0.6 for number in range(9)}}
    for arm in slower:
        for seed in range(3):
            own = experiments.config(BASE if arm == BASE else OTHER, seed, rounds=ROUNDS)
            own |= {"arm": arm}
            own["resources"] |= {"num_generators": 3 if arm == "three" else 1}
            experiments.write_trial(directory, own, rows(rng, slower[arm]))
    record = read_experiment(directory)
    reserved = {arm: resources.devices(own[0].config) for arm, own in record.arms.items()}
    assert reserved["three"] == pytest.approx(1.8998)
    assert reserved["one0"] == pytest.approx(1.9)

    found = compare(record.trials)
    several, compared = found.on_equal_devices
    assert several.startswith("three, one")
    assert several.endswith(f" reserve 2 times as many CPUs as {BASE}.")
    assert compared.startswith("Among the arms that reserve as many as three, it is clearly faster")
    assert compared.count("interval") == MOST_OTHERS
    only = {"three": found.speed["three"]}  # a menu leaves out arms that fail the audit
    assert on_equal_devices(only, BASE, record.arms) == [
        f"three reserves 2 times as many CPUs as {BASE}."
    ]
    relative = relative_to(found, record.arms, "one0")
    assert relative.speed["three"].clearly(more=True)
    assert on_equal_devices(relative.speed, "one0", record.arms) == []


def test_the_answer_says_that_nothing_is_clear_and_that_one_seed_is_one_run(tmp_path):
    rng = np.random.default_rng(0)
    record = write(tmp_path / "e", {BASE: [rows(rng)], OTHER: [rows(rng, 1.2)]})

    assert answered(record, {OTHER: difference(0.05, 0.06, seeds=1)}) == [
        f"No arm is clearly faster than {BASE}.",
        f"No arm's held-out reward clearly differs from the reward of {BASE}.",
        ONE_SEED,
    ]


@pytest.mark.parametrize(("others", "said"), [([], True), ([0.5], False)])
def test_an_undisturbed_experiment_is_called_so(tmp_path, others, said):
    rng = np.random.default_rng(0)
    record = write(tmp_path / "e", {BASE: [rows(rng)], OTHER: [rows(rng, others=others)]})
    sentence = "In no round did other processes take more than 10% of the machine's CPU time."
    assert (sentence in compare(record.trials).footnotes()) is said
    for trial in record.trials:
        for row in trial.rows:
            row.pop("time/disturbed_fraction")
    unmeasured = [replace(trial) for trial in record.trials]
    assert sentence not in compare(unmeasured).footnotes()


@pytest.mark.parametrize(
    ("seconds", "lengths", "seeds", "said"),
    [
        (
            (3.3, 3.7),
            (38.0, 37.0),
            1,
            "took 3.3 to 3.7 s, because the machine's speed changed",
        ),
        ((3.3, 3.4), (38.0, 37.0), 1, None),  # about equal
        ((3.3, 3.7), (38.0, 34.0), 1, None),  # shorter responses take less time
        ((3.3, 3.7), (38.0, 37.0), 2, None),  # the intervals cover it
    ],
)
def test_the_time_of_equal_evaluations_shows_changes_of_the_machine(
    tmp_path, seconds, lengths, seeds, said
):
    _, compared = with_equal_evaluations(tmp_path, seconds, lengths, seeds)
    notes = compared.footnotes()
    found = [note for note in notes if note.startswith("Evaluations did the same work")]
    assert len(found) == (said is not None)
    unequal = {
        **compared.arms,
        OTHER: [replace(own, evaluated_with=("more work",)) for own in compared.arms[OTHER]],
    }
    notes = replace(compared, arms=unequal).footnotes()
    assert not any(note.startswith("Evaluations did the same work") for note in notes)
    assert said is None or said in found[0]


def with_equal_evaluations(
    directory: Path, seconds: Sequence[float], lengths: Sequence[float], seeds: int
) -> tuple[ExperimentRecord, Comparison]:
    """Return two arms whose evaluations differ only in time and in the lengths of responses."""
    rng = np.random.default_rng(0)
    runs = {}
    for arm, eval_s in zip((BASE, OTHER), seconds, strict=True):
        runs[arm] = [rows(rng) for _ in range(seeds)]
        for own in runs[arm]:
            own[-1] |= {"time/eval_s": eval_s, "eval/round": float(ROUNDS)}
            own[-1] |= {"reward/eval_mean": 0.5}
    record = write(directory / "e", runs)
    compared = compare(record.trials)
    changed = {
        arm: [
            replace(own, before=[38.0] * seeds, after=[length] * seeds)
            if own.quantity is changes.LENGTH
            else own
            for own in compared.changes[arm]
        ]
        for arm, length in zip((BASE, OTHER), lengths, strict=True)
    }
    return record, replace(compared, changes=changed)


@pytest.mark.parametrize(
    ("seconds", "value", "half", "marked"),
    [
        ((3.7, 3.3), 1.11, 0.05, True),  # the machine was 3.7 / 3.3 = 1.12 times as fast
        ((3.7, 3.3), 1.13, 0.05, False),
        ((3.7, 3.3), 0.90, 0.05, False),  # the machine changed in the other direction
        ((3.3, 3.7), 0.90, 0.05, True),  # the machine was 3.3 / 3.7 = 0.89 times as fast
        ((3.3, 3.7), 0.88, 0.05, False),
        ((3.3, 3.7), 1.11, 0.05, False),
        ((3.7, 3.3), 1.11, 0.20, False),  # not clear anyway
    ],
)
def test_clear_differences_that_the_machine_can_explain_are_marked(
    tmp_path, seconds, value, half, marked
):
    record, compared = with_equal_evaluations(tmp_path, seconds, (38.0, 37.0), 1)
    files = {trial.name: read_files(trial) for trial in record.trials}
    found = Contrast(
        value=value,
        neutral=1.0,
        seeds=[0],
        interval=Estimate(value=value, low=value - half, high=value + half),
    )
    compared = replace(compared, speed={OTHER: found})
    speed, cost, reward = quantities(record, compared, files)
    assert (speed.by_machine == {OTHER}) is marked
    told = verdicts([speed], compared)
    assert (", the machine can explain this)" in told[0]) is marked
    assert short_answer([speed, cost, reward], compared)[-1] == (
        "Even in these runs, differences in speed of up to 12% can come from the machine, whose "
        "speed changed from trial to trial."
    )


def test_a_trial_that_is_not_compared_does_not_show_changes_of_the_machine(tmp_path):
    _, compared = with_equal_evaluations(tmp_path, (3.3, 7.0), (38.0, 37.0), 1)
    assert compared.evaluation_times == (3.3, 7.0)
    excluded = [
        replace(own, pace=own.pace and replace(own.pace, disturbed=ROUNDS))
        for own in compared.arms[OTHER]
    ]
    assert not any(own.comparable for own in excluded)
    without = replace(compared, arms={**compared.arms, OTHER: excluded})
    assert without.evaluation_times is None


@pytest.mark.parametrize(("every", "said"), [(1, True), (2, True), (3, False)])
def test_the_plot_of_stages_names_arms_that_wait_for_evaluations(tmp_path, every, said):
    """At `eval.every=2`, rounds 1, 3, 5 and so on wait for an evaluation: half of the rounds."""
    experiments.write_experiment(tmp_path / "e")
    for arm, placement in ((BASE, "colocated"), (OTHER, "disaggregated")):
        config = experiments.config(arm, rounds=ROUNDS, placement=placement, eval={"every": every})
        experiments.write_trial(tmp_path / "e", config, rows(np.random.default_rng(0)))
    record = read_experiment(tmp_path / "e")
    files = {trial.name: read_files(trial) for trial in record.trials}
    shown = sections(record, compare(record.trials), files)
    (look,) = (p.look for section in shown for p in section.plots if p.name == "stages")
    sentence = f" In at least half of the rounds of {OTHER}, the learner also waited for an"
    assert (sentence in look) is said


def test_one_arm_alone_has_no_answer(tmp_path):
    record = write(tmp_path / "e", {BASE: [rows(np.random.default_rng(0))]})
    assert answered(record, {}) == []


def test_while_the_baseline_has_not_run_the_answer_says_what_stands_in(tmp_path):
    rng = np.random.default_rng(0)
    record = write(tmp_path / "e", {OTHER: [rows(rng)], THIRD: [rows(rng, 1.2)[:8]]})
    record = replace(record, not_begun=[(BASE, 0)])

    assert answered(record, {})[:4] == [
        f"The baseline {BASE} has not finished a round yet.",
        f"Until it does, arms are compared with {OTHER}.",
        f"No arm is clearly faster than {OTHER}.",
        f"Held-out rewards can be compared once {OTHER} and another arm each have a trial that has "
        "run all its rounds.",
    ]
    alone = replace(record, trials=record.trials[:1])
    assert answered(alone, {}) == [f"The baseline {BASE} has not finished a round yet."]
    # A baseline with a longer label has run, so the answer does not wait for it.
    ran = write(tmp_path / "labelled", {BASE: [rows(rng)], OTHER: [rows(rng)]})
    labelled = [replace(trial, arm=f"{trial.arm} (optim.lr=0.0001)") for trial in ran.trials]
    assert "has not finished a round yet" not in " ".join(
        answered(replace(ran, trials=labelled), {})
    )
    # The answer does not wait for a baseline that is not part of the experiment.
    assert (
        f"No arm is clearly faster than {OTHER}." == answered(replace(record, not_begun=[]), {})[0]
    )


# ---- One arm, before and after training --------------------------------------------------------


def write_trained(
    directory: Path,
    arms: Sequence[str],
    after: Sequence[float | None],
    before: Sequence[float | None] = (0.1, 0.2, 0.3),
    **changes: Any,
):
    """Write one trial per arm. Before and after training, three prompts earn the given rewards."""
    experiments.write_experiment(directory, **changes)
    for arm in arms:
        params = experiments.config(arm, rounds=1)
        row = experiments.row(1, eval__round=1.0)
        trial = experiments.write_trial(directory, params, [row])
        for round_, rewards in enumerate((before, after)):
            answers = [experiments.evaluation(round_, i, "x", r) for i, r in enumerate(rewards)]
            experiments.write_part(trial, "evaluations", round_, answers)
    record = read_experiment(directory)
    return before_and_after(record, {trial.name: read_files(trial) for trial in record.trials})


def test_rewards_that_stay_the_same_are_called_unchanged(tmp_path):
    said = write_trained(tmp_path / "e", ["colocated_k1"], [0.1, 0.2, 0.3])
    assert said == ["Training changed no held-out reward, on 3 prompts."]


def test_a_prompt_without_a_reward_does_not_count(tmp_path):
    (said,) = write_trained(tmp_path / "e", ["colocated_k1"], [0.5, None, 0.7])
    assert "by +0.400 " in said  # differences of 0.4 and 0.4
    assert ", on 2 prompts" in said


def test_a_warning_counts_the_training_responses_whose_reward_failed(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, errors in (("colocated_k1", 0.0), ("sync", 3.0)):
        rows = [experiments.row(1), experiments.row(2, count__reward_errors=errors)]
        experiments.write_trial(directory, experiments.config(arm), rows)
    warnings = compare(read_experiment(directory).trials).warnings()
    (warning,) = [text for text in warnings if "reward failed" in text]
    assert warning.endswith("Failed responses: sync 3.")


def test_a_note_counts_the_prompts_that_evaluations_left_out(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, unscored in (("colocated_k1", 0.0), ("sync", 3.0)):
        rows = [experiments.row(1, eval__unscored=unscored), experiments.row(2, eval__unscored=0.0)]
        experiments.write_trial(directory, experiments.config(arm), rows)
    (note,) = compare(read_experiment(directory).trials).about_rewards
    assert note.endswith("Most prompts left out of an evaluation: sync 3.")


@pytest.mark.parametrize(
    ("after", "says"),
    [
        # Differences 0.4, 0.5 and 0.6: mean 0.5, and half the interval is 4.303 x 0.1 / sqrt(3).
        ([0.5, 0.7, 0.9], "by +0.500 (95% interval: +0.252 to +0.748), on 3 prompts."),
        # Differences -0.1, 0 and 0.1.
        (
            [0.0, 0.2, 0.4],
            "by +0.000 (95% interval: -0.248 to +0.248), on 3 prompts; the change may be due to "
            "chance.",
        ),
    ],
)
def test_a_single_arm_is_compared_with_itself_before_training(tmp_path, after, says):
    said = write_trained(tmp_path / "one", [BASE], after)
    assert said == [f"Training changed the held-out reward {says}"]


def test_rewards_that_are_all_0_are_not_called_a_change(tmp_path):
    said = write_trained(tmp_path / "none", [BASE], [0.0] * 3, before=[0.0] * 3)
    assert said == ["Every held-out reward was 0, before and after training, on 3 prompts."]
    (said,) = write_trained(tmp_path / "some", [BASE], [0.0, 0.0, 0.1], before=[0.0] * 3)
    assert said.startswith("Training changed the held-out reward by +0.033")


def test_several_arms_and_changed_code_are_not_compared_with_before(tmp_path):
    assert write_trained(tmp_path / "two", [BASE, OTHER], [0.5, 0.7, 0.9]) == []
    assert write_trained(tmp_path / "new", [BASE], [0.5, 0.7, 0.9], replaced=["ab"]) == []
    assert changed_code(read_experiment(tmp_path / "two")) == ""
    assert "cannot be compared" in changed_code(read_experiment(tmp_path / "new"))
