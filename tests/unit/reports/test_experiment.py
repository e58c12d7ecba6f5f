"""An experiment is read from disk as it is; unreadable parts are named and left out."""

from __future__ import annotations

import json
import os
import time

import pytest
from experiments import (
    change,
    config,
    evaluation,
    gradient_step,
    of_tune,
    rollout,
    row,
    write_experiment,
    write_part,
    write_trial,
)

from grpo_trainable.config import GRPOConfig
from reports.experiment import ExperimentError, read_experiment
from reports.page import _examples_section
from reports.parquet_reader import read_files, response_text
from reports.plots import STANDARD_ERRORS, _sampled
from reports.records import count_stopped
from reports.report import ReportError, write_report
from reports.series import Point, curve, metric
from reports.summary import compare, table


@pytest.fixture
def experiment(tmp_path):
    return write_experiment(tmp_path / "three_seeds")


def only_trial(experiment):
    (trial,) = read_experiment(experiment).trials
    return trial


def cells(text: str) -> dict[str, list[str]]:
    """Return the table's rows by arm. Columns are at least two blanks apart."""
    lines = [line for line in text.splitlines() if "  " in line]
    return {line.split()[0]: [c.strip() for c in line.split("  ") if c.strip()] for line in lines}


# ---- Rows ------------------------------------------------------------------------------------


def test_rows_are_read_in_order_with_numbers_only(experiment):
    write_trial(experiment, config(), [{**row(1), "node_ip": "10.0.0.1", "config": {}}, row(2)])
    trial = only_trial(experiment)

    assert [r["training_iteration"] for r in trial.rows] == [1, 2]
    assert "node_ip" not in trial.rows[0]
    assert "done" not in trial.rows[0]
    assert trial.column("count/trained") == [16.0, 32.0]
    assert trial.last("count/trained") == 32.0
    assert trial.problems == []


def test_settings_are_those_that_the_trial_used_on_its_own_machine(experiment, tmp_path):
    """Tune's copy of the config lacks defaults that depend on a model on another machine."""
    (tmp_path / "lora").mkdir()
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    file = tmp_path / "lora" / "adapter_config.json"
    file.write_text(json.dumps({**lora, "base_model_name_or_path": "/not/here"}))
    used = {**config(), "optim": {**config()["optim"], "lr": 5e-6}}
    for seed, model in enumerate([{"path": "/not/here"}, {"path": str(tmp_path / "lora")}]):
        params = {"arm": "colocated_k1", "seed": seed, "model": model}
        write_trial(experiment, params, [{**row(1), "config": {**used, "seed": seed}}])
    found = read_experiment(experiment)
    assert found.problems == []
    assert [(trial.config.seed, trial.config.optim.lr) for trial in found.trials] == [
        (0, 5e-6),
        (1, 5e-6),
    ]


def test_rows_with_and_without_defaults_are_of_one_trial(experiment):
    given = {"arm": "colocated_k1", "seed": 0, "rounds": 96}
    rows = [row(1), {**row(2), "config": given}]
    rows[0]["config"] = GRPOConfig.from_dict(given).to_dict()
    write_trial(experiment, given, rows)
    assert not only_trial(experiment).copied


def test_a_half_written_line_is_skipped_and_named(experiment):
    directory = write_trial(experiment, config(), [row(1), row(2)])
    with open(directory / "result.json", "a") as file:
        file.write('{"training_iteration": 3, "reward/tr')
    trial = only_trial(experiment)

    assert trial.round == 2
    assert trial.problems == [
        "colocated_k1-0-abc_00000/result.json: line 3 of 3 is half-written and was skipped"
    ]


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", "null", '{"training_iteration": "2"}', "\x00\x00", '{"training_iteration": true}'],
)
def test_a_damaged_line_between_others_is_skipped_and_named(experiment, line):
    directory = write_trial(experiment, config(), [row(1)])
    with open(directory / "result.json", "a") as file:
        file.write(f"{line}\n{json.dumps(row(3))}\n")
    trial = only_trial(experiment)

    assert [r["training_iteration"] for r in trial.rows] == [1, 3]
    assert "line 2 of 3 is damaged" in trial.problems[0]


def test_rounds_trained_again_after_a_resume_replace_those_before(experiment):
    first = [row(n, time__eval_s=1.0) for n in (1, 2, 3, 4, 5)]
    again = [row(n, time__eval_s=10.0) for n in (3, 4)]
    write_trial(experiment, config(), [*first, *again])
    trial = only_trial(experiment)

    assert [r["training_iteration"] for r in trial.rows] == [1, 2, 3, 4]
    assert trial.column("time/eval_s") == [1, 1, 10, 10]


def test_a_value_that_is_no_finite_number_is_left_out_and_named(experiment):
    nan = float("nan")
    write_trial(experiment, config(), [row(1), row(2, loss__policy=nan), row(3, loss__policy=nan)])
    trial = only_trial(experiment)

    assert trial.column("loss/policy") == []
    assert trial.problems == [
        "colocated_k1-0-abc_00000/result.json: loss/policy is nan, first in round 2"
    ]


