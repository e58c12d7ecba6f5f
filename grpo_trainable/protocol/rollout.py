"""Containers for requests, groups, batches and weights, and the code that pads and shifts rows.

Shapes: G responses per prompt, B rows, P prompt tokens, R response tokens (padded). S is the
number of tokens in the longest prompt + response of a batch, minus 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

# Functions that create tensors import torch in their bodies. The command line creates requests but
# no tensors, so it need not load torch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The tokens that are inserted into a response if its reasoning is too long.

    A response is interrupted if, after `after_tokens` tokens, it has not ended and contains no
    element of `answer_ids` or `answer_strings`. An interruption inserts the tokens `ids`. The
    inserted tokens are not sampled, so they form a hole in the response's mask.
    """

    after_tokens: int
    ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    answer_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Settings that define how a response is sampled and when it ends.

    Temperature 1 samples from the model's own distribution. Temperature 0 selects the most likely
    token, but log-probs are computed at temperature 1. `top_p` below 1, which only evaluations
    use, samples from the most likely tokens whose probabilities add up to `top_p`.

    A response is finished after the first token that is one of `end_ids` or completes one of
    `stop_strings` in the text. Otherwise the response is cut off after `max_new_tokens`. A response
    cannot end before token number `min_new_tokens`. Before that token, end ids have probability 0,
    and a stop string that is completed earlier never counts.
    """

    min_new_tokens: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    end_ids: tuple[int, ...]  # these include the tokenizer's end ids
    stop_strings: tuple[str, ...] = ()  # a stop string stays in the text of the response
    interruption: Interruption | None = None  # inserted tokens count towards `max_new_tokens`


class StateOf(NamedTuple):
    """A state within a response, for which completions are sampled to estimate its value."""

    response: int  # index of the response in its group; 0 if the state is the prompt itself
    # Number of response tokens in the state. These are the last tokens of the request's prompt_ids.
    tokens: int


class Rubric(NamedTuple):
    """A criterion that a judge has written for one prompt."""

    description: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to sample `group_size` responses to one prompt.

    The pipeline dispatches and counts these requests.

    (stream, prompt_index) identifies the prompt. Together with the seed, this pair is the key of
    every random draw for the responses, so a repeated request gives the same tokens under the same
    weights. If there is a `state`, the state is part of the key, and `limits` apply to the tokens
    that follow the state.
    """

    stream: str  # "train", "eval" or, with a state, "vine"
    prompt_index: int
    prompt_ids: tuple[int, ...]
    group_size: int
    limits: SamplingLimits
    # Index of the prompt's example in the stream. None means that it equals `prompt_index`.
    example_index: int | None = None
    state: StateOf | None = None
    # Rubrics of the prompt that a judge has written so far. None: the judge writes no rubrics.
    rubrics: tuple[Rubric, ...] | None = None

    @property
    def example(self) -> int:
        """Index of the prompt's example."""
        return self.prompt_index if self.example_index is None else self.example_index

    @property
    def answered(self) -> tuple[int, ...]:
        """The response tokens at the end of `prompt_ids`; empty without a state."""
        count = 0 if self.state is None else self.state.tokens
        return self.prompt_ids[len(self.prompt_ids) - count :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """G responses to one prompt, with the version of the weights that sampled each token.

    The engine leaves `rewards` at NaN. The scorer sets each reward once, and nothing changes it
    later.
    """

    prompt_index: int
    prompt_ids: Tensor  # (P,) int64
    # (G, R) int64, including the tokens in holes (see `response_mask`). Padding follows the last
    # sampled token.
    response_ids: Tensor
    # (G, R) bool: True for sampled tokens, including the token that ended the response. Holes are
    # tokens that the policy read within its response but did not sample.
    response_mask: Tensor
    behaviour_log_probs: Tensor  # (G, R) float32, nats, measured while sampling; 0 off the mask
    rewards: Tensor  # (G,) float32
    # (G,) bool: True if an end id, a stop string or (for an episode) the environment ended the
    # response. False if the response reached the length limit.
    finished: Tensor
    # (G, R) int32, version (number of gradient steps) of the weights that sampled the token.
    token_versions: Tensor
    token_rounds: Tensor  # (G, R) int32, round of the weights that sampled the token
    # (G, R) float32, nats; 0 off the mask. None unless the generators run the reference.
    reference_log_probs: Tensor | None = None
    # (G, K) float32: the reward parts that `task.reward_weights` names, in the order of that
    # setting. None if `task.reward_weights` is not set.
    reward_parts: Tensor | None = None
    # Name of each part that the reward function returned -> its value for each of the G responses,
    # or None for a response without this part. None if there are no such parts.
    parts: dict[str, list[float | None]] | None = None
    # (G,) float64 each: two parts of the reward, exactly as the task returned them. The format
    # reward is NaN if the reward does not judge the format. Both are None until the scorer has set
    # them.
    format_rewards: Tensor | None = None
    answer_rewards: Tensor | None = None
    # (G, R) float32: the value of the state before each token, estimated from completions of that
    # state; NaN if the state has no completions. None if the trial does not estimate values.
    state_values: Tensor | None = None
    # (G, R) float32: in an episode, the reward of each action, at the action's last token; NaN at
    # all other tokens. None if responses are not episodes.
    turn_rewards: Tensor | None = None
    # In episodes, the numbers that the environment reports in `info`: summed over the turns of an
    # episode, and averaged over the G episodes. None if responses are not episodes.
    info: dict[str, float] | None = None
    # For a control policy: the observation before each action, (G, R, …), and the continuous
    # actions before tanh, (G, R, A) float32. Discrete actions are in response_ids. Both are None
    # for text.
    observations: Tensor | None = None
    actions: Tensor | None = None
    uses: int = 0  # number of training batches that have contained the group
    example_index: int | None = None  # see `Request`

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        response_ids: Tensor,
        response_mask: Tensor,
        behaviour_log_probs: Tensor,
        finished: Tensor,
        token_versions: Tensor,
        token_rounds: Tensor,
    ) -> RolloutGroup:
        """Return an unscored group on the CPU, from the tensors that an engine has sampled."""
        import torch

        return cls(
            prompt_index=request.prompt_index,
            prompt_ids=torch.tensor(request.prompt_ids),
            response_ids=response_ids,
            response_mask=response_mask,
            behaviour_log_probs=behaviour_log_probs,
            rewards=torch.full((request.group_size,), torch.nan),
            finished=finished,
            token_versions=token_versions,
            token_rounds=token_rounds,
            example_index=request.example_index,
        )

    @property
    def example(self) -> int:
        """Index of the prompt's example."""
        return self.prompt_index if self.example_index is None else self.example_index

    @property
    def oldest_round(self) -> int:
        """Round of the weights that sampled the group's oldest token."""
        return int(self.token_rounds[self.response_mask].min())

    @property
    def oldest_version(self) -> int:
        """Version of the weights that sampled the group's oldest token."""
        return int(self.token_versions[self.response_mask].min())

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were sampled."""
        return int(self.response_mask.sum())

    @property
    def extents(self) -> Tensor:
        """(G,) int64: number of tokens of each response up to the last sampled one."""
        return extents(self.response_mask)

    @property
    def format_mean(self) -> float | None:
        """Mean format reward of a scored group. None if any of its rewards has no format part."""
        mean = _mean(self.format_rewards)
        return None if math.isnan(mean) else mean

    @property
    def answer_mean(self) -> float:
        """Mean answer reward of a scored group."""
        return _mean(self.answer_rewards)

    def responses(self) -> list[list[int]]:
        """Return the tokens of each response up to the last sampled one, holes included."""
        lengths = self.extents.tolist()
        return [ids[:n] for ids, n in zip(self.response_ids.tolist(), lengths, strict=True)]

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ, so the group teaches which responses are better."""
        return bool((self.rewards != self.rewards[0]).any())

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups are sent between actors as numpy arrays. Pickling their tensors one by one would
        # take a tenth of a round's time.
        from torch import Tensor

        values = (getattr(self, item.name) for item in fields(self))
        return _group_from_arrays, tuple(
            value.numpy() if isinstance(value, Tensor) else value for value in values
        )


