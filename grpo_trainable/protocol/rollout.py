"""The containers that carry everything, and the one place that pads and shifts.

Shapes: G responses per prompt, B rows, P prompt tokens, R response tokens (padded), S the longest
prompt + response of a batch, minus 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

# Torch is imported where tensors are made: the command makes requests, and no tensors.
if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What a response is fed that has thought for too long.

    A response that has neither ended after `after_tokens` tokens, nor has one of `answer_ids` or of
    `answer_strings` among them, reads `ids` next, which it has not sampled: a hole in its mask.
    """

    after_tokens: int
    ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    answer_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """How a response is sampled and where it ends.

    Temperature 1 is the model's own law. Temperature 0 takes the most likely token; log-probs are
    then those of temperature 1.

    It ends after the first token that is one of `end_ids` or completes one of `stop_strings` in
    its text, and is finished then; otherwise it is cut off after `max_new_tokens`. It cannot end
    before token number `min_new_tokens`: end ids are impossible among the tokens before it, and a
    string that one of them completes does not count, then or later.
    """

    min_new_tokens: int
    max_new_tokens: int
    temperature: float
    end_ids: tuple[int, ...]  # the tokenizer's end ids are among them
    stop_strings: tuple[str, ...] = ()  # they stay in the text of the response
    interruption: Interruption | None = None  # its tokens are among `max_new_tokens`


