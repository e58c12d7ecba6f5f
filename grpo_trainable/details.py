"""Everything a round leaves besides its metrics, as plain columns that callbacks write to files.

It rides in a row under `DETAILS` from the Trainable to the driver, where the last callback that
needs it takes it out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_trainable.metrics import ActorSpan
from grpo_trainable.rollout import RolloutGroup
from grpo_trainable.versions import VersionChange

DETAILS = "details"

Columns = dict[str, list[Any]]  # name -> one value a response, or a gradient step


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RoundDetails:
    round: int  # rounds trained so far
    rollouts: Columns  # what the round trained on
    evaluations: Columns  # held-out responses of the evaluations within the round; often none
    steps: Columns  # the gradient steps
    versions: list[VersionChange]  # in the order of time
    spans: list[ActorSpan]
    notes: list[str]  # what the user should hear of: an actor replaced, a checkpoint not written
    lags: dict[int, int]  # lag -> groups trained for the first time
    ratio_counts: list[int]  # response tokens between metrics.RATIO_EDGES, all gradient steps

    def __repr__(self) -> str:
        # A logger that does not know about details writes this; Tune formats every row for its own.
        return f"details of round {self.round}: see callbacks.grpo_callbacks"


# Example -> the text of the prompt, and the task of a mix that it is of, None without a mix.
Prompt = Callable[[int], tuple[str, str | None]]
Decode = Callable[[list[int]], str]


def rollout_columns(
    groups: Sequence[RolloutGroup],
    learner_round: int,
    prompt: Prompt,
    decode: Decode,
    *,
    advantages: np.ndarray,
    policy_log_probs: np.ndarray | None,
    reference_log_probs: np.ndarray | None,
) -> Columns:
    """One entry a response of the groups, in order; the arrays are (N,) in that order.

    `learner_round`: rounds trained before. Log-probs are sums over the response, in nats; None
    where they were not measured.
    """
    columns = response_columns(groups, prompt, decode)
    count = len(columns["reward"])
    sizes = [len(group.response_ids) for group in groups]

    def of_groups(values: Sequence[Any]) -> list[Any]:
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]

    def sums(values: np.ndarray | None) -> list[float | None]:
        return [None] * count if values is None else values.tolist()

    behaviour = [value for g in groups for value in g.behaviour_log_probs.sum(dim=1).tolist()]
    return {
        "round": [learner_round + 1] * count,
        **columns,
        "advantage": advantages.tolist(),
        "uses": of_groups([group.uses for group in groups]),
        "version": of_groups([group.oldest_version for group in groups]),
        "weights_round": of_groups([group.oldest_round for group in groups]),
        "lag": of_groups([learner_round - group.oldest_round for group in groups]),
        "first_use": of_groups([group.uses == 1 for group in groups]),
        "behaviour_log_prob": behaviour,
        "policy_log_prob": sums(policy_log_probs),
        "reference_log_prob": sums(reference_log_probs),
    }


def response_columns(groups: Sequence[RolloutGroup], prompt: Prompt, decode: Decode) -> Columns:
    """Columns that every response has, sampled for training or for an evaluation."""
    names = ("cursor", "response_index", "task", "prompt", "response", "reward", "finished",
             "tokens")  # fmt: skip
    columns: Columns = {name: [] for name in names}
    for group in groups:
        text, task = prompt(group.example)
        rewards, finished = group.rewards.tolist(), group.finished.tolist()
        sampled = zip(group.response_ids, group.response_mask, strict=True)
        for g, (row, mask) in enumerate(sampled):
            ids = row[mask].tolist()
            columns["cursor"].append(group.prompt_index)
            columns["response_index"].append(g)
            columns["task"].append(task)
            columns["prompt"].append(text)
            columns["response"].append(decode(ids))
            columns["reward"].append(rewards[g])
            columns["finished"].append(finished[g])
            columns["tokens"].append(len(ids))
    return columns


def first_use_lags(groups: Sequence[RolloutGroup], learner_round: int) -> dict[int, int]:
    """How many groups were trained for the first time at each lag."""
    return dict(Counter(learner_round - g.oldest_round for g in groups if g.uses == 1))