@pytest.mark.parametrize("number", [1e308, -1e308, 3.6e38])
def test_a_number_that_no_trial_computes_is_left_out_and_named(experiment, number):
    write_trial(experiment, config(), [row(1), row(2, time__eval_s=number), row(3)])
    trial = only_trial(experiment)

    assert trial.column("time/eval_s") == [0.0, 0.0]
    assert trial.problems == [
        f"colocated_k1-0-abc_00000/result.json: time/eval_s is {number}, first in round 2"
    ]


def test_a_number_too_small_for_a_trial_is_0(experiment):
    write_trial(experiment, config(), [row(1, time__wall_clock_s=1e-320, loss__policy=-1e-40)])
    trial = only_trial(experiment)
    assert trial.column("time/wall_clock_s") == [0.0]
    assert trial.column("loss/policy") == [-1e-40]


def test_evaluations_are_those_rows_that_measured_one(experiment):
    # Evaluations ran before training (round 0), after round 2 and after round 3. Row 4 repeats the
    # evaluation of round 3.
    rows = [
        row(1, eval__round=0, reward__eval_mean=0.3),
        row(2, eval__round=2, reward__eval_mean=0.5),
        row(3, eval__round=3, reward__eval_mean=0.6),
        row(4, eval__round=3, reward__eval_mean=0.6),
    ]
    write_trial(experiment, config(), rows)

    points = [(round_, reward) for round_, reward, _ in only_trial(experiment).evaluated()]
    assert points == [(0, 0.3), (2, 0.5), (3, 0.6)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_description_with_a_number_that_is_not_finite_is_named(experiment, number):
    write_trial(experiment, config(), [row(1)])
    (experiment / "experiment.json").write_text(f'{{"started": {number}}}')
    record = read_experiment(experiment)

    assert record.description == {}
    assert record.problems == [
        f"three_seeds/experiment.json cannot be read ({number} is not a finite number)"
    ]


@pytest.mark.parametrize("planned", [1, [1], [["sync"]], [["sync", "0"]], [[["sync"], 0]]])
def test_a_plan_that_is_none_is_named(experiment, planned):
    write_trial(experiment, config(), [row(1)])
    (experiment / "experiment.json").write_text(json.dumps({"planned": planned}))
    record = read_experiment(experiment)

    assert record.not_begun == []
    assert record.problems == ["experiment.json: planned: not a list of arms and seeds"]


def test_trials_of_the_plan_that_have_no_directory_have_not_begun(experiment):
    planned = [["sync", 0], ["async_k1", 0], ["sync", 1], ["async_k1", 1]]
    (experiment / "experiment.json").write_text(json.dumps({"planned": planned}))
    write_trial(experiment, config("sync"), [row(1)])
    write_trial(experiment, config("async_k1"), [])
    assert read_experiment(experiment).not_begun == [("sync", 1), ("async_k1", 1)]


def test_a_trial_with_settings_of_another_seed_has_begun(experiment):
    """PBT leaves a trial with another trial's seed when it copies that trial's whole config."""
    planned = [["sync", 0], ["sync", 1]]
    (experiment / "experiment.json").write_text(json.dumps({"planned": planned}))
    write_trial(experiment, config("sync", seed=0), [row(1)])
    clone = write_trial(experiment, config("sync", seed=1), [row(1)])
    (clone / "params.json").write_text(json.dumps(config("sync", seed=0)))
    assert read_experiment(experiment).not_begun == []


# ---- Trials ----------------------------------------------------------------------------------


def test_status_tells_finished_failed_interrupted_and_not_begun_apart(experiment):
    def write(arm, rows, error=None):
        write_trial(experiment, config(arm, rounds=4), rows, error=error)

    rows = [row(n) for n in (1, 2, 3)]
    last = {**row(4), "done": True}
    write("colocated_k1", [*rows, last])
    write("colocated_k2", rows, error="Traceback\n  File\nActorFailed: generator died\n\n")
    write("colocated_k4", rows)
    write("colocated_k8", [])
    write("sync", [*rows, last], error="ActorFailed: once")
    write("async_k1", [rows[0], {**rows[1], "done": True}])
    status = {t.config.arm: t.status for t in read_experiment(experiment).trials}

    assert status == {
        "colocated_k1": "finished",
        "colocated_k2": "failed after round 3 of 4: ActorFailed: generator died",
        "colocated_k4": "still running or interrupted: round 3 of 4",
        "colocated_k8": "no round yet",
        "sync": "finished",
        "async_k1": "stopped by a scheduler or stopper after round 2 of 4",
    }


def test_rounds_that_were_set_aside_are_named(experiment):
    trial = write_trial(experiment, config(), [row(1)])
    for number, name in enumerate(("checkpoint_000000/state.json", "result.json"), start=1):
        file = trial / f"set-aside-{number}" / name
        file.parent.mkdir(parents=True)
        file.touch()
    (trial / "set-aside-3").mkdir()
    assert only_trial(experiment).problems == [
        # After a copy that Tune did not know of, the trial continues from an earlier checkpoint.
        f"{trial.name}: the trial did not continue from the checkpoints in "
        f"{trial.name}/set-aside-1",
        f"{trial.name}: no checkpoint could be used, so the trial started again from round 0; its "
        f"earlier files are in {trial.name}/set-aside-2",
    ]


def test_trial_that_went_on_after_its_failure_is_not_failed(experiment):
    text = "Failure # 1 (occurred at 2026-11-20_12-00-00)\nTraceback\nActorFailed: once\n"
    at = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    for arm, reported in (("sync", at + 9), ("async_k1", at - 9)):
        rows = [{**row(3), "timestamp": reported}]
        write_trial(experiment, config(arm, rounds=4), rows, error=text)
    status = {t.config.arm: t.status for t in read_experiment(experiment).trials}
    assert status == {
        "sync": "still running or interrupted: round 3 of 4; earlier error: ActorFailed: once",
        "async_k1": "failed after round 3 of 4: ActorFailed: once",
    }


def test_trial_whose_last_policy_is_not_saved_is_not_done(experiment):
    text = "Failure # 1 (occurred at 2026-11-20_12-00-00)\nPolicyNotSaved: sync/0: no space\n"
    at = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    for arm, reported in (("sync", at - 9), ("async_k1", at + 9)):
        rows = [{**row(4), "timestamp": reported, "done": True}]
        write_trial(experiment, config(arm, rounds=4), rows, error=text)
    trials = {t.config.arm: t for t in read_experiment(experiment).trials}
    assert {arm: (t.done, t.failed, t.status) for arm, t in trials.items()} == {
        "sync": (False, True, "failed after round 4 of 4: PolicyNotSaved: sync/0: no space"),
        "async_k1": (True, False, "finished"),  # the row is newer than the error
    }


def test_an_empty_error_of_a_full_disk_is_a_failure(experiment):
    write_trial(experiment, config(rounds=4), [{**row(4), "done": True}], error="")
    trial = only_trial(experiment)
    assert (trial.done, trial.failed) == (False, True)
    assert trial.status == "failed after round 4 of 4: (error.txt is empty)"


def test_trials_of_one_arm_that_differ_are_told_apart(experiment):
    for seed, lag in ((0, 1), (1, 2), (2, 2)):
        write_trial(experiment, {**config("async_k1", seed), "lag": lag}, [row(1)])
    write_trial(experiment, config("sync", 0), [row(1)])
    arms = {arm: len(trials) for arm, trials in read_experiment(experiment).arms.items()}
    assert arms == {"async_k1 (lag=1)": 1, "async_k1 (lag=2)": 2, "sync": 1}


def test_trials_stand_in_the_order_of_the_space_then_of_seeds(experiment):
    for arm, seed in (("async_k1", 0), ("sync", 1), ("sync", 0), ("colocated_k1", 0)):
        write_trial(experiment, config(arm, seed), [row(1)])

    trials = read_experiment(experiment).trials
    order = [(trial.config.arm, trial.config.seed) for trial in trials]
    assert order == [("colocated_k1", 0), ("sync", 0), ("sync", 1), ("async_k1", 0)]


@pytest.mark.parametrize("content", [None, "", "[1]", '{"kk": 1}', "{"])
def test_a_trial_without_a_usable_config_is_left_out_and_named(experiment, content):
    write_trial(experiment, config(), [row(1)])
    directory = write_trial(experiment, config("sync"), [row(1)])
    (directory / "params.json").unlink()
    if content is not None:
        (directory / "params.json").write_text(content)
    record = read_experiment(experiment)

    assert [trial.config.arm for trial in record.trials] == ["colocated_k1"]
    (problem,) = record.problems
    assert problem.startswith("sync-0-abc_00000: left out, because its config cannot be used")
    assert "\n" not in problem


def test_a_trial_of_rllib_is_named_as_such(tmp_path):
    trial = write_trial(tmp_path, config(), [row(1)])
    (trial / "params.json").write_text('{"_disable_action_flattening": -1, "num_env_runners": 0}')
    with pytest.raises(ExperimentError, match="trials of RLlib have no report"):
        read_experiment(tmp_path)


def test_where_there_is_no_experiment_one_line_says_so(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other" / "inner"
    other.mkdir(parents=True)
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (file, "is not a directory"),
        (empty, "is empty"),
        (tmp_path / "other", "is not an experiment"),
    ):
        with pytest.raises(ExperimentError, match=words) as caught:
            read_experiment(path)
        assert "\n" not in str(caught.value)


def test_an_experiment_in_which_every_trial_is_invalid_says_why(tmp_path):
    for seed in range(2):
        settings = {**config("sync", seed), "placement": "colocated", "lag": 1}
        write_trial(tmp_path, settings, [], error="ConfigError: lag=1")

    left_out = [rf"sync-{n}-\S+ \(sync/{n}\): left out, [^;]*lag=1: [^;]+; [^;]+" for n in range(4)]
    with pytest.raises(ReportError, match=f"no trial can be used; {'; '.join(left_out[:2])}$"):
        write_report(tmp_path)

    for seed in range(2, 4):
        settings = {**config("sync", seed), "placement": "colocated", "lag": 1}
        write_trial(tmp_path, settings, [], error="ConfigError: lag=1")
    for number in range(2):  # Tune makes the directory of a trial before the trial begins
        (tmp_path / f"GRPO_7171d_0000{number}_{number}_seed=0_2026-11-28_13-20-13").mkdir()

    more = f"{'; '.join(left_out[:3])}; 1 more trial left out; not begun: 2 trials$"
    with pytest.raises(ReportError, match=more):
        write_report(tmp_path)


def test_an_experiment_in_which_every_trial_failed_says_why(experiment):
    for seed in range(2):
        write_trial(experiment, config("sync", seed), [], error="Traceback\nPluginError: no task")

    reason = r"every trial failed before its first round ended; sync/0: PluginError: no task$"
    with pytest.raises(ReportError, match=reason):
        write_report(experiment)


def test_a_long_error_of_every_trial_is_shown_as_a_whole(experiment):
    write_trial(experiment, config("sync", 0), [], error=f"PluginError: {'x' * 300}")
    with pytest.raises(ReportError, match=r"sync/0: PluginError: x{300}$"):
        write_report(experiment)


def test_an_experiment_that_tune_was_given_from_python_is_read_too(tmp_path):
    directory = tmp_path / "of_tuner"
    directory.mkdir()
    write_trial(directory, config(), [row(1)])
    record = read_experiment(directory)

    assert len(record.trials) == 1
    assert record.own_tuner
    assert record.problems == []


@pytest.mark.slow
def test_trials_of_one_arm_with_the_same_seed_are_named(tmp_path):
    for run in range(2):
        trial = write_trial(tmp_path, config("sync", 3), [row(1)])
        trial.rename(f"{trial}_of_run_{run}")
    text = write_report(tmp_path, warn=lambda text: None).read_text()
    assert "sync: 2 trials have seed 3, and all of them count." in text


def test_long_labels_of_a_users_tuner_are_numbers_in_the_order_of_the_first_rows(tmp_path):
    sampled = ((2, 1e-4, "auto"), (1, 2e-4, "object_store"), (0, 3e-4, "auto"), (3, 3e-4, "auto"))
    for at, (seed, rate, transport) in enumerate(sampled):
        fixed = {"optim.lr": rate, "transport": transport}
        if at < 2:
            fixed |= {"rounds": 48, "lag": 1}
        settings = {**config("sync", seed, **fixed), "arm": "custom"}
        write_trial(tmp_path, settings, [row(1, timestamp=at)])
    trials = read_experiment(tmp_path).trials

    assert [(trial.arm, trial.config.seed) for trial in trials] == [
        ("custom 1", 2),
        ("custom 2", 1),
        ("custom 3", 0),
        ("custom 3", 3),
    ]


def test_trials_of_a_users_tuner_keep_their_order_if_a_restore_ran_them_in_another(tmp_path):
    for number, at in ((0, 30), (1, 20), (10, 10)):
        settings = config("sync", number, **{"optim.lr": 1e-4 * (number + 1)})
        name = f"GRPO_45ecf_000{number:02}_{number}_seed={number}_2026-11-28_07-21-00"
        of_tune(tmp_path, name, settings, [row(1, timestamp=at)])
    assert [trial.config.seed for trial in read_experiment(tmp_path).trials] == [0, 1, 10]


def test_settings_that_look_equal_in_a_label_are_numbered(tmp_path):
    for seed, rate in enumerate((1.0001e-4, 1.0002e-4, 1.0001e-4)):
        settings = config("sync", seed, **{"optim.lr": rate})
        write_trial(tmp_path, settings, [row(1, timestamp=seed)])
    arms = {arm: len(trials) for arm, trials in read_experiment(tmp_path).arms.items()}

    assert arms == {"sync 1": 2, "sync 2": 1}


def test_a_trial_that_failed_before_its_first_row_has_the_arm_of_trials_with_its_relative_path(
    tmp_path,
):
    for seed in (0, 1):
        used = {"task.reward": "/home/user/my.py:score"}
        params = {**config("sync", seed, **used), "task": {"reward": "my.py:score"}}
        rows = [{**row(1), "config": {**config("sync", seed, **used), "arm": "custom"}}]
        name = f"GRPO_45ecf_0000{seed}_{seed}_seed={seed}_2026-11-28_07-21-0{seed}"
        failure = {"error": "ActorFailed: a machine"} if seed else {}
        of_tune(tmp_path, name, params, [] if seed else rows, **failure)
    trials = read_experiment(tmp_path).trials

    assert [(trial.arm, trial.round) for trial in trials] == [("custom", 1), ("custom", 0)]
    assert {trial.config.task.reward for trial in trials} == {"/home/user/my.py:score"}


def test_of_a_failed_trial_that_was_restarted_only_the_new_trial_counts(tmp_path):
    failed = {"error": "ActorFailed: a machine"}
    first = "GRPO_22a66_00000_0_seed=0_2026-11-28_07-05-47"
    second = "GRPO_dd53c06a_0_seed=0_2026-11-28_07-07-54"
    third = "GRPO_219a0d75_0_seed=0_2026-11-28_08-07-54"
    of_tune(tmp_path, first, config("sync"), [row(1)], **failed)
    of_tune(tmp_path, second, config("sync"), [], **failed)
    of_tune(tmp_path, third, config("sync"), [row(1)])
    # Trials of one fit() that have equal settings are not restarts of each other.
    failing = "GRPO_22a66_00001_1_2026-11-28_07-05-47"
    of_tune(tmp_path, failing, config("sync"), [row(1)], **failed)
    # These trials do not end in a failure.
    of_tune(tmp_path, "GRPO_22a66_00002_2_2026-11-28_07-05-47", config("sync", 1), [row(1)])
    of_tune(tmp_path, "GRPO_22a67_00002_2_2026-11-28_08-05-47", config("sync", 1), [row(1)])
    record = read_experiment(tmp_path)

    left_out = {first, second}
    names = {trial.name for trial in record.trials}
    assert names == {path.name for path in tmp_path.iterdir()} - left_out
    assert record.problems == [
        f"{first} failed after round 1 of 96: ActorFailed: a machine. It was started again as "
        f"{second}, and only the new trial counts",
        f"{second} failed after round 0 of 96: ActorFailed: a machine. It was started again as "
        f"{third}, and only the new trial counts",
    ]


def test_settings_come_from_the_rows_if_params_json_is_missing(tmp_path):
    name = "GRPO_34ba9_00001_1_seed=1_2026-11-28_13-40-07"
    of_tune(tmp_path, name, config("sync", 1), [{**row(1), "config": config("sync", 1)}])
    (tmp_path / name / "params.json").unlink()
    (trial,) = read_experiment(tmp_path).trials

    assert (trial.arm, trial.config.seed) == ("sync", 1)
    told = f"{name}/params.json is missing; the settings were read from result.json"
    assert trial.problems == [told]


def test_a_trial_that_tune_begins_again_after_a_kill_counts_once(tmp_path):
    killed = "GRPO_34ba9_00001_1_seed=1_2026-11-28_13-40-07"
    again = "GRPO_34ba9_00001_1_seed=1_2026-11-28_13-40-46"
    rows = [{**row(round_), "config": config("sync", 1)} for round_ in (1, 2)]
    of_tune(tmp_path, killed, config("sync", 1), rows)
    (tmp_path / killed / "params.json").unlink()  # Tune copies it with a delay
    of_tune(tmp_path, again, config("sync", 1), [row(1)])
    record = read_experiment(tmp_path)

    assert [trial.name for trial in record.trials] == [again]
    assert record.problems == [
        f"{killed} still running or interrupted: round 2 of 96. It was started again as {again}, "
        "and only the new trial counts",
    ]


def test_a_trial_without_an_arm_has_the_name_that_tune_gave_it(tmp_path):
    params = config("sync")
    trial = write_trial(tmp_path, params, [{**row(1), "trial_id": "1bd944e1"}])
    del params["arm"]
    (trial / "params.json").write_text(json.dumps(params))
    trial.rename(tmp_path / "GRPO_1bd944e1_2_lag=1_2026-11-26_15-32-06")

    assert [trial.label for trial in read_experiment(tmp_path).trials] == ["GRPO_1bd944e1"]


# ---- Parquet parts ---------------------------------------------------------------------------


def test_steps_are_medians_over_the_rounds(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2), row(3)])
    for round_, kls in ((1, (0.0, -0.1)), (2, (0.0, None)), (3, (-0.2, -0.5))):
        steps = [gradient_step(round_, i + 1, kl, 0.1 * round_) for i, kl in enumerate(kls)]
        write_part(trial, "steps", round_, steps)
    steps = read_files(only_trial(experiment)).steps
    assert [(s, p.kl_sampler_nats) for s, p in steps.items()] == [
        (1, pytest.approx(0.0)),
        (2, pytest.approx(0.3)),
    ]
    assert steps[1].clip_fraction == pytest.approx(0.2)


