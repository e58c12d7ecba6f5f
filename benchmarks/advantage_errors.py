"""Compare estimates of the advantage with its true value, on policies that PPO has trained.

The advantage of a segment of a response is V(state after the segment) − V(state before it), where V
is the expected reward. Many completions of each state (`TRUTH`) give the true V. The segments are
the parts into which `vine.chunk_tokens` divides a response. The estimates are:

  return           the reward of the response
  group            the reward minus the mean reward of the group, as in GRPO
  gae              generalised advantage estimation with the critic of the trial
  critic           the critic's V(after) − V(before)
  vine_k4, vine_k9 V from 4 or 9 completions of each state (VinePPO)

An estimate from more samples has a smaller error. To compare at equal samples, the mean squared
error is multiplied by the number of tokens that one response costs, relative to a response without
completions: averaging over n times as many responses divides a variance by n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.algo import at_the_end, gae
from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.storage.checkpointing import (
    numbered_checkpoints,
    read_state,
    verified_digests,
)
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

TRUTH = 128  # number of completions per state that give the true value
PROMPTS = 32
FIRST_PROMPT = 1_000_000  # index of the first prompt, which no trial has trained on
KS = (4, 9)  # completions per state of VinePPO; 9 is the number in the paper


@dataclass(frozen=True)
class Segments:
    """The segments of all responses, one number each, (N,)."""

    tokens: Tensor  # number of tokens
    before: Tensor  # true value of the state before the segment
    after: Tensor  # true value of the state after it; the reward after the last segment
    is_last: Tensor  # bool
    reward: Tensor  # reward of the response
    group_mean: Tensor  # mean reward of the group
    critic_before: Tensor  # the critic's value of the state before the segment
    critic_after: Tensor  # the same after the segment; the reward after the last segment
    gae: Tensor  # advantage of the segment's first token


def segments(
    groups: Sequence[RolloutGroup], values: Sequence[Tensor], *, gamma: float, lam: float
) -> Segments:
    """Divide the responses of groups with true state values into segments.

    Args:
        groups: The groups, with the true values of their states.
        values: The critic's values, (G, R) for each group.
        gamma: The discount.
        lam: λ of generalised advantage estimation.
    """
    rows: list[list[float]] = []
    for group, said in zip(groups, values, strict=True):
        mask, truth = group.response_mask, group.state_values
        assert truth is not None, "the generator did not estimate the values of states"
        advantages = gae(at_the_end(group.rewards, mask), said, mask, gamma=gamma, lam=lam)
        mean = float(group.rewards.mean())
        for g in range(len(mask)):
            own, reward = truth[g][mask[g]], float(group.rewards[g])
            critic, advantage = said[g][mask[g]], advantages[g][mask[g]]
            starts = (~own.isnan()).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(own)], strict=True):
                is_last = end == len(own)
                after = reward if is_last else float(own[end])
                critic_after = reward if is_last else float(critic[end])
                rows.append(
                    [
                        *(end - start, float(own[start]), after, is_last, reward, mean),
                        *(float(critic[start]), critic_after, float(advantage[start])),
                    ]
                )
    columns = torch.tensor(rows, dtype=torch.float64).T
    return Segments(*columns[:3], columns[3].bool(), *columns[4:])


def squared_errors(own: Segments, *, truth: int) -> dict[str, float]:
    """Return the mean squared error of each estimate, over the tokens.

    The rewards are 0 or 1, so a state of value p has rewards with variance p (1 − p).

    Args:
        own: The segments.
        truth: The number of completions from which the true values were computed.
    """
    advantage = own.after - own.before

    def mean(squares: Tensor) -> float:
        return float((squares * own.tokens).sum() / own.tokens.sum())

    unbiased = truth / (truth - 1)
    variance_before = own.before * (1 - own.before) * unbiased
    variance_after = (own.after * (1 - own.after) * unbiased).where(~own.is_last, 0.0)
    return {
        "return": mean((own.reward - advantage) ** 2),
        "group": mean((own.reward - own.group_mean - advantage) ** 2),
        "gae": mean((own.gae - advantage) ** 2),
        "critic": mean((own.critic_after - own.critic_before - advantage) ** 2),
        **{f"vine_k{k}": mean((variance_before + variance_after) / k) for k in KS},
    }


def tokens_per_response(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the tokens that are sampled for each response, with the completions of its states.

    A completion is as long as the rest of the response, on average. The responses of a group share
    the completions of the prompt.
    """
    lengths = rest = 0.0
    for group in groups:
        assert group.state_values is not None
        for mask, truth in zip(group.response_mask, group.state_values, strict=True):
            starts = (~truth[mask].isnan()).nonzero().flatten()
            length = int(mask.sum())
            lengths += length
            rest += length / len(group.rewards)
            rest += float((length - starts[1:]).sum())
    responses = sum(len(group.rewards) for group in groups)
    plain = lengths / responses
    with_completions = {f"vine_k{k}": plain + k * rest / responses for k in KS}
    return {**dict.fromkeys(("return", "group", "gae", "critic"), plain), **with_completions}


def of_checkpoint(config: GRPOConfig, directory: Path) -> dict[str, Any]:
    """Measure the estimates on new responses of the policy in a checkpoint."""
    transport = InProcess()
    learner = Learner(config, transport)
    digests = verified_digests(directory)
    state, _ = read_state(directory, digests)
    learner.read_state(str(directory), digests, state["learner"])
    vine = {"loss.advantage": "vine", "vine.samples": TRUTH, "critic.lr": None}
    generator = Generator(changed(config, vine), transport)
    try:
        generator.load(learner.publish().handle)
        prompts = Prompts(config, build_task(config), policy_tokenizer(config.model))
        places = range(FIRST_PROMPT, FIRST_PROMPT + PROMPTS)
        scored = generator.generate([prompts.request("train", place) for place in places])
    finally:
        generator.close()
    assert isinstance(scored, Scored), "the reward of this task is computed at once"
    values = learner._batches.values(scored.groups)
    found = segments(scored.groups, values, gamma=config.loss.gamma, lam=config.loss.gae_lambda)
    errors, tokens = squared_errors(found, truth=TRUTH), tokens_per_response(scored.groups)
    plain = tokens["group"]
    return {
        "round": state["learner"]["round"],
        "reward": float(found.group_mean.mean()),
        "segments": len(found.tokens),
        "squared_error": errors,
        "tokens_per_response": tokens,
        "at_equal_samples": {name: errors[name] * tokens[name] / plain for name in errors},
    }


def changed(config: GRPOConfig, changes: Mapping[str, Any]) -> GRPOConfig:
    """Return a config with other values of some settings."""
    data = config.to_dict()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data[section][name] = value
    return GRPOConfig.from_dict(data)


def of_trial(config: GRPOConfig, directory: Path) -> list[dict[str, Any]]:
    """Measure the estimates at every checkpoint of a trial."""
    return [of_checkpoint(config, path) for path in numbered_checkpoints(directory)]
