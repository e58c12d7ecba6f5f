"""Whole trials on Hugging Face models, sampled by the engine `hf`, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import trial_config, untimed
from hf_models import write_hf_model
from test_real_actors import check_log_probs, run

from grpo_trainable.config import GRPOConfig
from grpo_trainable.storage.checkpointing import read_checkpoint

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    return write_hf_model(directory, "qwen2", tied=True, max_position_embeddings=96)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a reward function whose values differ even for a model with random weights."""
    file = tmp_path_factory.mktemp("reward") / "letters.py"
    file.write_text(
        "def score(response, truth):\n    return response.count('e') - len(response) / 9\n"
    )
    return f"{file}:score"


TALK = """
from grpo_trainable.tasks import Example


class Talk:
    stop = ("e", "a")

    def __init__(self, seed):
        pass

    def train_example(self, prompt_index):
        return Example(f"go {prompt_index}", prompt_index)

    def eval_examples(self, count):
        return [self.train_example(index) for index in range(count)]
"""
# The task is in another file: environment processes start faster without the imports of a task.
ENV = """
from grpo_trainable.environments import Turn


class Env:
    def reset(self, spec):
        self.turns = 0
        return f"go {spec}"

    def step(self, action):
        self.turns += 1
        return Turn(f"{len(action)} of 9", len(set(action)) / 9 - len(action) / 20, self.turns == 3)

    def close(self):
        pass
"""


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of episodes with three turns."""
    directory = tmp_path_factory.mktemp("talk")
    (directory / "talk.py").write_text(TALK)
    (directory / "env.py").write_text(ENV)
    return {
        "task": {"name": f"{directory}/talk.py:Talk"},
        "env": {"name": f"{directory}/env.py:Env", "patience_s": 60.0},
        "rollout": {"max_new_tokens": 40},
    }


def hf_config(path: str, reward: str, **values: Any) -> dict[str, Any]:
    sampling = {"prompts": 4, "unit_prompts": 2, "group_size": 4, "max_new_tokens": 16}
    model = {"path": path, **values.pop("model", {})}
    sampling |= values.pop("rollout", {})
    task = values.pop("task", {"reward": reward})
    return trial_config(rollout=sampling, model=model, task=task, **values)


GAE = {"type": "ppo", "advantage": "gae"}
# A response with an "e" among its first eight tokens is not interrupted.
INTERRUPTED = {
    "overlong": "interrupt",
    "overlong_buffer": 8,
    "interruption": " The end.",
    "thinking_end": "e",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"rollout": {"stop": ["."]}},
    "adapters": {"model": {"lora_rank": 4}, "rollout": {"min_new_tokens": 4}},
    "critic": {"loss": GAE, "critic": {"body": "own"}},
    "critic-bfloat16": {"model": {"dtype": "bfloat16"}, "loss": GAE, "critic": {"body": "own"}},
    "critic-adapters": {"model": {"lora_rank": 4}, "loss": GAE, "critic": {"body": "own"}},
    "critic-on-adapters": {"model": {"lora_rank": 4}, "loss": GAE, "critic": {"body": "shared"}},
    "episodes": {},
    "vine": {"loss": {"type": "ppo", "advantage": "vine"}, "vine": {"samples": 2}},
    "interrupted": {
        "rollout": INTERRUPTED,
        "buffer_capacity": 2,
        "buffer_sampling": "mixed",
        "buffer": {"sample_batches": 2},
    },
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_resumed_synchronous_trial_equals_the_one_that_was_not_stopped(
    begun: Callable[[dict[str, Any]], Any],
    trainable: Callable[[dict[str, Any]], Any],
    model_path: str,
    reward: str,
    episodes: dict[str, Any],
    tmp_path: Path,
    settings: str,
) -> None:
    if "adapters" in settings:
        pytest.importorskip("peft")
    own = episodes if settings == "episodes" else SETTINGS[settings]
    config = hf_config(model_path, reward, **own)
    whole = begun(config)
    rows = [whole.step() for _ in range(2)]
    whole.save_checkpoint(str(tmp_path / "half"))
    rows += [whole.step() for _ in range(2)]
    whole.save_checkpoint(str(tmp_path / "end"))
    # Sampler and learner agree: on the first step of a round, every ratio is 1.
    rounding = 0.5 if "bfloat16" in settings else 1e-4
    fresh = rows if settings != "interrupted" else rows[:1]  # later rounds include older groups
    assert all(row["loss/ratio_max"] == pytest.approx(1.0, abs=rounding) for row in fresh)
    if settings == "interrupted":
        assert any(0 < row["response/interrupted_fraction"] < 1 for row in rows)
    if settings == "episodes":
        assert all(1 < row["response/turns_mean"] <= 3 for row in rows)
    assert all(row["response/truncated_fraction"] <= 1 for row in rows)

    begin = trainable if settings == "whole" else begun  # in new processes or in reused ones
    resumed = begin(config)
    resumed.load_checkpoint(str(tmp_path / "half"))
    assert [untimed(resumed.step()) for _ in range(2)] == [untimed(row) for row in rows[2:]]
    resumed.save_checkpoint(str(tmp_path / "again"))
    end, again = (read_checkpoint(tmp_path / name) for name in ("end", "again"))
    for one, other in ((end.policy, again.policy), (end.optimizer, again.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(name.startswith("critic/body") for name in end.optimizer) == (
        SETTINGS[settings].get("critic") == {"body": "own"}
    )
    before = read_checkpoint(tmp_path / "half").policy
    assert any(not torch.equal(tensor, end.policy[name]) for name, tensor in before.items())


@pytest.mark.parametrize("kind", ["whole", "interrupted", "episodes"])
def test_weights_arrive_between_two_tokens(
    begun: Callable[[dict[str, Any]], Any],
    model_path: str,
    reward: str,
    episodes: dict[str, Any],
    kind: str,
) -> None:
    own = {"whole": {}, "interrupted": {"rollout": INTERRUPTED}, "episodes": episodes}[kind]
    settings = {"lag": 1, "weight_update": "in_flight", "rounds": 6, **own}
    running = begun(hf_config(model_path, reward, **settings))
    rows = [running.step() for _ in range(4)]
    interrupted, played = kind == "interrupted", kind == "episodes"
    assert all(("response/interrupted_fraction" in row) == interrupted for row in rows)
    assert all(("response/turns_mean" in row) == played for row in rows)
    assert max(row["lag/max"] for row in rows) == 1
    assert all(row["count/dropped"] == 0 for row in rows)


@pytest.mark.parametrize(
    "own",
    [
        {"lag": 1},
        {"lag": 2, "weight_update": "in_flight", "loss": {"kl_monitor": False}},
        {"lag": 2, "weight_update": "interrupt_recompute"},
    ],
    ids=["between", "in flight", "recompute"],
)
def test_every_token_of_an_episode_knows_its_weights(
    model_path: str, reward: str, episodes: dict[str, Any], own: dict[str, Any]
) -> None:
    """`run` also checks in every round that no token is older than the lag allows."""
    settings = {**own, **episodes, "optim": {"lr": 1e-2}, "resources": {"deadline_s": 1e6}}
    config = GRPOConfig.from_dict(hf_config(model_path, reward, **settings))
    learner, kept = run(config, {"rollout": 60.0, "optimize": 20.0, "sync": 1.0}, timing=1)
    assert (check_log_probs(config, kept, learner.rounds) > 0) == config.in_mid_batch
    groups = [group for batches in learner.rounds for batch in batches for group in batch]
    ages = [
        round_ - int(group.token_rounds[group.response_mask].min())
        for round_, batches in enumerate(learner.rounds)
        for batch in batches
        for group in batch
    ]
    assert 0 < max(ages) <= config.lag
    assert sum(int((group.extents - group.response_mask.sum(dim=1)).sum()) for group in groups) > 0
    assert any(len(set(group.rewards.tolist())) > 1 for group in groups)