def test_lags_count_each_group_once_at_its_first_use(experiment):
    trial = write_trial(experiment, config("async_k1"), [row(1), row(2)])
    # Two responses per group: cursors 0 and 1 at lag 0, then 2 at lag 1, 3 at lag 0, and 1 again.
    write_part(trial, "rollouts", 1, [rollout(1, c) for c in (0, 0, 1, 1)])
    second = [rollout(2, 2, lag=1), rollout(2, 2, lag=1), rollout(2, 3)]
    write_part(trial, "rollouts", 2, [*second, rollout(2, 1, lag=1, first_use=False)])

    assert read_files(only_trial(experiment)).lags == {0: 3, 1: 1}


def test_a_damaged_part_is_skipped_and_named(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2), row(3)])
    for n in (1, 2, 3):
        write_part(trial, "rollouts", n, [rollout(n, n)])
    path = trial / "rollouts" / "part-00000002.parquet"
    os.truncate(path, path.stat().st_size // 2)
    write_part(trial, "evaluations", 1, [{"round": 0, "cursor": 1}])
    write_part(trial, "versions", 1, [{**change(1.0, "learner", 0), "side": b"\xff\xfe"}])
    files = read_files(only_trial(experiment))

    assert files.lags == {0: 2}
    rollouts, evaluations, versions = files.damaged
    assert rollouts.startswith(
        "colocated_k1-0-abc_00000/rollouts/part-00000002.parquet is damaged and was skipped ("
    )
    assert "evaluations/part-00000001.parquet is damaged" in evaluations
    assert "versions/part-00000001.parquet is damaged" in versions


def test_parts_beyond_the_last_row_are_not_read(experiment):
    # A killed trial may have written the parts of a round, but not its row.
    trial = write_trial(experiment, config(), [row(1)])
    write_part(trial, "rollouts", 1, [rollout(1, 1)])
    write_part(trial, "rollouts", 2, [rollout(2, 2)])

    assert read_files(only_trial(experiment)).lags == {0: 1}


TURN = {"action": " 5 ", "reward": 0.5, "observation": "too low\n"}


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        (json.dumps([TURN]), "policy: 5 (reward 0.5)\nenvironment: too low"),
        (json.dumps([TURN | {"reward": None}]), "policy: 5 (cut off)\nenvironment: too low"),
        *(
            (turns, "as sampled")
            for turns in (
                *(None, "[]", "", "{", "3", "[[1]]", '{"action": "5"}', "[" * 100_000),
                *(json.dumps([TURN, TURN | {"action": other}]) for other in (1, None, ["5"])),
                *(json.dumps([TURN | {"reward": other}]) for other in ("1", 10**400, 1e308)),
                json.dumps([TURN | {"observation": 7}]),
            )
        ),
    ],
    ids=range(17),
)
def test_an_episode_is_shown_turn_by_turn_and_what_is_none_as_it_was_sampled(turns, shown):
    assert response_text({"turns": turns, "response": "as sampled"}) == shown


