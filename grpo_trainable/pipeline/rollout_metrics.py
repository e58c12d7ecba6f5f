"""Metrics of the groups that a round trained on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import torch

from grpo_trainable.protocol.rollout import RolloutGroup, extents

RUN_TOKENS = 4  # length of a run of tokens; a run that repeats an earlier one is counted


def rollout_metrics(groups: Sequence[RolloutGroup], learner_round: int) -> dict[str, float]:
    """Return metrics of the groups that one round trained on.

    Args:
        groups: The groups.
        learner_round: Number of rounds of training before this one.
    """
    rewards = torch.stack([group.rewards for group in groups])
    lengths = torch.cat([group.response_mask.sum(dim=1) for group in groups]).float()
    finished = torch.cat([group.finished for group in groups]).float()
    ages = [learner_round - group.oldest_round for group in groups]
    first_uses = [age for age, g in zip(ages, groups, strict=True) if g.uses == 1]
    equal = (rewards == rewards[:, :1]).all(dim=1).float()
    return {
        "reward/train_mean": float(rewards.mean()),
        "reward/train_std": float(rewards.std()) if rewards.numel() > 1 else 0.0,
        "response/length_mean": float(lengths.mean()),
        "response/truncated_fraction": float(1 - finished.mean()),
        "response/repeated_fraction": repeated_fraction(groups),
        "group/zero_advantage_fraction": float(equal.mean()),
        "lag/max": float(max(first_uses, default=0)),
        "lag/mean": sum(first_uses) / max(len(first_uses), 1),
        "buffer/age_max": float(max(ages)),
        "buffer/age_mean": sum(ages) / len(ages),
        "buffer/uses_mean": sum(group.uses for group in groups) / len(groups),
        **_turns(groups),
    }


def repeated_fraction(groups: Sequence[RolloutGroup]) -> float:
    """Return the mean share of a response's four-token runs that repeat an earlier run.

    The mean is over the responses with at least four tokens. If there are none, the result is 0.
    """
    runs = [
        [tuple(ids[i : i + RUN_TOKENS]) for i in range(len(ids) - RUN_TOKENS + 1)]
        for group in groups
        for ids in group.responses()
    ]
    shares = [1 - len(set(own)) / len(own) for own in runs if own]
    return statistics.fmean(shares) if shares else 0.0


def info_means(groups: Sequence[RolloutGroup], names: Iterable[str]) -> dict[str, float]:
    """For each named number in the environments' `info`, return the mean over all episodes.

    A number that an episode lacks counts as 0, because the numbers of an episode are sums.
    """
    infos = [group.info or {} for group in groups]
    # fsum is exact, so the order of the groups does not matter.
    return {name: math.fsum(i.get(name, 0.0) for i in infos) / len(infos) for name in names}


def part_means(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean of each part of the reward, over the responses that have this part."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, own in (group.parts or {}).items():
            values.setdefault(name, []).extend(value for value in own if value is not None)
    # fsum is exact, so the order of the groups does not matter.
    return {name: math.fsum(own) / len(own) for name, own in sorted(values.items()) if own}


def interrupted_fraction(groups: Sequence[RolloutGroup]) -> float:
    """Return the share of responses into which tokens were inserted.

    These responses have a hole in their mask. The groups must not contain episodes, whose masks
    have holes too.
    """
    masks = [group.response_mask for group in groups]
    holes = torch.cat([extents(mask) > mask.sum(dim=1) for mask in masks])
    return float(holes.float().mean())


def _turns(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean number of answered actions per episode, or {} if there are no episodes."""
    played = [group.turn_rewards for group in groups if group.turn_rewards is not None]
    if not played:
        return {}
    answered = torch.cat([(~rewards.isnan()).sum(dim=1) for rewards in played])
    return {"response/turns_mean": float(answered.float().mean())}