class StateOf(NamedTuple):
    """A state within a response, which completions are sampled from to see what it is worth."""

    response: int  # index in its group; 0 where it is the prompt itself
    tokens: int  # its tokens, the last of the prompt_ids of its request


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to sample `group_size` responses for: asked for and counted as one.

    (stream, prompt_index) names the prompt and, with the seed, every random draw of its responses:
    asked for again, it gives the same tokens under the same weights. With a `state` that is part of
    the key, and `limits` are those of the tokens that are still to come.
    """

    stream: str  # "train", "eval" or, with a state, "vine"
    prompt_index: int
    prompt_ids: tuple[int, ...]
    group_size: int
    limits: SamplingLimits
    # The stream's example that the prompt is; None: the one at `prompt_index`.
    example_index: int | None = None
    state: StateOf | None = None

    @property
    def example(self) -> int:
        """The index of the example that the prompt is."""
        return self.prompt_index if self.example_index is None else self.example_index

    @property
    def answered(self) -> tuple[int, ...]:
        """The tokens of the response that the prompt ends with; none without a state."""
        count = 0 if self.state is None else self.state.tokens
        return self.prompt_ids[len(self.prompt_ids) - count :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """G responses to one prompt. Every token knows the weights that sampled it.

    `rewards` is NaN from the engine until the scorer has filled it in, and never changes again.
    """

    prompt_index: int
    prompt_ids: Tensor  # (P,) int64
    response_ids: Tensor  # (G, R) int64; in a hole what was fed, pad behind the last sampled token
    response_mask: Tensor  # (G, R) bool, the sampled tokens, what ended it included. Its holes are
    #                        tokens that the policy read within its response and did not sample
    behaviour_log_probs: Tensor  # (G, R) float32, nats, as sampled; 0 off the mask
    rewards: Tensor  # (G,) float32
    finished: Tensor  # (G,) bool, ended by an end id, a stop string or, an episode, by its
    #                   environment rather than by length
    token_versions: Tensor  # (G, R) int32, gradient steps of the weights that sampled it
    token_rounds: Tensor  # (G, R) int32, rounds of those weights
    reference_log_probs: Tensor | None = None  # (G, R) float32, nats, 0 off the mask; None where
    #                                            the learner makes the pass of the reference
    # (G, K) float32, the parts that `task.reward_weights` names, in its order; None without it.
    reward_parts: Tensor | None = None
    # (G,) float64, the parts of the reward that every task tells, as it tells them; None until the
    # scorer has filled them in.
    format_rewards: Tensor | None = None
    answer_rewards: Tensor | None = None
    # (G, R) float32, what the state before a token is worth, from completions that were sampled
    # there; NaN where none were; None where nobody asks for it.
    state_values: Tensor | None = None
    # (G, R) float32, of an episode: what an action earned, at its last token; NaN at all others;
    # None where responses are not played.
    turn_rewards: Tensor | None = None
    # What a control policy saw before each action, (G, R, …), and its actions of numbers before
    # they are squeezed, (G, R, A) float32; discrete ones are the response_ids. None for text.
    observations: Tensor | None = None
    actions: Tensor | None = None
    uses: int = 0  # gradient-step batches it has been in
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
        """Return what an engine has sampled for a request, unscored. The tensors are on the CPU."""
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
        """The index of the example that the prompt is."""
        return self.prompt_index if self.example_index is None else self.example_index

    @property
    def oldest_round(self) -> int:
        """The round of the weights that sampled the group's oldest token."""
        return int(self.token_rounds[self.response_mask].min())

    @property
    def oldest_version(self) -> int:
        """The version of the weights that sampled the group's oldest token."""
        return int(self.token_versions[self.response_mask].min())

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return int(self.response_mask.sum())

    @property
    def extents(self) -> Tensor:
        """(G,) int64, how far each response reaches: `extents` of its mask."""
        return extents(self.response_mask)

    @property
    def format_mean(self) -> float:
        """The mean format reward of a scored group."""
        return _mean(self.format_rewards)

    @property
    def answer_mean(self) -> float:
        """The mean answer reward of a scored group."""
        return _mean(self.answer_rewards)

    def responses(self) -> list[list[int]]:
        """The tokens of each response up to the last that was sampled, those in holes included."""
        lengths = self.extents.tolist()
        return [ids[:n] for ids, n in zip(self.response_ids.tolist(), lengths, strict=True)]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ, so that the responses can be told apart."""
        return bool((self.rewards != self.rewards[0]).any())

    def __reduce__(self) -> tuple[Any, ...]:
        # A group travels between actors as numpy arrays: pickling its tensors one by one took a
        # tenth of a round.
        from torch import Tensor

        values = (getattr(self, item.name) for item in fields(self))
        return _group_from_arrays, tuple(
            value.numpy() if isinstance(value, Tensor) else value for value in values
        )


def _mean(rewards: Tensor | None) -> float:
    assert rewards is not None, "the group is not scored yet"
    return sum(rewards.tolist()) / len(rewards)


def _group_from_arrays(*values: Any) -> RolloutGroup:
    import torch

    names = (item.name for item in fields(RolloutGroup))
    # Copied: what Ray hands out is mapped read-only.
    arguments: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in zip(names, values, strict=True)
    }
    return RolloutGroup(**arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Rows for one gradient step. Every field is aligned with `target_ids`."""

    input_ids: Tensor  # (B, S) int64
    target_ids: Tensor  # (B, S) int64, the input shifted left once, here
    response_mask: Tensor  # (B, S) bool
    behaviour_log_probs: Tensor  # (B, S) float32, 0 off the mask
    advantages: Tensor  # (B, S) float32, 0 off the mask
    observations: Tensor | None = None  # (B, S, …), what is seen before `target_ids`; None for text
    actions: Tensor | None = None  # (B, S, A), in place of `target_ids` where they are numbers

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    def select(self, rows: slice | Tensor) -> TrainBatch:
        """Some of the rows, cut to their own longest row: trailing padding costs nothing."""
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
        return TrainBatch(
            input_ids=self.input_ids.to(device),
            target_ids=self.target_ids.to(device),
            response_mask=self.response_mask.to(device),
            behaviour_log_probs=self.behaviour_log_probs.to(device),
            advantages=self.advantages.to(device),
            **{name: values.to(device) for name, values in self._of_control()},
        )

    def _of_control(self) -> list[tuple[str, Tensor]]:
        """What only a control policy's rows have, by name."""
        named = (("observations", self.observations), ("actions", self.actions))
        return [(name, values) for name, values in named if values is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """What a snapshot is taken of: tensors that the next gradient step changes. It may not begin
    before the snapshot is whole, which no checksum tells."""

    version: int
    round: int
    tensors: dict[str, Tensor]  # unique named parameters, in the type in which they travel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """A snapshot. Version, round and checksum are inside: they cannot come apart from it."""

    version: int
    round: int
    checksum: str
    tensors: dict[str, Tensor]  # unique named parameters: a tied head once


def extents(mask: Tensor) -> Tensor:
    """(G,) int64: the tokens of each row of a mask (G, R) up to its last one, holes included."""
    import torch

    position = torch.arange(mask.shape[1] + 1, device=mask.device)
    padded = torch.cat((mask.new_ones(len(mask), 1), mask), dim=1)  # rows may be without any token
    return (padded * position).amax(dim=1)


def collate(
    groups: Sequence[RolloutGroup], advantages: Sequence[Tensor], pad_id: int
) -> TrainBatch:
    """The groups' responses as rows, right-padded, shifted once.

    `advantages`: one tensor a group, (G,) for its responses or (G, R) for their tokens.
    A row is its prompt followed by its response up to the last token of the mask. Position s
    predicts token s + 1: `input_ids[b, s]` is followed by `target_ids[b, s]`.
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
        advantage = advantages[place.group][g]  # the response's, or one for each of its tokens
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


def _as_known_rows(
    groups: Sequence[RolloutGroup], values: Sequence[Tensor | None]
) -> Tensor | None:
    """As `as_rows`; None where the groups have none."""
    known = [value for value in values if value is not None]
    return as_rows(groups, known) if known else None


def as_rows(groups: Sequence[RolloutGroup], values: Sequence[Tensor]) -> Tensor:
    """`values`, (G, R, …) for each group, where `collate` puts the tokens: (B, S, …), 0
    elsewhere."""
    import torch

    places = _places(groups)
    rows = torch.zeros((*_shape(places), *values[0].shape[2:]), dtype=values[0].dtype)
    for b, place in enumerate(places):
        rows[b, place.here] = values[place.group][place.response, : place.length]
    return rows


def by_group(groups: Sequence[RolloutGroup], rows: Tensor) -> list[Tensor]:
    """The inverse of `as_rows`: `rows` (B, S) as a (G, R) tensor for each group."""
    import torch

    values = [torch.zeros(group.response_ids.shape, dtype=rows.dtype) for group in groups]
    for b, place in enumerate(_places(groups)):
        values[place.group][place.response, : place.length] = rows[b, place.here]
    return values


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a response stands in a batch: `here` are the positions that predict its tokens."""

    group: int
    response: int
    here: slice

    @property
    def length(self) -> int:
        return self.here.stop - self.here.start


def _places(groups: Sequence[RolloutGroup]) -> list[_Place]:
    """One for each row of a batch, in the order of the groups and of their responses."""
    places = []
    for i, group in enumerate(groups):
        start = len(group.prompt_ids) - 1  # predicts the first response token
        for g, length in enumerate(group.extents.tolist()):
            places.append(_Place(i, g, slice(start, start + length)))
    return places


def _shape(places: Sequence[_Place]) -> tuple[int, int]:
    return len(places), max(place.here.stop for place in places)
