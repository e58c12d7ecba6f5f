"""Policies that act in Gymnasium environments: sampled, trained, stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import untimed

from grpo_trainable.config import GRPOConfig
from grpo_trainable.control.engine import ControlEngine, build_control_engine
from grpo_trainable.control.policy import build_control_policy
from grpo_trainable.control.spaces import spaces_of
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.learner.log_probs import LogProbs
from grpo_trainable.protocol.rollout import Request, RolloutGroup, collate
from grpo_trainable.tasks import RewardError, Score
from grpo_trainable.tasks.prompts import Prompts, build_task
from launch import evaluate, export, tune

pytest.importorskip("gymnasium")

SMALL = {
    "task": {"name": "control"},
    "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 40},
    "eval": {"every": 2, "prompts": 3},
    "rounds": 4,
}
FAILING = """
import gymnasium
import numpy as np

class Failing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed, self.t = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.seed == 1 and self.t == 2:
            raise RuntimeError("lost its footing")
        info = {"right": bool(action), "seen": "nothing"}
        return np.zeros(1, np.float32), float(action), self.t == 3, False, info

class Seeing(Failing):
    observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})

def nothing():
    return 7
"""


def config_of(env: str = "CartPole-v1", **values: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({**SMALL, "model": {"env": env}, **values})


def engine_and_requests(
    config: GRPOConfig, count: int, stream: str = "train"
) -> tuple[ControlEngine, list[Request]]:
    _, tokenizer = build_control_policy(config.model, config.seed)
    prompts = Prompts(config, build_task(config), tokenizer)
    setup = EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cpu"))
    return build_control_engine(setup), [prompts.request(stream, i) for i in range(count)]


def told(group: RolloutGroup) -> list[Any]:
    fields = (group.response_ids, group.actions, group.behaviour_log_probs, group.observations)
    return [None if field is None else field.tolist() for field in fields]


@pytest.fixture
def failing(tmp_path: Path) -> str:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return str(path)


@pytest.mark.numerics
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_requests_give_the_same_episodes_whatever_was_sampled_before(env: str) -> None:
    config = config_of(env)
    engine, requests = engine_and_requests(config, 3)
    groups, scores = engine.earn(requests, lambda: None)
    engine.earn(requests[1:2], lambda: None)
    again, _ = engine.earn(requests, lambda: None)
    assert [told(group) for group in again] == [told(group) for group in groups]
    first = groups[1].observations
    assert first is not None
    assert bool((first[:, 0] == first[0, 0]).all())  # all episodes start alike
    earned = groups[1].turn_rewards
    assert earned is not None
    for row, score in enumerate(scores[1]):
        assert isinstance(score, Score)
        assert score.reward == pytest.approx(float(earned[row].nansum()), rel=1e-6)


@pytest.mark.numerics
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_group_begins_alike_whatever_is_sampled_beside_it(env: str) -> None:
    """Compare a group that is sampled alone with the same group among others.

    The first steps agree up to rounding. Later steps may differ by more.
    """
    engine, requests = engine_and_requests(config_of(env), 3)
    groups, _ = engine.earn(requests, lambda: None)
    (alone,), _ = engine.earn(requests[1:2], lambda: None)
    seen, seen_alone = groups[1].observations, alone.observations
    assert seen is not None
    assert seen_alone is not None
    assert torch.equal(seen_alone[:, 0], seen[:, 0])
    together = groups[1]
    torch.testing.assert_close(
        alone.behaviour_log_probs[:, 0], together.behaviour_log_probs[:, 0], rtol=0, atol=1e-5
    )
    if alone.actions is None or together.actions is None:
        assert torch.equal(alone.response_ids[:, 0], together.response_ids[:, 0])
    else:
        torch.testing.assert_close(alone.actions[:, 0], together.actions[:, 0], rtol=0, atol=1e-5)


@pytest.mark.numerics
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_sampler_and_learner_agree_about_log_probs(env: str) -> None:
    config = config_of(env)
    engine, requests = engine_and_requests(config, 3)
    groups, _ = engine.earn(requests, lambda: None)
    policy, tokenizer = build_control_policy(config.model, config.seed)
    batch = collate(groups, [torch.zeros(4)] * 3, tokenizer.pad_id)
    found, _ = LogProbs(config, tokenizer.end_ids).with_entropy(policy, batch)
    assert torch.allclose(found, batch.behaviour_log_probs, atol=1e-5)


def test_a_pole_that_falls_ends_its_episode_and_one_that_stands_is_cut_off() -> None:
    engine, requests = engine_and_requests(config_of(), 4)
    groups, _ = engine.earn(requests, lambda: None)
    for group in groups:
        lengths = group.response_mask.sum(dim=1)
        assert torch.equal(group.finished, lengths < 40)
        assert torch.equal(group.turn_rewards.nansum(dim=1), lengths.float())  # reward 1 per step
        assert group.info == {}  # CartPole reports no numbers in `info`
    assert any(bool(group.finished.any()) for group in groups)


def test_an_environment_that_fails_spoils_its_own_group(failing: str) -> None:
    engine, requests = engine_and_requests(config_of(f"{failing}:Failing"), 3)
    groups, scores = engine.earn(requests, lambda: None)
    assert scores[1] == [RewardError("environment: step 2: RuntimeError: lost its footing")] * 4
    assert all(isinstance(score, Score) for row in (scores[0], scores[2]) for score in row)
    for group in (groups[0], groups[2]):
        assert group.info == {"right": float(group.turn_rewards.nansum(dim=1).double().mean())}
    assert groups[1].response_mask.sum(dim=1).tolist() == [2] * 4
    engine.close()


def test_spaces_are_read_from_the_environment(failing: str) -> None:
    pendulum = spaces_of("Pendulum-v1")
    assert (pendulum.scale, pendulum.low, pendulum.high) == ((1.0, 1.0, 8.0), (-2.0,), (2.0,))
    assert pendulum.done == "continuous actions from -2 to 2"
    cart = spaces_of("CartPole-v1")
    assert cart.scale == pytest.approx((4.8, 1.0, 0.41887903, 1.0))
    assert (cart.seen, cart.done) == ("4 numbers", "one of 2 actions")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("CartPole-v99", "CartPole-v99: cannot be created: "),
        ("{}:Missing", "Missing"),
        ("{}:Seeing", "observations are Dict"),
        ("{}:nothing", "is of type int, not a Gymnasium environment"),
        ("FrozenLake-v1", "observations are Discrete(16)"),
    ],
)
def test_what_is_no_environment_for_it_is_refused_in_one_line(
    failing: str, env: str, said: str, capsys: Any
) -> None:
    name = env.format(failing)
    command = ["--space", "async_vs_sync", "--set", "task.name=control", "--set"]
    assert tune.main([*command, f"model.env={name}", "--dry-run"]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert "model.env=" in line
    assert said in line


def test_a_dry_run_says_what_the_policy_sees_and_does(capsys: Any) -> None:
    assert tune.main(["--space", "lag", "--set", "task.name=control", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "in CartPole-v1 the policy sees 4 numbers and takes one of 2 actions" in printed


CRITIC = {"loss": {"type": "ppo", "advantage": "gae"}, "k": 2}
TRIALS: dict[str, dict[str, Any]] = {
    "cart": {},
    "numbers": {"model": {"env": "Pendulum-v1"}},
    "critic": CRITIC,
    "episodes": {"loss": {"advantage": "group_std", "kl_coef": 0.01}},
}


@pytest.mark.parametrize("settings", TRIALS)
def test_a_resumed_trial_equals_the_one_that_was_not_stopped(
    begun: Any, trainable: Any, tmp_path: Path, settings: str
) -> None:
    config = {**SMALL, **TRIALS[settings]}
    whole = begun(config)
    rows = [whole.step() for _ in range(2)]
    whole.save_checkpoint(str(tmp_path / "half"))
    rows += [whole.step() for _ in range(2)]
    assert all(row["kl/sampler_mismatch_nats"] < 1e-4 for row in rows)
    resumed = trainable(config)
    resumed.load_checkpoint(str(tmp_path / "half"))
    again = [resumed.step() for _ in range(2)]
    assert [untimed(row) for row in again] == [untimed(row) for row in rows[2:]]


def test_a_trial_with_lag_and_replay_goes_on_and_closes_its_accounts(trainable: Any) -> None:
    running = trainable(
        {
            **SMALL,
            "placement": "disaggregated",
            "lag": 1,
            "weight_update": "in_flight",
            "buffer_capacity": 2,
            "buffer_sampling": "uniform",
            "model": {"env": "Pendulum-v1"},
        }
    )
    rows = [running.step() for _ in range(4)]
    last = rows[-1]
    parts = ("trained", "dropped", "waiting", "in_flight")
    assert last["count/requested"] == sum(last[f"count/{part}"] for part in parts)
    assert last["lag/max"] <= 1


def test_a_failing_environment_is_counted(trainable: Any, failing: str) -> None:
    task = {"name": "control", "max_error_rate": 0.9}
    running = trainable({**SMALL, "task": task, "model": {"env": f"{failing}:Failing"}})
    row = running.step()
    assert row["count/reward_errors"] == 4
    assert row["count/dropped_reward"] == 1


def test_it_is_neither_exported_nor_evaluated_by_itself(
    trainable: Any, tmp_path: Path, capsys: Any
) -> None:
    running = trainable({**SMALL, "rounds": 1})
    running.step()
    running.save_checkpoint(str(tmp_path / "saved"))
    for main, options in (
        (export.main, [str(tmp_path / "saved"), str(tmp_path / "out")]),
        (evaluate.main, ["--checkpoint", str(tmp_path / "saved"), "--out", str(tmp_path / "e")]),
    ):
        capsys.readouterr()
        assert main(options) == 2
        line = capsys.readouterr().err.strip()
        assert "is not a language model" in line
        assert "\n" not in line


def test_rllib_sees_the_images_of_the_arm_as_numbers_up_to_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray.rllib.algorithms.ppo")
    import control
    import gymnasium
    import numpy as np

    class White(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (2, 2, 6), np.uint8)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return np.full((2, 2, 6), 255, np.uint8), {}

    monkeypatch.setattr(control, "Arm", White)
    environment = control.make("arm")
    seen, _ = environment.reset()
    assert environment.observation_space.contains(seen)
    assert seen.max() == 1.0
