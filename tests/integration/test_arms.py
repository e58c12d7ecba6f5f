"""One trial of each kind, run to its end under Ray Tune: its rows, checkpoints and resumes."""

from __future__ import annotations

import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    actor_processes,
    assert_no_actor_left,
    checkpoints,
    fit,
    kill,
    own_processes,
    rows,
    trial_config,
    untimed,
)
from ray import tune

from grpo_trainable.storage.checkpointing import CheckpointError, read_checkpoint
from grpo_trainable.storage.trial_storage import TrialStorage
from grpo_trainable.telemetry.metrics import NAMES, SOMETIMES
from grpo_trainable.trainable import GRPOTrainable
from grpo_trainable.trial import Trial

INTERRUPTION = " That is all."

# Arms that can share actors are next to each other.
ARMS = {
    "colocated": trial_config(arm="colocated", placement="colocated"),
    "exact": trial_config(arm="exact", placement="colocated", lag=2, lag_mode="exact"),
    "replay": trial_config(
        arm="replay",
        placement="colocated",
        buffer_capacity=3,
        buffer_sampling="mixed",
        buffer={"sample_batches": 2},
    ),
    "critic": trial_config(
        arm="critic",
        placement="colocated",
        k=2,
        loss={
            **{"type": "ppo", "advantage": "gae"},
            **{"kl_coef": 0.05, "kl_in": "reward", "kl_target": 1.0},
        },
        critic={"body": "own"},
    ),
    "vine": trial_config(
        arm="vine",
        placement="colocated",
        buffer_capacity=2,
        buffer_sampling="mixed",
        buffer={"sample_batches": 2},
        loss={"type": "ppo", "advantage": "vine"},
        vine={"samples": 2, "chunk_tokens": 5},
    ),
    # A story with "day" among its first tokens, such as "One sunny day", is not interrupted.
    "interrupted": trial_config(
        arm="interrupted",
        placement="colocated",
        buffer_capacity=3,
        buffer_sampling="mixed",
        buffer={"sample_batches": 2},
        rollout={
            "overlong": "interrupt",
            "overlong_buffer": 8,
            "interruption": INTERRUPTION,
            "thinking_end": "day",
        },
    ),
    "sync": trial_config(arm="sync"),
    "mid-batch": trial_config(arm="mid-batch", lag=1, weight_update="interrupt_recompute"),
    "async": trial_config(arm="async", lag=1, resources={"reference": "generator"}),
    "two-generators": trial_config(
        arm="two-generators", resources={"num_generators": 2, "generator_cpus": 0.95}
    ),
}


