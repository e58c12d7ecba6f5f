"""Reward parts, from the function that returns them to the advantages computed from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from policies import write_quick_policy

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.protocol.messages import Sampled, Scored
from grpo_trainable.storage.checkpointing import TrialState, read_checkpoint
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

REWARD = '''
def score(response, ground_truth):
    """Two parts that a test can compute: how many letters, and whether the first is a vowel."""
    letters = float(len(response))
    return {"reward": 1.0, "parts": {"letters": letters, "vowel": float(response[:1] in "aeiou")}}
'''


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def config_of(policy_path: str, **task: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "model": {"path": policy_path},
            "rollout": {"prompts": 3, "group_size": 4, "min_new_tokens": 3, "max_new_tokens": 8},
            "loss": {"advantage": "batch"},
            "task": task,
        }
    )


def sampled(config: GRPOConfig, transport: InProcess) -> tuple[Learner, Scored]:
    learner, generator = Learner(config, transport), Generator(config, transport)
    try:
        generator.load(learner.publish().handle)
        prompts = Prompts(config, build_task(config), read_tokenizer(config.model.path))
        unit = generator.generate([prompts.request("train", index) for index in range(3)])
        return learner, generator.score(unit.number) if isinstance(unit, Sampled) else unit
    finally:
        generator.close()


@pytest.mark.slow
def test_parts_of_a_users_reward_become_gdpo_advantages(policy_path, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    config = config_of(
        policy_path,
        reward=f"{tmp_path}/mine.py:score",
        reward_weights='{"vowel": 2, "letters": 0.5}',
        normalize_parts=True,
    )
    learner, unit = sampled(config, InProcess())
    decode = read_tokenizer(policy_path).decode
    expected = []
    for group in unit.groups:
        texts = [
            decode(ids[mask].tolist())
            for ids, mask in zip(group.response_ids, group.response_mask, strict=True)
        ]
        columns = [[float(t[:1] in "aeiou") for t in texts], [float(len(t)) for t in texts]]
        parts = torch.tensor(columns, dtype=torch.float64)
        assert group.reward_parts is not None
        assert group.reward_parts.T.tolist() == columns  # in the order of the setting
        std = parts.std(dim=1, keepdim=True)
        deviations = parts - parts.mean(dim=1, keepdim=True)
        whitened = torch.where(std > 0, deviations / (std + 1e-8), 0.0)
        expected.append((2 * whitened[0] + 0.5 * whitened[1]).tolist())
    sums = torch.tensor(expected)
    wanted = (sums - sums.mean()) / (sums.std() + 1e-8)
    advantages = learner.update([unit.groups]).responses.advantages
    assert advantages == pytest.approx(wanted.flatten().numpy(), abs=1e-5)
    # The reward that metrics and evaluations show is the weighted sum, before normalising.
    for group in unit.groups:
        assert group.reward_parts is not None
        assert group.rewards.tolist() == (group.reward_parts @ torch.tensor([2.0, 0.5])).tolist()


@pytest.mark.slow
def test_without_normalising_the_weighted_sum_is_the_reward(policy_path):
    config = config_of(policy_path, reward_weights='{"answer": 1, "format": 0.25}')
    learner, unit = sampled(config, InProcess())
    parts = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]] * 3)
    groups = [replace(g, reward_parts=p) for g, p in zip(unit.groups, parts, strict=True)]
    # The weighted sums are 0.25, 1.25, 1 and 0. Over all 12 responses, their mean is 0.625, and
    # their variance is 0.265625 · 12/11.
    wanted = torch.tensor([-0.375, 0.625, 0.375, -0.625]) / (0.265625 * 12 / 11) ** 0.5
    advantages = learner.update([groups]).responses.advantages
    assert advantages == pytest.approx(wanted.repeat(3).numpy(), abs=1e-6)


@pytest.mark.slow
def test_parts_of_a_built_in_reward_are_logged_if_they_have_weights(policy_path):
    config = config_of(policy_path, reward_weights='{"answer": 1, "format": 0.25}')
    _, unit = sampled(config, InProcess())
    for group in unit.groups:
        assert group.parts is not None
        answers, formats = group.parts["answer"], group.parts["format"]
        assert answers == group.answer_rewards.tolist()
        assert formats == group.format_rewards.tolist()
        sums = [a + 0.25 * f for a, f in zip(answers, formats, strict=True)]
        assert group.rewards.tolist() == pytest.approx(sums)
    _, unit = sampled(config_of(policy_path), InProcess())
    assert all(group.parts is None for group in unit.groups)


@pytest.mark.slow
def test_a_part_that_a_reward_lacks_is_a_failed_reward(policy_path, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    config = config_of(
        policy_path, reward=f"{tmp_path}/mine.py:score", reward_weights='{"lettres": 1}'
    )
    _, unit = sampled(config, InProcess())
    assert unit.groups == []
    assert unit.reward_errors == 12
    assert unit.failed[0].reason == (
        "task.reward_weights names lettres, but the parts of the reward are answer, letters, vowel"
    )


@pytest.mark.slow
def test_a_number_has_no_part_format_and_the_error_says_how_to_return_one(policy_path, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, ground_truth): return 1.0")
    config = config_of(
        policy_path,
        reward=f"{tmp_path}/mine.py:score",
        reward_weights='{"answer": 1, "format": 0.5}',
    )
    _, unit = sampled(config, InProcess())
    assert unit.failed[0].reason == (
        "task.reward_weights names format, but the parts of the reward are answer; a reward has "
        "the part format if it returns format_reward"
    )


@pytest.mark.slow
def test_a_checkpoint_keeps_the_parts_of_waiting_groups(policy_path, tmp_path: Path):
    config = config_of(policy_path, reward_weights='{"format": 1}')
    _, unit = sampled(config, InProcess())
    state = TrialState(state={}, policy={}, optimizer={}, groups=unit.groups)
    write_checkpoint(tmp_path / "checkpoint", state)
    for before, after in zip(
        unit.groups, read_checkpoint(tmp_path / "checkpoint").groups, strict=True
    ):
        assert before.reward_parts is not None
        assert after.reward_parts is not None
        assert after.reward_parts.equal(before.reward_parts)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (
            {"reward_weights": "[1]"},
            "task.reward_weights=.*: must be none or a JSON object of numbers",
        ),
        (
            {"reward_weights": "{}"},
            "task.reward_weights=.*: must be none or a JSON object of numbers",
        ),
        (
            {"reward_weights": '{"answer": true}'},
            "task.reward_weights=.*: must be none or a JSON object",
        ),
        (
            {"reward_weights": '{"answer": NaN}'},
            "task.reward_weights=.*: must be none or a JSON object",
        ),
        (
            {"reward_weights": '{"length": 1}'},
            r"the reward of task.name=keyword has no part length; valid: format, answer$",
        ),
        (
            {"name": "control", "reward_weights": '{"format": 1, "answer": 1}'},
            r"the reward of task.name=control has no part format; valid: answer$",
        ),
        ({"normalize_parts": True}, "normalize_parts=true: has no effect with task.reward_weights"),
    ],
)
def test_wrong_weights_are_refused(task, line):
    with pytest.raises(ConfigError, match=line):
        GRPOConfig.from_dict({"task": task})


def test_a_group_of_one_has_no_part_to_compare():
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1: must be >= 2 with task\.norm"):
        GRPOConfig.from_dict(
            {
                "task": {"reward_weights": '{"answer": 1}', "normalize_parts": True},
                "rollout": {"group_size": 1},
                "loss": {"advantage": "batch"},
            }
        )
