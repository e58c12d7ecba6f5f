"""Files and output of a finished experiment. The command runs once, and every test reads them."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from commands import SMALL, overlap, parts, run, spans, trial_directories, tune
from conftest import rows, untimed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_trainable.telemetry.metrics import NAMES, SOMETIMES
from launch import evaluate
from reports.evaluations.files import read_evaluation


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run three arms for four rounds; return the experiment's directory and the output."""
    storage = tmp_path_factory.mktemp("storage")
    argv = ["--space", "async_vs_sync", "--name", "short", "--iterations", "4", *SMALL]
    # With these settings, all colocated arms are equal, and so are both async arms. Equal arms are
    # merged.
    merged = ("--set", "k=1", "--set", "resources.worker_cpus=0.95")
    # Other tests run at the same time. By default, rounds that they disturb would have no speed.
    disturbed = ("--set", "callbacks.leave_out_disturbed=false")
    done = tune(*argv, *merged, *disturbed, "--set", "eval.every=2", storage=storage)
    assert done.returncode == 0, done.stderr
    return storage / "short", done.stdout


def test_every_arm_ends_and_the_table_compares_them(finished):
    experiment, out = finished

    assert len(trial_directories(experiment)) == 3
    table = {line.split()[0]: line for line in out[out.index("arm  ") :].splitlines() if line}
    assert {"colocated_k1", "sync", "async_k1"} <= table.keys()
    assert "1.00x" in table["colocated_k1"]
    assert "tensorboard --logdir" in out


def test_a_trial_in_the_processes_of_another_one_computes_the_same_bits(finished):
    experiment, _ = finished
    by_arm = {trial.name.partition("-")[0]: rows(trial) for trial in trial_directories(experiment)}
    sync, colocated = by_arm["sync"], by_arm["colocated_k1"]
    assert sync[0]["timestamp"] >= by_arm["async_k1"][-1]["timestamp"]
    assert sync[0]["pid"] == by_arm["async_k1"][0]["pid"] != colocated[0]["pid"]
    assert [untimed(row) for row in sync] == [untimed(row) for row in colocated]
    assert sync[0]["time/warm_up_s"] > 0


