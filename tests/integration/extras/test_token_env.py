"""Text generation as an environment: episodes end and are rewarded like a trial's responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="needs the extra rllib")

from gymnasium.utils.env_checker import check_env
from ray.rllib.algorithms.ppo import PPOConfig

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.engines.engine import EngineSetup, build_engine
from grpo_trainable.models.store import build_policy
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights, RolloutGroup
from grpo_trainable.rllib import LanguageModel, TokenEnv, language_model_spec
from grpo_trainable.tasks.prompts import Prompts, build_task

TASKS: dict[str, dict[str, Any]] = {
    "keyword": {"seed": 3, "rollout": {"max_new_tokens": 24, "stop": [" and"]}},
    "math": {"seed": 3, "task": {"name": "math"}, "rollout": {"max_new_tokens": 40}},
}


def sampled(settings: dict[str, Any], prompts: int) -> tuple[list[RolloutGroup], Prompts, Any]:
    """Return groups that a trial's engine sampled, the trial's `Prompts`, and its task."""
    config = GRPOConfig.from_dict(settings)
    policy, tokenizer = build_policy(config.model, config.seed)
    engine = build_engine(
        EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cpu"))
    )
    tensors = policy.weights()
    checksum = storage_checksum(tensors)
    engine.load(PolicyWeights(version=0, round=0, checksum=checksum, tensors=tensors))
    task = build_task(config)
    made = Prompts(config, task, tokenizer)
    requests = [made.request("train", index) for index in range(prompts)]
    return engine.generate(requests, lambda: None), made, task


@pytest.mark.parametrize("name", TASKS)
def test_a_sampled_response_ends_and_pays_as_in_a_trial(name: str) -> None:
    settings = TASKS[name]
    groups, prompts, task = sampled(settings, 6)
    env = TokenEnv(settings)
    tokenizer = build_policy(GRPOConfig.from_dict(settings).model, 0)[1]
    paid = []
    for group in groups:
        for ids, mask in zip(group.response_ids, group.response_mask, strict=True):
            response = ids[mask].tolist()
            observation, info = env.reset(options={"prompt_index": group.prompt_index})
            assert info == {"prompt_index": group.prompt_index}
            assert observation[observation >= 0].tolist() == group.prompt_ids.tolist()
            steps = [env.step(token) for token in response]
            ends = [terminated for _, _, terminated, _, _ in steps]
            assert ends == [False] * (len(response) - 1) + [True]
            assert not any(reward for _, reward, *_ in steps[:-1])
            truth = prompts.ground_truth("train", group.prompt_index)
            expected = task.reward(tokenizer.decode(response), truth).reward
            paid.append(steps[-1][1])
            assert paid[-1] == expected
            last = steps[-1][0]
            assert last[last >= 0].tolist() == [*group.prompt_ids.tolist(), *response]
    assert len(set(paid)) > 1  # if all rewards were equal, the test could not fail


def test_the_module_acts_by_the_law_that_the_engine_samples_by() -> None:
    settings = TASKS["keyword"]
    groups, _, _ = sampled(settings, 2)
    env = TokenEnv(settings)
    module = LanguageModel(
        observation_space=env.observation_space,
        action_space=env.action_space,
        model_config={"grpo": settings},
    )
    for group in groups:
        response = group.response_ids[0][group.response_mask[0]]
        seen = [env.reset(options={"prompt_index": group.prompt_index})[0]]
        seen += [env.step(int(token))[0] for token in response[:-1]]
        batch = {"obs": torch.from_numpy(np.stack(seen))}
        out = module.forward_train(batch)
        log_probs = out["action_dist_inputs"].log_softmax(-1)
        got = log_probs.gather(1, response[:, None])[:, 0]
        expected = group.behaviour_log_probs[0][group.response_mask[0]]
        assert torch.allclose(got, expected, atol=1e-4)
        assert torch.equal(module.compute_values(batch, out["embeddings"]), torch.zeros(len(got)))


def test_it_is_an_environment_as_gymnasium_wants_it() -> None:
    check_env(TokenEnv({"rollout": {"max_new_tokens": 4}}), skip_render_check=True)


def test_prompts_are_drawn_by_the_seed_and_then_go_on() -> None:
    env = TokenEnv()
    drawn = [env.reset(seed=5)[1]["prompt_index"]] + [
        env.reset()[1]["prompt_index"] for _ in range(3)
    ]
    assert len(set(drawn)) == 4
    assert env.reset(seed=5)[1]["prompt_index"] == drawn[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout": {"prompts": 4}}, r"rollout\.prompts: has no effect in TokenEnv"),
        ({"lag": 1}, "lag: has no effect in TokenEnv, which reads only model"),
        ({"task": {"nam": "math"}}, r"task\.nam.*did you mean task\.name"),
    ],
)
def test_a_setting_that_it_does_not_read_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenEnv(settings)


def test_a_response_that_cannot_fit_is_refused_before_its_first_token() -> None:
    env = TokenEnv({"rollout": {"max_new_tokens": 128}})
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=128: prompt 0 .*has 128"):
        env.reset(options={"prompt_index": 0})


def test_the_reward_is_the_weighted_sum_of_its_parts(tmp_path: Path) -> None:
    reward = tmp_path / "parts.py"
    reward.write_text("def score(*_):\n    return {'reward': 5, 'parts': {'one': 1, 'two': 2}}\n")
    task = {"reward": f"{reward}:score", "reward_weights": '{"one": 3, "two": 0.5}'}
    env = TokenEnv({"task": task, "rollout": {"max_new_tokens": 1}})
    env.reset(options={"prompt_index": 7})
    _, paid, ended, *_ = env.step(5)
    assert (paid, ended) == (4.0, True)


def test_a_reward_that_fails_is_an_error_and_no_reward(tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def score(response, ground_truth):\n    raise ValueError('no idea')\n")
    env = TokenEnv({"task": {"reward": f"{reward}:score"}, "rollout": {"max_new_tokens": 1}})
    env.reset(options={"prompt_index": 7})
    with pytest.raises(RuntimeError, match=r"the reward failed on prompt 7: .*no idea"):
        env.step(5)


def test_ppo_of_rllib_trains_it(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    settings = {"rollout": {"max_new_tokens": 8}}
    algo = (
        PPOConfig()
        .environment(TokenEnv, env_config=settings)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1, gamma=1.0)
        .rl_module(rl_module_spec=language_model_spec(settings))
        .debugging(seed=0)
        .build_algo()
    )
    before = {k: v.clone() for k, v in algo.get_module().policy.weights().items()}
    result = algo.train()
    after = algo.get_module().policy.weights()
    assert result["env_runners"]["num_episodes_lifetime"] >= 64 / 8
    assert 1 <= result["env_runners"]["episode_len_mean"] <= 8
    assert 0 <= result["env_runners"]["episode_return_mean"] <= 1
    assert any(not before[name].equal(after[name]) for name in before)
    algo.stop()