def _mean(rewards: Tensor | None) -> float:
    assert rewards is not None, "the group has not been scored yet"
    return sum(rewards.tolist()) / len(rewards)


def _group_from_arrays(*values: Any) -> RolloutGroup:
    import torch

    names = (item.name for item in fields(RolloutGroup))
    # Copy the arrays, because Ray maps them read-only.
    arguments: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in zip(names, values, strict=True)
    }
    return RolloutGroup(**arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Rows for one gradient step. Every field is aligned with `target_ids`."""

    input_ids: Tensor  # (B, S) int64
    target_ids: Tensor  # (B, S) int64, the input shifted left once
    response_mask: Tensor  # (B, S) bool
    behaviour_log_probs: Tensor  # (B, S) float32, 0 off the mask
    advantages: Tensor  # (B, S) float32, 0 off the mask
    observations: Tensor | None = None  # (B, S, …), observation before the action; None for text
    actions: Tensor | None = None  # (B, S, A), continuous actions, used instead of `target_ids`

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return self.input_ids.shape[0]

    def select(self, rows: slice | Tensor) -> TrainBatch:
        """Return the rows selected by `rows`, without padding beyond the longest of them."""
        mask = self.response_mask[rows]
        used = mask.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return TrainBatch(
            input_ids=self.input_ids[rows, :length],
            target_ids=self.target_ids[rows, :length],
            response_mask=mask[:, :length],
            behaviour_log_probs=self.behaviour_log_probs[rows, :length],
            advantages=self.advantages[rows, :length],
            **{name: values[rows, :length] for name, values in self._of_control()},
        )

    def to(self, device: torch.device) -> TrainBatch:
        """Return the batch on `device`."""
        return TrainBatch(
            input_ids=self.input_ids.to(device),
            target_ids=self.target_ids.to(device),
            response_mask=self.response_mask.to(device),
            behaviour_log_probs=self.behaviour_log_probs.to(device),
            advantages=self.advantages.to(device),
            **{name: values.to(device) for name, values in self._of_control()},
        )

    def _of_control(self) -> list[tuple[str, Tensor]]:
        """For each field that only batches of a control policy have, return (name, tensor)."""
        named = (("observations", self.observations), ("actions", self.actions))
        return [(name, values) for name, values in named if values is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """The learner's tensors, from which a snapshot is taken. The next gradient step changes them.

    This step must not begin before the snapshot is complete. No checksum would detect that the step
    began too early.
    """

    version: int
    round: int
    tensors: dict[str, Tensor]  # unique named parameters, in the type in which they are sent


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """A snapshot of the weights, together with its version, round and checksum."""

    version: int
    round: int
    checksum: str
    tensors: dict[str, Tensor]  # unique named parameters; a tied head appears once


def extents(mask: Tensor) -> Tensor:
    """Return the length of each row of a mask up to its last True, holes included.

    Args:
        mask: (G, R) bool.

    Returns:
        (G,) int64; 0 for a row without True.
    """
    import torch

    position = torch.arange(mask.shape[1] + 1, device=mask.device)
    padded = torch.cat((mask.new_ones(len(mask), 1), mask), dim=1)  # a row without True gets 0
    return (padded * position).amax(dim=1)


def collate(
    groups: Sequence[RolloutGroup], advantages: Sequence[Tensor], pad_id: int
) -> TrainBatch:
    """Return the responses of the groups as right-padded rows, with the tokens that follow.

    A row is a prompt followed by its response up to the last sampled token. Position s predicts
    token s + 1: `input_ids[b, s]` is followed by `target_ids[b, s]`.

    Args:
        groups: the groups, each with G responses.
        advantages: one tensor for each group, with an advantage for each response, (G,), or for
            each token, (G, R).
        pad_id: the token that pads the rows.
    """
    import torch

    places = _places(groups)
    shape = _shape(places)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    target_ids = torch.full(shape, pad_id, dtype=torch.int64)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    behaviour_log_probs = torch.zeros(shape, dtype=torch.float32)
    row_advantages = torch.zeros(shape, dtype=torch.float32)
    for b, place in enumerate(places):
        group, g, here, length = groups[place.group], place.response, place.here, place.length
        ids = torch.cat((group.prompt_ids, group.response_ids[g, :length]))
        input_ids[b, : len(ids) - 1] = ids[:-1]
        target_ids[b, : len(ids) - 1] = ids[1:]
        mask = group.response_mask[g, :length]
        response_mask[b, here] = mask
        behaviour_log_probs[b, here] = group.behaviour_log_probs[g, :length].where(mask, 0.0)
        advantage = advantages[place.group][g]  # one value for the response, or (R,) for its tokens
        if advantage.ndim:
            advantage = advantage[:length]
        row_advantages[b, here] = advantage.to(torch.float32) * mask
    return TrainBatch(
        input_ids=input_ids,
        target_ids=target_ids,
        response_mask=response_mask,
        behaviour_log_probs=behaviour_log_probs,
        advantages=row_advantages,
        observations=_as_known_rows(groups, [group.observations for group in groups]),
        actions=_as_known_rows(groups, [group.actions for group in groups]),
    )


def stack_rows(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Return the rows of all batches as one batch, padded with 0 to the longest row."""
    import torch

    width = max(batch.input_ids.shape[1] for batch in batches)

    def padded(values: Tensor) -> Tensor:
        missing = values.new_zeros(len(values), width - values.shape[1], *values.shape[2:])
        return torch.cat((values, missing), dim=1)

    names = [item.name for item in fields(TrainBatch) if getattr(batches[0], item.name) is not None]
    stacked: dict[str, Tensor] = {
        name: torch.cat([padded(getattr(batch, name)) for batch in batches]) for name in names
    }
    return TrainBatch(**stacked)


def _as_known_rows(
    groups: Sequence[RolloutGroup], values: Sequence[Tensor | None]
) -> Tensor | None:
    """Return the values as `as_rows` does, or None if no group has values."""
    known = [value for value in values if value is not None]
    return as_rows(groups, known) if known else None


def as_rows(groups: Sequence[RolloutGroup], values: Sequence[Tensor]) -> Tensor:
    """Return values of response tokens as rows, at the positions where `collate` puts the tokens.

    Args:
        groups: the groups, each with G responses.
        values: one tensor for each group, (G, R, …).

    Returns:
        (B, S, …), 0 at all other positions.
    """
    import torch

    places = _places(groups)
    rows = torch.zeros((*_shape(places), *values[0].shape[2:]), dtype=values[0].dtype)
    for b, place in enumerate(places):
        rows[b, place.here] = values[place.group][place.response, : place.length]
    return rows


def by_group(groups: Sequence[RolloutGroup], rows: Tensor) -> list[Tensor]:
    """Invert `as_rows`: return `rows`, (B, S), as a (G, R) tensor for each group."""
    import torch

    values = [torch.zeros(group.response_ids.shape, dtype=rows.dtype) for group in groups]
    for b, place in enumerate(_places(groups)):
        values[place.group][place.response, : place.length] = rows[b, place.here]
    return values


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a response in a batch: its group, its index in the group, and its positions.

    The positions `here` are those that predict the tokens of the response.
    """

    group: int
    response: int
    here: slice

    @property
    def length(self) -> int:
        return self.here.stop - self.here.start


def _places(groups: Sequence[RolloutGroup]) -> list[_Place]:
    """Return the place of each row of a batch, in the order of the groups and their responses."""
    places = []
    for i, group in enumerate(groups):
        start = len(group.prompt_ids) - 1  # this position predicts the first response token
        for g, length in enumerate(group.extents.tolist()):
            places.append(_Place(i, g, slice(start, start + length)))
    return places


def _shape(places: Sequence[_Place]) -> tuple[int, int]:
    return len(places), max(place.here.stop for place in places)