def test_examples_pair_round_zero_with_the_latest_on_the_first_prompts(experiment):
    trial = write_trial(experiment, config(), [row(n) for n in range(1, 5)])
    zero = [evaluation(0, c, f"before {c}", 0.25, index=i) for i in (1, 0) for c in range(6)]
    write_part(trial, "evaluations", 1, zero)
    for n in (2, 4):
        write_part(
            trial, "evaluations", n, [evaluation(n, c, f"after {n}", 1.0) for c in range(1, 6)]
        )
    examples = read_files(only_trial(experiment)).examples

    assert examples.round == 4
    # Cursor 0 is not in the latest evaluation.
    assert [pair.prompt for pair in examples.pairs] == [f"prompt {c}" for c in (1, 2, 3, 4)]
    assert [pair.before for pair in examples.pairs] == [f"before {c}" for c in (1, 2, 3, 4)]
    assert {pair.after for pair in examples.pairs} == {"after 4"}
    assert {(p.before_scores, p.after_scores) for p in examples.pairs} == {
        ("reward 0.25", "reward 1.00")
    }
    # written by a version that did not keep the true answer
    assert {p.truth for p in examples.pairs} == {None}


def test_examples_have_the_true_answer_and_the_parts_of_the_reward(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2)])
    parts = {"format_reward": 1.0, "answer_reward": 0.0}
    for n in (0, 2):
        rows = [
            {**evaluation(n, 0, "x", 0.0), "ground_truth": '"\\\\frac{1}{2} <b>"', **parts},
            {**evaluation(n, 1, "y", 0.5), "ground_truth": '["fox", 1]', **parts},
            {**evaluation(n, 2, "z", 0.5), "ground_truth": "null", **parts},
        ]
        write_part(trial, "evaluations", max(n, 1), rows)
    record = read_experiment(experiment)
    files = read_files(only_trial(experiment))

    truths = [pair.truth for pair in files.examples.pairs]
    assert truths == ["\\frac{1}{2} <b>", '["fox", 1]', None]
    assert files.examples.pairs[1].after_scores == "reward 0.50, format 1.00, answer 0.00"
    page = _examples_section(record, compare(record.trials), {only_trial(experiment).name: files})
    assert "<h4>Ground truth</h4><pre>\\frac{1}{2} &lt;b&gt;</pre>" in page
    assert page.count("Ground truth") == 2
    assert "Round 2 · reward 0.00, format 1.00, answer 0.00" in page
    assert "Each response has two scores" in page


