"""Details of a round that are not metrics, as plain columns that callbacks write to files.

The Trainable sends the details to the driver together with the round's row of metrics (`Row`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grpo_trainable.protocol.versions import Sync, VersionChange
from grpo_trainable.telemetry.metrics import KL_TO, ActorSpan

if TYPE_CHECKING:  # callbacks use only the columns, so they need no torch
    from grpo_trainable.protocol.messages import Updated
    from grpo_trainable.protocol.rollout import RolloutGroup

Columns = dict[str, list[Any]]  # name of a column -> its values, one for each row of a table

# ---- The columns of the Parquet files, for code that writes or reads them ----------------------

_RESPONSE = {
    # Round that trained on the response. For a held-out response, number of rounds finished before
    # the evaluation.
    "round": pa.int32(),
    "cursor": pa.int64(),  # index of the prompt in its stream
    "response_index": pa.int32(),  # index among the responses to one prompt
    "task": pa.string(),  # task of the prompt, if the trial mixes several tasks
    "prompt": pa.string(),
    "response": pa.string(),
    "ground_truth": pa.string(),  # the true answer, as JSON
    "reward": pa.float32(),
    "format_reward": pa.float32(),  # null if the task's reward does not judge the format
    "answer_reward": pa.float32(),
    "parts": pa.string(),  # the parts with a weight, and those that the function returned, as JSON
    # True if end-of-text, a stop string or the environment ended the response, False if the length
    # limit did.
    "finished": pa.bool_(),
    "tokens": pa.int32(),  # number of sampled tokens
    "turns": pa.string(),  # an episode as JSON: actions, rewards, observations; otherwise null
}
# Subdirectory of a trial's directory -> the columns of the files in it.
SCHEMAS = {
    "evaluations": pa.schema(_RESPONSE),
    "rollouts": pa.schema(
        {
            **_RESPONSE,
            "advantage": pa.float32(),
            "uses": pa.int32(),  # number of times the group was trained on, including this time
            "version": pa.int32(),  # version of the weights that sampled the oldest token
            "weights_round": pa.int32(),  # round of the weights that sampled the oldest token
            "lag": pa.int32(),  # number of rounds before this round, minus weights_round
            "first_use": pa.bool_(),
            # Sums of log-probs over the response, in nats: under the weights that sampled each
            # token, under the policy after the round, and under the reference. The last two are
            # null for responses on which the KL was not measured.
            "behaviour_log_prob": pa.float32(),
            "policy_log_prob": pa.float32(),
            "reference_log_prob": pa.float32(),
        }
    ),
    "steps": pa.schema(
        {
            "round": pa.int32(),
            "step": pa.int32(),  # number of the step within the round, from 1
            "version": pa.int32(),  # version of the policy before the step
            "skipped": pa.bool_(),  # True if the loss or the gradient was not finite
            "loss": pa.float32(),
            "grad_norm": pa.float32(),
            "entropy_nats": pa.float32(),
            "clip_fraction": pa.float32(),
            "weights_bounded_fraction": pa.float32(),
            "ratio_max": pa.float32(),
            "bounded_tokens": pa.int64(),  # tokens whose ratio was bounded at e^20
            "lr": pa.float32(),
            # The critic's figures; null if there is no critic. The loss is not multiplied by
            # critic.coef.
            **{f"critic_{name}": pa.float32() for name in ("loss", "clip_fraction", "grad_norm")},
            # KL from the policy before the step to the named policy, in nats per response, on the
            # responses that the step trains on. For "reference" and "previous", only responses in
            # the round's KL sample are measured.
            **{f"kl_{other}{kind}_nats": pa.float32() for other in KL_TO for kind in ("", "_k3")},
        }
    ),
    "versions": pa.schema(
        {
            "at": pa.float64(),  # seconds since 1970, by the clock of the trial's process
            "round": pa.int32(),  # the trial's round in which the change happened
            "side": pa.string(),  # "generator" or "learner"
            "actor": pa.string(),
            "version": pa.int32(),
            "weights_round": pa.int32(),
            # How the weights reached a generator. Null for the learner, which produced them.
            "transport": pa.string(),
            "bytes": pa.int64(),
            "publish_s": pa.float64(),  # seconds in the learner, for the snapshot and its checksum
            "transfer_s": pa.float64(),  # seconds until the weights are in the generator's memory
            "load_s": pa.float64(),  # seconds in the generator, to check and adopt the weights
        }
    ),
}


def table(kind: str, columns: Columns) -> pa.Table:
    """Return columns as a table for a file in the directory `kind`.

    Raises:
        KeyError: A column is missing.
    """
    return pa.Table.from_pydict(columns, SCHEMAS[kind])


# ---- A round ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RoundDetails:
    """The details of one round."""

    round: int  # number of rounds finished so far
    # All settings of the trial. The trial's config in Tune, in contrast, may lack defaults and may
    # contain relative paths.
    config: Mapping[str, Any]
    rollouts: Columns  # the responses that the round trained on
    evaluations: Columns  # held-out responses of the evaluations within the round; often empty
    steps: Columns  # the gradient steps
    versions: list[VersionChange]  # oldest first
    spans: list[ActorSpan]
    notes: list[str]  # messages to the user, for example about a replaced actor
    lags: dict[int, int]  # lag -> number of groups first trained on at that lag
    # Number of response tokens in each bin of metrics.RATIO_EDGES, over all gradient steps.
    ratio_counts: list[int]


class Row(dict[str, Any]):
    """A round's row of metrics, together with the details of the round.

    The details are an attribute, not an entry. So Tune's schedulers and loggers, and a user's
    callbacks, see only plain entries. A copy of a row is a plain dictionary without details.
    """

    details: RoundDetails | None = None

    @classmethod
    def of(cls, entries: Mapping[str, Any], details: RoundDetails | None) -> Row:
        """Return a row with these entries and details."""
        row = cls(entries)
        row.details = details
        return row

    __copy__ = dict.copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)


def details_of(row: Mapping[str, Any]) -> RoundDetails | None:
    """Return the details of a row, or None if the row has no details."""
    return row.details if isinstance(row, Row) else None


# Index of an example -> the text of its prompt, its task (None unless `task.mix` is set), and its
# true answer as a JSON value.
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
    """Return columns with an entry for each of the N responses of the groups, in order.

    Args:
        groups: the groups that the round trained on.
        learner_round: number of rounds before this one.
        prompt: returns the prompt, task and true answer of an example.
        decode: returns the text of tokens.
        advantages: (N,), in the order of the responses.
        policy_log_probs: (N,), log-probs under the policy after the round, summed over each
            response, in nats. NaN for a response on which the KL was not measured. None if the KL
            was measured on no response.
        reference_log_probs: (N,), the same sums for log-probs under the reference.
    """
    columns = response_columns(groups, learner_round + 1, prompt, decode)
    count = len(columns["reward"])
    sizes = [len(group.response_ids) for group in groups]

    def of_groups(values: Sequence[Any]) -> list[Any]:
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]

    def sums(values: np.ndarray | None) -> list[float | None]:
        if values is None:
            return [None] * count
        return [None if math.isnan(value) else value for value in values.tolist()]

    behaviour = [value for g in groups for value in g.behaviour_log_probs.sum(dim=1).tolist()]
    return {
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


def response_columns(
    groups: Sequence[RolloutGroup], round_: int, prompt: Prompt, decode: Decode
) -> Columns:
    """Return the columns that training responses and held-out responses have in common.

    Args:
        groups: the groups of responses.
        round_: the value of the column `round`.
        prompt: returns the prompt, task and true answer of an example.
        decode: returns the text of tokens.
    """
    rows = [row for group in groups for row in _response_rows(group, round_, prompt, decode)]
    return {name: [row[name] for row in rows] for name in _RESPONSE}


def _response_rows(
    group: RolloutGroup, round_: int, prompt: Prompt, decode: Decode
) -> Iterator[dict[str, Any]]:
    text, task, truth = prompt(group.example)
    answer = json.dumps(truth)
    rewards, finished = group.rewards.tolist(), group.finished.tolist()
    assert group.format_rewards is not None, "the group has not been scored yet"
    assert group.answer_rewards is not None, "the group has not been scored yet"
    formats, answers = group.format_rewards.tolist(), group.answer_rewards.tolist()
    sampled = group.response_mask.sum(dim=1).tolist()
    for g, ids in enumerate(group.responses()):
        yield {
            "round": round_,
            "cursor": group.prompt_index,
            "response_index": g,
            "task": task,
            "prompt": text,
            "response": _said(group, g, ids, decode),
            "ground_truth": answer,
            "reward": rewards[g],
            "format_reward": None if math.isnan(formats[g]) else formats[g],
            "answer_reward": answers[g],
            "parts": _parts(group, g),
            "finished": finished[g],
            "tokens": sampled[g],
            "turns": _turns(group, g, ids, decode),
        }


def _parts(group: RolloutGroup, response: int) -> str | None:
    """Return the parts of a response's reward as JSON, or None if the group has no parts."""
    if group.parts is None:
        return None
    own = {name: values[response] for name, values in group.parts.items()}
    return json.dumps({name: value for name, value in own.items() if value is not None})


