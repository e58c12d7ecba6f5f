"""The ratios in a learner's gradient steps, for samples of a real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.gradient_steps import StepStatistics
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.store import build_any_policy
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess


def log_ratios(
    config: GRPOConfig,
    patch: pytest.MonkeyPatch,
    lag: int = 0,
    change: Callable[[RolloutGroup], RolloutGroup] = lambda group: group,
) -> list[list[Tensor]]:
    """Return log ρ of the tokens in each gradient step of a round, (T,) per microbatch.

    The learner trains for `lag` rounds, and then gets the samples as `change` returns them.
    """
    found: list[Tensor] = []
    add = StepStatistics.add

    def noted(self, loss, clipped, entropy, log_probs, old_log_probs, mask, *others) -> None:
        found.append((log_probs.detach() - old_log_probs)[mask])
        add(self, loss, clipped, entropy, log_probs, old_log_probs, mask, *others)

    patch.setattr(StepStatistics, "add", noted)
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    generator.load(learner.publish().handle)
    _, tokenizer = build_any_policy(config.model, config.seed)
    prompts = Prompts(config, build_task(config), tokenizer)
    indices = range(schedule.prompts_per_round(config))
    sampled = generator.generate([prompts.request("train", index) for index in indices]).groups
    rewards = torch.arange(config.rollout.group_size).float()
    groups = [change(replace(group, rewards=rewards)) for group in sampled]
    size = config.rollout.prompts
    batches = [groups[i : i + size] for i in range(0, len(groups), size)]
    for _ in range(lag):
        learner.update(batches)
    found.clear()
    learner.update(batches)
    a_step = len(found) // config.k
    assert a_step > 0
    return [found[i : i + a_step] for i in range(0, len(found), a_step)]