def test_examples_have_no_format_that_the_reward_does_not_judge(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2)])
    parts = {"format_reward": None, "answer_reward": 0.5}
    for n in (0, 2):
        write_part(trial, "evaluations", max(n, 1), [{**evaluation(n, 0, "x", 0.5), **parts}])
    record, files = read_experiment(experiment), read_files(only_trial(experiment))
    (pair,) = files.examples.pairs
    assert (pair.before_scores, pair.after_scores) == ("reward 0.50", "reward 0.50")
    page = _examples_section(record, compare(record.trials), {only_trial(experiment).name: files})
    assert "Round 2 · reward 0.50" in page
    assert "two scores" not in page


def test_version_changes_are_in_order_from_the_first(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2)])
    write_part(trial, "versions", 1, [change(1000.5, "generator", 0), change(1000.0, "learner", 0)])
    write_part(trial, "versions", 2, [change(1003.0, "learner", 1), change(0.0, "learner", 9)])
    changes = read_files(only_trial(experiment)).changes

    assert [(c.second, c.side, c.version) for c in changes] == [
        (0.0, "learner", 0),
        (0.5, "generator", 0),
        (3.0, "learner", 1),
    ]


def test_without_parts_there_is_nothing_and_nothing_is_wrong(experiment):
    write_trial(experiment, config(), [row(1)])
    files = read_files(only_trial(experiment))

    assert files.lags == {}
    assert files.examples.pairs == ()
    assert files.changes == []
    assert files.damaged == []