def test_result_json_and_tensorboard_hold_the_same_names_and_values(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        results = rows(trial)
        assert [row["training_iteration"] for row in results] == [1, 2, 3, 4]

        events = EventAccumulator(str(trial))
        events.Reload()
        scalars = set(events.Tags()["scalars"])
        assert scalars == NAMES & results[0].keys()
        for name in scalars:
            logged = [event.value for event in events.Scalars(name)]
            told = [row[name] for row in results if name in row]
            assert logged == pytest.approx(told, rel=1e-5)
            assert len(told) == len(results) or name in SOMETIMES


def test_every_logged_number_is_a_metric_with_a_name(finished):
    experiment, _ = finished
    # Columns that Tune adds, and columns by which a trial asks Tune to end or save it.
    own = {"done", "should_checkpoint", "iterations_since_restore", "timestamp", "pid"}
    own |= {"training_iteration", "time_this_iter_s", "time_total_s", "time_since_restore"}
    for trial in trial_directories(experiment):
        for row in rows(trial):
            numbers = {name for name, value in row.items() if isinstance(value, int | float)}
            assert numbers - own - SOMETIMES == NAMES - SOMETIMES


def test_actors_are_not_behind_the_other_processes_of_the_machine(finished):
    experiment, _ = finished
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    for trial in trial_directories(experiment):
        assert {row["fleet/niceness"] for row in rows(trial)} == {ordinary}


def test_rollouts_versions_and_evaluations_agree_with_the_rows(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        rollouts, results = parts(trial, "rollouts"), rows(trial)
        for row in results:
            of_round = [r for r in rollouts if r["round"] == row["training_iteration"]]
            assert len(of_round) == 16
            rewards = [response["reward"] for response in of_round]
            assert sum(rewards) / 16 == pytest.approx(row["reward/train_mean"])
            assert max(r["lag"] for r in of_round) == row["lag/max"]
            drift = [r["policy_log_prob"] - r["reference_log_prob"] for r in of_round]
            assert sum(drift) / 16 == pytest.approx(row["kl/reference_nats"], abs=1e-3)
        held_out = parts(trial, "evaluations")
        assert sorted({entry["round"] for entry in held_out}) == [0, 2, 4]
        prompts = [
            [entry["prompt"] for entry in held_out if entry["round"] == round_]
            for round_ in (0, 2, 4)
        ]
        assert prompts[0] == prompts[1] == prompts[2]
        learner = [v["version"] for v in parts(trial, "versions") if v["side"] == "learner"]
        assert learner == [row["version/learner"] for row in results]


def test_trace_shows_what_ran_beside_what(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        by_actor = spans(trial)
        everything = [span for spans in by_actor.values() for span in spans]
        rollouts, steps = (
            [span for span in everything if span[0] == name] for name in ("rollout", "optimize")
        )
        assert rollouts
        assert steps
        # On a busy machine, the stages of an asynchronous arm may take turns too.
        if "async" not in trial.name:
            assert overlap(rollouts, steps) == 0
        expected = {"trial", "worker"} if "colocated" in trial.name else {"trial", "learner"}
        assert expected <= by_actor.keys()
        # The spans of an actor do not overlap.
        for actor, own in by_actor.items():
            own.sort(key=lambda span: span[1])
            for before, after in itertools.pairwise(own):
                assert after[1] >= before[2] - 1, (actor, before, after)  # in microseconds


def test_snapshots_of_tune_hold_no_details(finished):
    experiment, _ = finished
    (state,) = experiment.glob("experiment_state-*.json")
    # In the snapshot, values that JSON cannot express are pickles in hexadecimal.
    assert b"RoundDetails".hex() not in state.read_text()


def test_report_is_written_and_its_path_is_printed(finished):
    experiment, out = finished
    assert f"report: {experiment / 'report.html'}" in out
    page = (experiment / "report.html").read_text()
    for arm in ("colocated_k1", "sync", "async_k1"):
        assert arm in page


def test_hparams_are_what_was_searched(finished):
    experiment, _ = finished
    trial = trial_directories(experiment)[0]
    events = EventAccumulator(str(trial))
    events.Reload()

    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for name in (b"arm", b"seed"):
        assert name in plugin


def test_params_json_has_every_key_in_its_own_place(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        params = json.loads((trial / "params.json").read_text())
        assert params["rounds"] == 4
        assert params["optim"]["lr"] == 3e-4
        assert params["arm"] in trial.name


# ---- Evaluations of checkpoints -----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(finished):
    """Return the directory of the synchronous trial. Its last evaluation follows round 4."""
    experiment, _ = finished
    (trial,) = (trial for trial in trial_directories(experiment) if trial.name.startswith("sync-"))
    return trial


def test_a_checkpoint_gives_the_trials_own_last_evaluation(trained, tmp_path):
    done = run("evaluate.py", "--checkpoint", str(trained), "--out", "mine", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    last = rows(trained)[-1]
    assert last["eval/round"] == 4
    data = json.loads((tmp_path / "mine" / "evaluation.json").read_text())
    assert data["figures"]["reward"]["value"] == last["reward/eval_mean"]
    assert (data["policy"]["round"], data["policy"]["version"]) == (4, 4)
    # Every response is equal too, not only the mean reward.
    theirs = [
        (row["cursor"], row["response_index"], row["prompt"], row["response"], row["tokens"])
        for row in parts(trained, "evaluations")
        if row["round"] == 4
    ]
    ours = [
        (own.prompt_index, own.response_index, own.prompt, own.response, own.tokens)
        for own in read_evaluation(tmp_path / "mine").generations
    ]
    assert ours == theirs
    assert len(ours) == 8


@pytest.mark.usefixtures("in_this_process")
def test_before_and_after_are_compared(trained, tmp_path, capsys):
    shared = ("--prompts", "8", "--samples", "1", "--set", "rollout.max_new_tokens=12")
    assert evaluate.main([*shared, "--seed", "0", "--out", "before"]) == 0
    after = ("--checkpoint", str(trained), "--out", "after", "--against", "before")
    assert evaluate.main(after) == 0
    said = "compared with before, over 8 prompts that both policies answered"
    assert said in capsys.readouterr().out
    data = json.loads((tmp_path / "after" / "evaluation.json").read_text())
    figures, reward = data["figures"], data["against"]["differences"]["reward"]
    assert reward["own"] == pytest.approx(figures["reward"]["value"])
    first = json.loads((tmp_path / "before" / "evaluation.json").read_text())["figures"]["reward"]
    assert reward["other"] == pytest.approx(first["value"])
