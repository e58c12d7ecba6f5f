"""Everything a round leaves besides its metrics, as plain columns that callbacks write to files.

It rides in a row under `DETAILS` from the Trainable to the driver, where the last callback that
needs it takes it out again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_trainable.protocol.versions import VersionChange
from grpo_trainable.telemetry.metrics import ActorSpan

if TYPE_CHECKING:  # callbacks have the columns alone, and need no torch
    from grpo_trainable.protocol.rollout import RolloutGroup

DETAILS = "details"

Columns = dict[str, list[Any]]  # name -> one value a response, or a gradient step


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RoundDetails:
    round: int  # rounds trained so far
    rollouts: Columns  # what the round trained on
    evaluations: Columns  # held-out responses of the evaluations within the round; often none
    steps: Columns  # the gradient steps
    versions: list[VersionChange]  # oldest first
    spans: list[ActorSpan]
    notes: list[str]  # what the user should hear of: an actor replaced, a checkpoint not written
    lags: dict[int, int]  # lag -> groups trained for the first time
    ratio_counts: list[int]  # response tokens between metrics.RATIO_EDGES, all gradient steps

    def __repr__(self) -> str:
        # A logger that does not know about details writes this; Tune formats every row for its own.
        return f"details of round {self.round}: see callbacks.grpo_callbacks"


# Example -> the text of the prompt; the task of a mix that it is of, None without a mix; and its
# true answer, as JSON.
Prompt = Callable[[int], "tuple[str, str | None, Any]"]
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
    names = ("cursor", "response_index", "task", "prompt", "response", "ground_truth", "reward",
             "format_reward", "answer_reward", "finished", "tokens", "turns")  # fmt: skip
    columns: Columns = {name: [] for name in names}
    for group in groups:
        text, task, truth = prompt(group.example)
        answer = json.dumps(truth)
        rewards, finished = group.rewards.tolist(), group.finished.tolist()
        assert group.format_rewards is not None, "the group is not scored yet"
        assert group.answer_rewards is not None, "the group is not scored yet"
        formats, answers = group.format_rewards.tolist(), group.answer_rewards.tolist()
        sampled = group.response_mask.sum(dim=1).tolist()
        for g, ids in enumerate(group.responses()):
            columns["cursor"].append(group.prompt_index)
            columns["response_index"].append(g)
            columns["task"].append(task)
            columns["prompt"].append(text)
            columns["response"].append(_said(group, g, ids, decode))
            columns["ground_truth"].append(answer)
            columns["reward"].append(rewards[g])
            columns["format_reward"].append(formats[g])
            columns["answer_reward"].append(answers[g])
            columns["finished"].append(finished[g])
            columns["tokens"].append(sampled[g])
            columns["turns"].append(_turns(group, g, ids, decode))
    return columns


def _said(group: RolloutGroup, response: int, ids: list[int], decode: Decode) -> str:
    """The text of a response; of actions that are numbers, these between -1 and 1."""
    if group.actions is None:
        return decode(ids)
    actions = group.actions[response, : len(ids)].tanh().tolist()
    return " ".join(",".join(f"{number:.2f}" for number in action) for action in actions)


def _turns(group: RolloutGroup, response: int, ids: list[int], decode: Decode) -> str | None:
    """The turns of a response with tokens `ids` as JSON: what the policy wrote, what that earned
    (null where the action was cut off), and what it read then. None where it was not played."""
    if group.turn_rewards is None or group.observations is not None:
        return None  # an episode of control has hundreds, which the response names
    turns: list[dict[str, Any]] = []
    for actions, span, reward in _spans(group, response, ids):
        if actions:
            turns.append({"action": decode(span), "reward": reward, "observation": ""})
        else:
            turns[-1]["observation"] = decode(span)
    return json.dumps(turns, ensure_ascii=False)


def _spans(
    group: RolloutGroup, response: int, ids: list[int]
) -> Iterator[tuple[bool, list[int], float | None]]:
    """(whether it was sampled, its tokens, its reward) of each action and observation, in turn. A
    response begins with an action."""
    assert group.turn_rewards is not None, "only episodes have turns"
    sampled = group.response_mask[response].tolist()
    rewards = group.turn_rewards[response].tolist()
    start = 0
    for t in range(len(ids)):
        earned = not math.isnan(rewards[t])
        if earned or t + 1 == len(ids) or sampled[t + 1] != sampled[t]:
            yield sampled[t], ids[start : t + 1], rewards[t] if earned else None
            start = t + 1


def first_use_lags(groups: Sequence[RolloutGroup], learner_round: int) -> dict[int, int]:
    """How many groups were trained for the first time at each lag."""
    return dict(Counter(learner_round - g.oldest_round for g in groups if g.uses == 1))