# ---- The table -------------------------------------------------------------------------------


def test_the_table_shows_medians_and_least_to_most_over_seeds(experiment):
    # 4 rounds of 16 groups of 4 are 256 responses, half of them in the counted rounds 3 and 4.
    for seed, seconds in enumerate((2.0, 4.0, 8.0)):
        rows = [row(n) for n in (1, 2, 3)]
        held_out = {"reward__eval_mean": 0.5 + seed / 10, "eval__round": 4.0}
        end = row(4, time__wall_clock_s=seconds, time__eval_s=1, **held_out)
        write_trial(experiment, config(seed=seed, rounds=4), [*rows, end])
    more = {"cost__device_hours": 0.5, "lag__max": 1.0, "eval__round": 4.0}
    end = row(4, time__wall_clock_s=2.0, **more)
    write_trial(experiment, config("async_k1", seed=1, rounds=4), [*rows, end])
    text = table(compare(read_experiment(experiment).trials))
    by_arm = cells(text)

    assert text.startswith(
        "Medians over 3 seeds (minimum to maximum). Speed-ups are geometric means over the seeds, "
        "with their 95% intervals.\n"
    )
    assert by_arm["colocated_k1"] == [
        *("colocated_k1", "4", "256", "4.0 (2.0 to 8.0)", "32 (16 to 64)", "1.00x", "1.00x"),
        *("0.0040", "0.300 -> 0.600 (0.500 to 0.700)", "-", "-", "0", "1.0", "0.0"),
    ]
    # 128 samples in 2 s are 64/s, against the baseline's 32/s with the same seed. So the arm has
    # twice the speed, on twice the cores.
    assert by_arm["async_k1"][1:9] == [
        *("4", "256", "2.0", "64", "2.00x", "1.00x", "0.5000", "0.300 -> 0.500"),
    ]
    assert by_arm["async_k1"][11] == "1"
    words = " ".join(text.split())
    assert "samples per second relative to colocated_k1;" in words
    assert "samples per device-hour relative to colocated_k1;" in words