def _said(group: RolloutGroup, response: int, ids: list[int], decode: Decode) -> str:
    """Return a response as text, or its continuous actions as numbers between -1 and 1."""
    if group.actions is None:
        return decode(ids)
    actions = group.actions[response, : len(ids)].tanh().tolist()
    return " ".join(",".join(f"{number:.2f}" for number in action) for action in actions)


def _turns(group: RolloutGroup, response: int, ids: list[int], decode: Decode) -> str | None:
    """Return the turns of an episode as JSON, or None if the response is not an episode of text.

    A turn contains the text of the action, the reward of the action (null if the action was cut
    off), and the text of the observation that followed.
    """
    if group.turn_rewards is None or group.observations is not None:
        return None  # a control episode has hundreds of turns; column "response" lists its actions
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
    """Yield (was sampled, tokens, reward) for each action and each observation, in order.

    A response begins with an action.
    """
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
    """For each lag, return how many groups with this lag were first trained on in this round."""
    return dict(Counter(learner_round - g.oldest_round for g in groups if g.uses == 1))


def step_columns(updated: Updated) -> Columns:
    """Return columns with an entry for each gradient step of a round.

    `version` and the KL refer to the policy before the step. The KL is measured only on
    responses that the step trains on. If the KL is not monitored, its columns contain None.
    """
    steps = updated.steps
    taken = [not step.skipped for step in steps]
    columns: Columns = {
        "round": [updated.round] * len(steps),
        "step": list(range(1, len(steps) + 1)),
        "version": [updated.version - sum(taken[i:]) for i in range(len(steps))],
    }
    for name in ("loss", "clip_fraction", "grad_norm"):
        columns[f"critic_{name}"] = [s.critic and getattr(s.critic, name) for s in steps]
    for other in KL_TO:
        drifts = [step.kl.get(other) for step in steps]
        columns[f"kl_{other}_nats"] = [drift and drift.k1 for drift in drifts]
        columns[f"kl_{other}_k3_nats"] = [drift and drift.k3 for drift in drifts]
    for name in SCHEMAS["steps"].names:
        if name not in columns:  # the other columns are fields of `GradientStep`
            columns[name] = [getattr(step, name) for step in steps]
    return columns


def version_columns(changes: Sequence[VersionChange], round_: int) -> Columns:
    """Return columns with an entry for each change of weights in a round."""
    syncs = [change.sync for change in changes]
    return {
        "at": [change.at for change in changes],
        "round": [round_] * len(changes),
        "side": [change.role for change in changes],
        "actor": [change.actor for change in changes],
        "version": [change.version for change in changes],
        "weights_round": [change.weights_round for change in changes],
        **{
            field.name: [sync and getattr(sync, field.name) for sync in syncs]
            for field in fields(Sync)
        },
    }