@pytest.fixture(scope="module")
def results(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run one trial of each arm to its end, and return the directories by arm."""
    grid = fit(
        {
            "arm": tune.grid_search(list(ARMS)),
            **{
                key: tune.sample_from(lambda spec, key=key: ARMS[spec.config.arm][key])
                for key in ("placement", "resources")
            },
            **{
                key: tune.sample_from(
                    lambda spec, key=key, value=value: ARMS[spec.config.arm].get(key, value)
                )
                for key, value in (
                    ("lag", 0),
                    ("lag_mode", "bounded"),
                    ("weight_update", "between_batches"),
                    ("buffer_capacity", 1),
                    ("buffer_sampling", "recency"),
                    ("buffer", {}),
                    ("k", 1),
                    ("loss", {}),
                    ("critic", {}),
                    ("vine", {}),
                    ("rollout", trial_config()["rollout"]),
                )
            },
            **{
                key: value
                for key, value in trial_config().items()
                if key not in ("placement", "resources", "rollout")
            },
        },
        tmp_path_factory.mktemp("results"),
        one_by_one=True,
    )
    assert [str(error) for error in grid.errors] == []
    assert_no_actor_left()
    return {result.config["arm"]: Path(result.path) for result in grid}


@pytest.mark.parametrize("arm", ARMS)
def test_trial_ends_itself_after_its_rounds(results: dict[str, Path], arm: str) -> None:
    history = rows(results[arm])
    assert [row["training_iteration"] for row in history] == [1, 2, 3, 4]
    assert [row["done"] for row in history] == [False, False, False, True]
    assert len(checkpoints(results[arm])) == 2  # one after round 3 and one at the end


@pytest.mark.parametrize("arm", ARMS)
def test_result_json_has_every_metric_as_a_finite_float(results: dict[str, Path], arm: str) -> None:
    for row in rows(results[arm]):
        assert row.keys() >= NAMES - SOMETIMES
        names = NAMES & row.keys()
        odd = {n: row[n] for n in names if type(row[n]) is not float or not math.isfinite(row[n])}
        assert not odd
        assert 0 <= row["time/disturbed_fraction"] <= 1


def test_lag_is_bounded_and_reached(results: dict[str, Path]) -> None:
    for arm, config in ARMS.items():
        lags = [row["lag/max"] for row in rows(results[arm])]
        assert max(lags) == config.get("lag", 0)


def test_an_exact_lag_is_reached_round_by_round_and_kept(results: dict[str, Path]) -> None:
    history = rows(results["exact"])
    assert [row["lag/mean"] for row in history] == [0, 1, 2, 2]
    assert [row["count/waiting"] for row in history] == [8, 8, 4, 0]
    assert [row["off_policy/ess_fraction"] > 0.999 for row in history] == [True, *[False] * 3]


def test_first_step_on_fresh_rollouts_has_ratio_one(results: dict[str, Path]) -> None:
    for arm in ("colocated", "sync", "two-generators"):
        for row in rows(results[arm]):
            assert row["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
            assert row["optim/grad_norm"] > 0 or row["group/zero_advantage_fraction"] == 1


@pytest.mark.parametrize("arm", ["sync", "two-generators"])
def test_placement_and_number_of_generators_never_change_a_synchronous_run(
    results: dict[str, Path], arm: str
) -> None:
    expected, got = results["colocated"], results[arm]
    assert [untimed(row) for row in rows(got)] == [untimed(row) for row in rows(expected)]
    for ours, theirs in zip(checkpoints(got), checkpoints(expected), strict=True):
        for part in ("policy", "optimizer", "buffer"):
            name = f"{part}-00001-of-00001.safetensors"
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_policy_has_moved(results: dict[str, Path]) -> None:
    before, after = (read_checkpoint(path).policy for path in checkpoints(results["sync"]))
    assert any(not before[name].equal(after[name]) for name in before)


def test_evaluation_runs_first_when_due_and_last(results: dict[str, Path]) -> None:
    for arm in ARMS:
        history = rows(results[arm])
        assert [row["eval/round"] for row in history] == [0, 0, 3, 4]
        assert len({row["reward/eval_first"] for row in history}) == 1


def test_counts_close_in_every_row(results: dict[str, Path]) -> None:
    for arm in ARMS:
        for row in rows(results[arm]):
            parts = ("trained", "dropped", "waiting", "in_flight")
            assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
        assert row["count/trained"] == 16
        assert row["env_runners/num_episodes_lifetime"] == 64


@pytest.mark.parametrize("arm", ["colocated", "sync"])
def test_seconds_of_a_synchronous_round_add_up(results: dict[str, Path], arm: str) -> None:
    stages = ("rollout", "reward", "optimize", "reference", "sync", "eval", "other")
    for row in rows(results[arm]):
        total = sum(row[f"time/{stage}_s"] for stage in stages)
        # On a busy machine, a stage can end a moment after another process has begun the next
        # stage.
        assert total == pytest.approx(row["time/step_s"], rel=1e-3, abs=0.1)
        assert row["time/other_s"] >= 0


def test_a_trial_with_a_critic_reports_it_and_others_do_not(
    results: dict[str, Path],
) -> None:
    for arm in ARMS:
        for row in rows(results[arm]):
            assert ("critic/loss" in row) == (arm == "critic")
            assert (row["count/completions"] > 0) == (arm == "vine")
            assert (row["time/vine_s"] > 0) == (arm == "vine")
    assert rows(results["critic"])[0]["critic/value_mean"] == 0
    assert all(row["critic/grad_norm"] > 0 for row in rows(results["critic"]))
    steered = [row["loss/kl_coef"] for row in rows(results["critic"])]
    assert steered[0] == 0.05
    assert len(set(steered)) == len(steered)


def test_a_row_tells_the_share_of_responses_that_read_the_interruption(
    results: dict[str, Path], begun: Any
) -> None:
    for arm in ARMS:
        for row in rows(results[arm]):
            assert ("response/interrupted_fraction" in row) == (arm == "interrupted")
    running = begun(ARMS["interrupted"])
    shares = []
    for expected in rows(results["interrupted"]):
        row = running.train()
        responses = row.details.rollouts["response"]
        shares.append(sum(INTERRUPTION in text for text in responses) / len(responses))
        assert row["response/interrupted_fraction"] == pytest.approx(shares[-1])
        assert untimed(row) == untimed(expected)
    assert 0 < sum(shares) / len(shares) < 1


def test_replay_uses_groups_again_within_their_age(results: dict[str, Path]) -> None:
    history = rows(results["replay"])
    # Every round samples four groups. Every round after the first also draws four older groups.
    assert [row["buffer/size"] for row in history] == [4, 8, 8, 8]
    assert history[0]["buffer/age_max"] == 0
    assert 1 <= max(row["buffer/age_max"] for row in history) <= 2
    assert history[-1]["buffer/uses_mean"] > 1.4
    assert max(row["loss/ratio_max"] for row in history[1:]) > 1.001


@pytest.mark.parametrize("arm", ["colocated", "sync"])
def test_warm_up_changes_neither_rows_nor_weights(
    results: dict[str, Path],
    trainable: Any,
    monkeypatch: pytest.MonkeyPatch,
    arm: str,
) -> None:
    warmed = rows(results[arm])[:3]
    assert warmed[0]["time/warm_up_s"] > 0
    monkeypatch.setattr(Trial, "_warm_up", lambda self: None)
    cold = trainable(ARMS[arm])
    got = [cold.step() for _ in range(3)]
    assert got[0]["time/warm_up_s"] == 0
    assert [untimed(row) for row in got] == [untimed(row) for row in warmed]
    expected = read_checkpoint(checkpoints(results[arm])[0]).policy
    policy = cold.trial.learner_state().policy
    assert policy.keys() == expected.keys()
    assert all(policy[name].equal(expected[name]) for name in policy)


# ---- Stopping and resuming -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arm", ["colocated", "exact", "sync", "replay", "interrupted", "critic", "vine"]
)
def test_resumed_synchronous_run_equals_uninterrupted_run(
    results: dict[str, Path], trainable: Any, begun: Any, arm: str, tmp_path: Path
) -> None:
    begin = trainable if arm == "sync" else begun  # in new processes or in reused ones
    resumed = begin(ARMS[arm])
    resumed.restore(str(checkpoints(results[arm])[0]))
    row = resumed.step()
    assert row["done"]
    assert untimed(row) == untimed(rows(results[arm])[-1])
    resumed.save_checkpoint(str(tmp_path / "again"))
    again, last = read_checkpoint(tmp_path / "again"), read_checkpoint(checkpoints(results[arm])[1])
    assert again.policy.keys() == last.policy.keys()
    assert all(again.policy[name].equal(last.policy[name]) for name in last.policy)
    assert all(again.optimizer[name].equal(last.optimizer[name]) for name in last.optimizer)


def test_resumed_asynchronous_run_trains_every_prompt(results: dict[str, Path], begun: Any) -> None:
    resumed = begun(ARMS["async"])
    resumed.restore(str(checkpoints(results["async"])[0]))
    row = resumed.step()
    assert row["done"]
    assert row["lag/max"] <= 1
    assert row["count/requested"] == row["count/trained"] + row["count/dropped"] == 16


def test_checkpoint_with_a_pickle_beside_it_is_refused_before_it_is_loaded(
    results: dict[str, Path], tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "exploded").touch, ()

    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoints(results["sync"])[0], directory)
    (directory / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(Bomb()))
    # Rejecting the checkpoint needs no actor.
    trainable = object.__new__(GRPOTrainable)
    trainable.trial = object.__new__(Trial)
    trainable.trial.stored = TrialStorage(None, keep=None)  # the storage of a trial outside Tune
    with pytest.raises(CheckpointError, match=r"_dict_checkpoint\.pkl: does not belong"):
        trainable.restore(str(directory))
    assert not (tmp_path / "exploded").exists()


def test_running_trainable_takes_a_checkpoint_of_another_history(
    results: dict[str, Path], begun: Any
) -> None:
    running = begun(ARMS["async"])
    running.step()
    running.restore(str(checkpoints(results["async"])[0]))
    assert running.step()["version/learner"] == 4.0


# ---- Starting again in the same actors, and with another generator -------------------------------


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_other_config_begins_anew_in_the_same_actors(
    results: dict[str, Path], begun: Any, placement: str
) -> None:
    # The first config differs from the second in every setting that an actor can change. Calls of
    # the first may still be running when the second begins.
    lag = 0 if placement == "colocated" else 1
    running = begun(
        trial_config(
            placement=placement,
            lag=lag,
            k=2,
            seed=3,
            optim={"lr": 5e-3},
            loss={"kl_monitor": False},
            rollout={"prompts": 3, "unit_prompts": 1, "group_size": 2},
        )
    )
    running.step()
    before = own_processes(running)
    arm = "colocated" if placement == "colocated" else "sync"
    assert running.reset_config(ARMS[arm])
    assert own_processes(running) == before
    got = [running.step() for _ in range(4)]
    assert [untimed(row) for row in got] == [untimed(row) for row in rows(results[arm])]
    assert got[0]["time/learner_idle_s"] < got[0]["time/step_s"]


def test_dead_generator_is_replaced_and_a_synchronous_run_is_none_the_worse(
    results: dict[str, Path], begun: Any
) -> None:
    running = begun(ARMS["sync"])
    running.step()
    kill(running, "generator-0")
    row: dict[str, Any] = {}
    for _ in range(3):
        row = running.step()
    assert row["count/redispatched"] == 4  # both chunks of the round were in flight
    last = {**rows(results["sync"])[-1], "count/redispatched": 4.0}
    assert untimed(row) == untimed(last)
    # The meter of the machine's load counts the new generator as part of the trial.
    assert set(own_processes(running).values()) <= running.trial.meter.own
    assert len(own_processes(running)) == 2


def test_dead_actor_does_not_keep_another_config_from_beginning(
    results: dict[str, Path], begun: Any
) -> None:
    running = begun(trial_config(lag=1))
    running.step()
    before = own_processes(running)
    kill(running, "generator-0")
    assert running.reset_config(ARMS["sync"])
    assert untimed(running.step()) == untimed(rows(results["sync"])[0])
    assert own_processes(running).keys() == before.keys()
    assert not set(before.values()) & actor_processes().keys()