def test_reference_nll_is_the_mean_of_the_last_eighth_of_the_rounds(experiment):
    rows = [row(n, response__reference_nll_nats=9.0 if n <= 14 else n) for n in range(1, 17)]
    rows[-1]["response/reference_nll_nats"] = -11.0  # with round 15, the mean is 2
    write_trial(experiment, config(rounds=16), rows)

    assert cells(table(compare(read_experiment(experiment).trials)))["colocated_k1"][8] == "2.00"


def test_the_band_of_a_sampled_metric_is_two_standard_errors_beyond_every_seed(experiment):
    rows = [row(1, kl__reference_nats=3.0, kl__reference_nats_se=0.5), row(2)]
    write_trial(experiment, config(seed=0), rows)
    write_trial(experiment, config(seed=1), [row(1, kl__reference_nats=5.0)])
    arms = read_experiment(experiment).arms
    margin = metric("kl/reference_nats_se", STANDARD_ERRORS)

    points = curve(arms["colocated_k1"], metric("kl/reference_nats"), margin)
    assert points[0] == Point(1, 4.0, 2.0, 5.0)
    assert _sampled(arms) == (
        " The figures are measured on 16 responses of each round, drawn at random, so its band "
        "reaches 2 standard errors further. These errors do not cover the choice of the round's "
        "prompts and responses."
    )
    one = {arm: trials[:1] for arm, trials in arms.items()}
    assert "so its band reaches 2 standard errors to either side." in _sampled(one)


def test_a_trial_that_measured_all_responses_has_no_remark_on_a_sample(experiment):
    write_trial(experiment, config(), [row(1, kl__reference_nats_se=0.0), row(2)])
    assert _sampled(read_experiment(experiment).arms) == ""


def test_without_colocated_k1_speed_ups_are_relative_to_the_first_arm_and_say_so(experiment):
    for arm, seconds in (("sync", 4.0), ("async_k1", 2.0)):
        rows = [*(row(n) for n in (1, 2, 3)), row(4, time__wall_clock_s=seconds)]
        write_trial(experiment, config(arm, rounds=4), rows)
    trials = read_experiment(experiment).trials

    assert compare(trials).speed["async_k1"].value == pytest.approx(2.0)
    assert "1.00x" in cells(table(compare(trials)))["sync"]
    assert "relative to sync" in table(compare(trials))


def test_without_wall_clock_speed_is_unknown(experiment):
    write_trial(experiment, config(), [row(1), row(2)])
    comparison = compare(read_experiment(experiment).trials)

    assert cells(table(comparison))["colocated_k1"][3:5] == ["-", "-"]
    assert not comparison.has_ratios


# ---- Trials that a scheduler stopped ---------------------------------------------------------


def write_evaluated(
    experiment, arm: str, rewards: dict[int, float], *, rounds: int = 8, seed: int = 0, **last
) -> None:
    """Write a trial that ends with its last evaluation. `rewards` are held-out rewards by round."""
    rows, latest = [], (0, 0.3)
    for n in range(1, max(rewards) + 1):
        latest = (n, rewards[n]) if n in rewards else latest
        rows.append(row(n, eval__round=float(latest[0]), reward__eval_mean=latest[1]))
    rows[-1] = {**rows[-1], "done": True, **last}
    write_trial(experiment, config(arm, seed, rounds=rounds), rows)


