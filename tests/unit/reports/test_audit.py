"""The audit before a verdict: planted faults are named, and clean experiments raise no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import experiments
import pytest

from reports.audit import Audit, audit_arms, audit_data, check_rows, consequence_rows, passed
from reports.experiment import read_experiment
from reports.menu import NO_VERDICT, UNDECIDED_STATUS, Menu, VerdictOptions, menu_of
from reports.menu_text import menu_data, paragraph, table
from reports.parquet_reader import read_all
from reports.summary import compare

BASE, COPY, STALE, OTHER = "colocated_k1", "sync", "async_k1", "colocated_k1_two_cores"
ROUNDS, SEEDS = 6, 2
# The audit compares what arms learn. The number of cores should not change that, so the arm `OTHER`
# also has a different clip range.
FIXED: dict[str, Mapping[str, Any]] = {OTHER: {"loss.clip": 0.3}}
Row = dict[str, Any]
Spoil = Callable[[Row], None]


def write(
    directory: Path,
    spoiled: Mapping[str, Spoil] | None = None,
    salt: int = 0,
    fixed: Mapping[str, Any] | None = None,
    lag: int = 1,
) -> Path:
    """Write a clean experiment of two seeds.

    `COPY` equals `BASE` bit for bit, as it does in real experiments.

    Args:
        directory: The directory to make.
        spoiled: For some arms, a function that changes each row.
        salt: A number. Experiments with different salts have different rows.
        fixed: Settings of all arms.
        lag: The lag of `STALE`.
    """
    experiments.write_experiment(directory, num_samples=SEEDS)
    for arm in (BASE, COPY, STALE, OTHER):
        own = BASE if arm == COPY else arm
        for seed in range(SEEDS):
            draws = random.Random(f"{salt}/{own}/{seed}")
            params = experiments.config(
                arm, seed, rounds=ROUNDS, **FIXED.get(arm, {}), **(fixed or {})
            )
            params |= {"lag": lag} if arm == STALE else {}
            written = clean_rows(draws, params["lag"])
            for row in written:
                (spoiled or {}).get(arm, lambda row: None)(row)
            experiments.write_trial(directory, params, written)
    return directory


def clean_rows(draws: random.Random, lag: int) -> list[Row]:
    """Return rows of a trial in which the reward of a long group may have failed."""
    final = 0.8 + draws.gauss(0, 0.01)
    failed_in = draws.choice((None, *range(1, ROUNDS + 1)))
    found = []
    for n in range(1, ROUNDS + 1):
        trained = 40 * draws.uniform(0.9, 1.1)
        fails = n == failed_in
        failed = 0 if failed_in is None or n < failed_in else 1
        found.append(
            experiments.row(
                n,
                count__trained=160.0 * n - failed,
                count__requested=160.0 * n,
                count__dropped=float(failed),
                time__wall_clock_s=2.0 * n,
                reward__train_mean=draws.random(),
                reward__eval_mean=final,
                eval__round=float(ROUNDS),
                response__length_mean=trained,
                response__drawn_length_mean=trained * (1 + 0.01 * fails),
                loss__clip_fraction=draws.uniform(0, 0.1),
                loss__weights_bounded_fraction=0.0,
                off_policy__ess_fraction=draws.uniform(0.8, 1),
                optim__grad_norm=draws.uniform(0.1, 1),
                version__learner=float(n),
                lag__max=float(min(n - 1, lag)),
                lag__mean=float(min(n - 1, lag)),
            )
        )
    return found


def menu(directory: Path, **options: Any) -> Menu:
    experiment = read_experiment(directory)
    comparison = compare(experiment.trials, experiment.not_begun)
    files = read_all(experiment.trials)
    return menu_of(experiment, comparison, files, VerdictOptions(margin=0.1, **options))


def faults(found: Menu) -> dict[str, list[str]]:
    """Return the failed checks of each arm that failed at least one."""
    checks = {arm: [f.check for f in audit.faults] for arm, audit in found.audits.items()}
    return {arm: own for arm, own in checks.items() if own}


# ---- Planted faults --------------------------------------------------------------------------


def without_gradients(row: Row) -> None:
    row["optim/grad_norm"] = 0.0


def without_lag(row: Row) -> None:
    row["lag/max"] = row["lag/mean"] = 0.0


def without_long_responses(row: Row) -> None:
    row["response/length_mean"] = 0.85 * row["response/drawn_length_mean"]


def with_fewer_samples(row: Row) -> None:
    row["count/trained"] *= 0.95


def as_the_baseline(row: Row) -> None:
    n = row["training_iteration"]
    row |= {
        name: value
        for name, value in clean_rows(random.Random("equal"), 0)[n - 1].items()
        if not name.startswith("time/")
    }


@pytest.mark.parametrize(
    ("arm", "check", "spoil", "reason"),
    [
        (OTHER, "gradient", without_gradients, "all gradients were zero in seeds 0, 1"),
        (STALE, "lag", without_lag, "lag=1 was not delivered: no group was more than 0 rounds old"),
        (STALE, "length", without_long_responses, "long responses were discarded"),
        (OTHER, "samples", with_fewer_samples, f"{BASE} on 38"),
    ],
)
def test_a_planted_fault_is_named_and_the_arm_has_no_verdict(tmp_path, arm, check, spoil, reason):
    found = menu(write(tmp_path / "e", {arm: spoil}))
    by_arm = {row.arm: row for row in found.rows}

    assert faults(found) == {arm: [check]}
    assert by_arm[arm].verdict == NO_VERDICT
    assert by_arm[arm].judgement is None
    assert not by_arm[arm].in_pareto_set
    assert found.status == UNDECIDED_STATUS
    assert by_arm[COPY].verdict == "no worse"
    (said,) = (text for text in paragraph(found) if text.startswith("No verdict"))
    assert said.startswith(f"No verdict on {arm}: ")
    assert reason in said
    (line,) = (cells for cells in check_rows(found.audits) if cells[0] == arm)
    assert line[1] == f"failed: {check}"
    others = ", ".join(other for other in (BASE, OTHER, COPY, STALE) if other != arm)
    assert f"{others} passed their audit (" in " ".join(table(found).split())
    data = menu_data(found)["arms"][arm]
    assert (data["verdict"], data["pareto"]) == (None, False)
    assert data["faults"] == [fault.reason for fault in found.audits[arm].faults]


def test_identical_arms_are_named_unless_only_the_execution_differs(tmp_path):
    spoiled = dict.fromkeys((BASE, COPY, OTHER), as_the_baseline)
    found = menu(write(tmp_path / "e", spoiled))

    assert faults(found) == {OTHER: ["identical"]}
    assert found.audits[OTHER].identical == [BASE, COPY]
    (fault,) = found.audits[OTHER].faults
    assert fault.reason == (
        "it learned the same as colocated_k1 and sync, bit for bit, although loss.clip, "
        "loss.clip_high differ"
    )


def test_arms_that_differ_in_one_seed_are_not_identical(tmp_path):
    spoiled = dict.fromkeys((BASE, COPY, OTHER), as_the_baseline)
    directory = write(tmp_path / "e", spoiled)
    (path,) = directory.glob(f"{OTHER}-1-*/result.json")
    path.write_text(
        path.read_text().replace('"loss/clip_fraction": 0.', '"loss/clip_fraction": 0.9')
    )
    assert faults(menu(directory)) == {}


def test_without_a_sound_baseline_no_arm_has_a_verdict(tmp_path):
    found = menu(write(tmp_path / "e", {BASE: without_gradients}))

    assert [row.verdict for row in found.others] == [NO_VERDICT] * 3
    assert found.status == UNDECIDED_STATUS
    assert found.price is None
    assert found.margin == pytest.approx(0.1)
    said = " ".join(paragraph(found))
    assert "The baseline fails its audit: the policy never changed" in said
    assert "No verdict on sync: the baseline colocated_k1 fails its audit." in said
    assert "colocated_k1 passed" not in table(found)


def test_a_policy_without_a_single_step_has_no_gradient(tmp_path):
    def all_steps_skipped(row: Row) -> None:
        row["version/learner"] = 0.0

    assert faults(menu(write(tmp_path / "e", {OTHER: all_steps_skipped}))) == {OTHER: ["gradient"]}


# ---- Clean experiments -----------------------------------------------------------------------


def test_one_line_says_that_every_arm_passed(tmp_path):
    said = " ".join(table(menu(write(tmp_path / "e"))).split())
    assert said.endswith(
        "Every arm passed its audit (lag, gradients, lengths, no unexpected copies, samples). The "
        "report has the figures."
    )


@pytest.mark.slow
def test_twenty_clean_experiments_raise_no_alarm(tmp_path):
    found = [menu(write(tmp_path / str(salt), salt=salt)) for salt in range(20)]
    assert [faults(own) for own in found] == [{}] * 20
    assert not any(row.faults for own in found for row in own.rows)


def test_a_filter_may_select_by_length(tmp_path):
    fixed = {"rollout.zero_advantage": "filter"}
    directory = write(tmp_path / "e", {STALE: without_long_responses}, fixed=fixed)
    assert faults(menu(directory)) == {}


@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [
        ("rollout.zero_advantage", "filter", {"dropped_zero_advantage": 0.2}),
        # Not all batches could be filled, although many other prompts were drawn.
        ("rollout.zero_advantage", "resample", {"dropped_zero_advantage": 0.9}),
        ("buffer_capacity", 4, {"dropped_stale": 0.15, "waiting": 0.05}),
    ],
)
def test_a_treatment_may_leave_groups_out(tmp_path, key, value, counts):
    def leaves_out(row: Row) -> None:
        row |= {f"count/{name}": share * row["count/trained"] for name, share in counts.items()}
        row["count/trained"] *= 0.8

    fixed = {key: value, "rollout.prompts": 160}
    directory = write(tmp_path / "e", {OTHER: leaves_out}, fixed=fixed)
    assert faults(menu(directory)) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("eval.every", 3), ("model.gradient_checkpointing", True), ("rollout.slots", 4)],
)
def test_equal_arms_may_differ_in_evaluation_and_execution(tmp_path, monkeypatch, key, value):
    monkeypatch.setitem(FIXED, OTHER, {key: value})
    spoiled = dict.fromkeys((BASE, COPY, OTHER), as_the_baseline)
    found = menu(write(tmp_path / "e", spoiled))
    assert found.audits[OTHER].identical == []
    assert faults(found) == {}


def test_a_trial_too_short_for_its_lag_is_told_to_train_more_rounds(tmp_path):
    def reasons_at(lag: int) -> str:
        directory = write(tmp_path / str(lag), {STALE: without_lag}, lag=lag)
        (fault,) = menu(directory).audits[STALE].faults
        return fault.reason

    # In six rounds, no group can be more than five rounds old.
    assert reasons_at(10).endswith("train more rounds")
    assert reasons_at(8).endswith("use lag_mode=exact")


def test_a_bound_of_four_is_delivered_by_a_group_three_rounds_old(tmp_path):
    assert faults(stale_by(tmp_path / "two", 2)) == {STALE: ["lag"]}
    assert faults(stale_by(tmp_path / "three", 3)) == {}


def stale_by(directory: Path, rounds: int) -> Menu:
    def delivers(row: Row) -> None:
        row["lag/max"] = min(row["lag/max"], float(rounds))

    return menu(write(directory, {STALE: delivers}, lag=4))


# ---- Figures by hand -------------------------------------------------------------------------


def test_the_audit_shows_what_an_arm_received(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    params = experiments.config(STALE, 0, rounds=2, **{"loss.importance_cap": 2.0})
    given = {"count__requested": 20.0, "count__trained": 15.0, "count__dropped": 5.0}
    written = [
        experiments.row(
            n,
            **given,
            lag__max=n - 1.0,
            off_policy__ess_fraction=n / 2,
            response__length_mean=29.0 + n,
            response__drawn_length_mean=30.0 + n,
            loss__clip_fraction=0.1 * n,
            loss__weights_bounded_fraction=0.01,
            optim__grad_norm=n - 1.0,
        )
        for n in (1, 2)
    ]
    trial = experiments.write_trial(directory, params, written)
    first = [experiments.rollout(1, 0, lag=0)]
    experiments.write_part(trial, "rollouts", 1, first)
    later = [experiments.rollout(2, cursor, lag=1) for cursor in (1, 2, 3)]
    experiments.write_part(trial, "rollouts", 2, later)
    found = audit_of(directory)

    assert found.lags == {0: 0.25, 1: 0.75}
    assert (found.ess_fraction, found.discarded) == (0.75, 0.25)
    assert (found.trained_tokens, found.drawn_tokens) == (30.5, 31.5)
    assert found.clipped == pytest.approx(0.15)
    assert (found.weights_bounded, found.without_gradient) == (0.01, 0.5)
    assert check_rows({STALE: found}) == [
        (STALE, "passed", "1", "0.75 (0 to 1)", "50.0%", "30.5 / 31.5", "-")
    ]
    assert consequence_rows({STALE: found}) == [(STALE, "75.0%", "25.0%", "15.0%", "1.0%")]
    data = audit_data(found)
    assert (data["passed"], data["faults"], data["lags"]) == (True, [], {"0": 0.25, "1": 0.75})


def test_an_arm_without_a_complete_trial_has_not_been_audited(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    experiments.write_trial(directory, experiments.config(STALE), [experiments.row(1)])
    found = audit_of(directory)

    assert (found.faults, audit_data(found)["passed"]) == ([], None)
    assert check_rows({STALE: found})[0][1] == "-"
    assert passed({STALE: found}, [STALE]) == ""


def audit_of(directory: Path) -> Audit:
    """Return the audit of an experiment's only arm."""
    experiment = read_experiment(directory)
    files = read_all(experiment.trials)
    (found,) = audit_arms(experiment, files, None).values()
    return found
