"""A learner and a generator in one process, and their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

Weights = dict[str, Tensor]


class Pair:
    """A learner and a generator on one transport. `rollouts` samples the next batch."""

    def __init__(self, policy_path: str, **values: Any) -> None:
        data: dict[str, Any] = {
            "rounds": 10,
            "model": {"path": policy_path},
            "rollout": {
                "prompts": 4,
                "group_size": 3,
                "min_new_tokens": 3,
                "max_new_tokens": 10,
                "temperature": 0.7,
            },
            "optim": {"lr": 1e-2},
        }
        for name, value in values.items():
            data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
        self.config = GRPOConfig.from_dict(data)
        transport = InProcess()
        self.learner = Learner(self.config, transport)
        self.generator = Generator(self.config, transport)
        self.prompts = Prompts(
            self.config, build_task(self.config), read_tokenizer(self.config.model.path)
        )
        self.next_prompt = 0

    def sync(self) -> None:
        self.generator.load(self.learner.publish().handle)

    def rollouts(self) -> list[RolloutGroup]:
        """Return a fresh rollout batch from the generator's weights, with invented rewards."""
        count = self.config.rollout.prompts
        prompt_indices = range(self.next_prompt, self.next_prompt + count)
        self.next_prompt += count
        unit = self.generator.generate([self.prompts.request("train", c) for c in prompt_indices])
        # The task would reward none of a random policy's responses.
        rewards = torch.linspace(0, 1, self.config.rollout.group_size)
        return [replace(g, rewards=rewards.roll(g.prompt_index), uses=1) for g in unit.groups]

    def weights(self) -> Weights:
        return copy(unique_parameters(self.learner.policy))


def copy(tensors: Weights) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def distance(a: Weights, b: Weights) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)