def test_a_trial_that_a_scheduler_stopped_is_not_finished(experiment):
    write_evaluated(experiment, "sync", {2: 0.5, 8: 0.8})
    write_evaluated(experiment, "async_k1", {2: 0.4})
    stopped, finished = sorted(read_experiment(experiment).trials, key=lambda t: t.round)

    assert (finished.finished, finished.stopped_by) == (True, None)
    assert (stopped.finished, stopped.stopped_by) == (False, "a scheduler or stopper")
    assert stopped.status == "stopped by a scheduler or stopper after round 2 of 8"
    assert count_stopped([stopped, finished, stopped]) == ["2 stopped by a scheduler or stopper"]


def test_trials_that_ended_early_are_compared_after_equal_numbers_of_samples(experiment):
    write_evaluated(experiment, "colocated_k1", {2: 0.5, 4: 0.6, 8: 0.8})
    write_evaluated(experiment, "sync", {2: 0.4, 4: 0.45, 8: 0.7})
    write_evaluated(experiment, "async_k1", {2: 0.3, 4: 0.35})
    text = " ".join(compare(read_experiment(experiment).trials).footnote().split())

    assert (
        "Stopped by a scheduler or stopper: async_k1, seed 0 (after round 4 of 8). Comparisons of "
        "reward exclude these trials." in text
    )
    assert (
        "Held-out rewards after 256 responses, the last point at which all trials were evaluated: "
        "colocated_k1 0.600, sync 0.450, async_k1 0.350." in text
    )


def test_trials_without_a_common_evaluation_cannot_be_compared(experiment):
    write_evaluated(experiment, "colocated_k1", {4: 0.6, 8: 0.8})
    write_evaluated(experiment, "sync", {3: 0.4})
    text = " ".join(compare(read_experiment(experiment).trials).footnote().split())
    assert "so their held-out rewards cannot be compared." in text


def test_trials_that_ended_after_equal_numbers_of_samples_need_no_remark(experiment):
    write_evaluated(experiment, "colocated_k1", {4: 0.6, 8: 0.8})
    write_evaluated(experiment, "sync", {8: 0.4})
    assert "numbers of samples" not in compare(read_experiment(experiment).trials).footnote()


def test_rewards_before_and_after_are_those_of_the_same_trials(experiment):
    """Seed 1 was interrupted before its first evaluation in training."""
    write_trial(experiment, config(), [row(1, reward__eval_first=0.4, eval__round=1.0)])
    write_trial(experiment, config(seed=1), [row(1, reward__eval_first=0.6)])
    comparison = compare(read_experiment(experiment).trials)
    place = comparison.header.index("held-out reward")
    assert [cells[place] for cells in comparison.rows()] == ["0.400 -> 0.500"]


# ---- Responses that were cut off -------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "settings", "warned"),
    [
        (1.0, {}, True),
        (0.3, {}, True),
        (0.25, {}, False),
        # An episode has no end that the limit could cut off.
        (1.0, {"task.name": "guess"}, False),
    ],
)
def test_responses_that_are_cut_off_raise_a_warning(experiment, share, settings, warned):
    params = config(rounds=8, **{"rollout.max_new_tokens": 40, **settings})
    rows = [row(n, response__truncated_fraction=share if n == 8 else 0.0) for n in range(1, 9)]
    write_trial(experiment, params, rows)
    text = " ".join(table(compare(read_experiment(experiment).trials)).split())
    warning = (
        f"colocated_k1: rollout.max_new_tokens=40 cut off {share:.0%} of the training responses in "
        "the last rounds. If the reward needs the end of a response, raise this limit."
    )
    assert (warning in text) is warned


def test_arms_with_one_limit_share_a_warning(experiment):
    for arm, share in (("colocated_k1", 1.0), ("sync", 0.96), ("async_k1", 0.2)):
        params = config(arm, rounds=1, **{"rollout.max_new_tokens": 40})
        write_trial(experiment, params, [row(1, response__truncated_fraction=share)])
    (warning,) = compare(read_experiment(experiment).trials).truncated()
    assert warning.startswith(
        "colocated_k1, sync: rollout.max_new_tokens=40 cut off 98% (96% to 100%) of the training "
    )


# ---- Speed -----------------------------------------------------------------------------------


def test_the_speed_of_a_slow_model_is_not_zero(experiment):
    # 8 groups of 4 responses in 360 s, then in 240 s.
    seconds = {1: 0.0, 2: 360.0, 3: 600.0}
    rows = [row(n, count__trained=8.0 * n, time__wall_clock_s=s) for n, s in seconds.items()]
    for seed in (0, 1):
        write_trial(experiment, config(seed=seed, rounds=3), rows[: 3 - seed])
    comparison = compare(read_experiment(experiment).trials)

    assert cells(table(comparison))["colocated_k1"][4] == "0.098 (0.089 to 0.11)"


def test_one_arm_alone_has_no_speed_up_of_itself(experiment):
    write_trial(experiment, config(rounds=4), [row(n) for n in range(1, 5)])
    text = table(compare(read_experiment(experiment).trials))
    header = text.splitlines()[0]

    assert header.split()[3:7] == ["wall-clock", "s", "samples/s", "device-hours"]
    assert "1.00x" not in text
    for words in ("peed-up", "at equal cost", "interval"):
        assert words not in text


def test_trials_without_a_row_are_no_part_of_the_table(experiment):
    write_trial(experiment, config(), [])
    trials = read_experiment(experiment).trials

    assert table(compare(trials)) == "no trial has finished a round"
    assert table(compare([])) == "no trial has finished a round"
