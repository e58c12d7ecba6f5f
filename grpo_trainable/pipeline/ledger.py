"""The ledger, which assigns prompts to rollout batches and records how far each batch is filled."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from grpo_trainable.config import GRPOConfig, schedule


class BatchId(NamedTuple):
    """Identifier of a rollout batch.

    It consists of the first round that trains on the batch, and the batch's place in that round.
    """

    round: int
    place: int  # index among the rollout batches of that round


@dataclass(frozen=True, slots=True)
class Chunk:
    """Training prompts whose responses a generator samples in one call."""

    stream: ClassVar[str] = "train"
    stage: ClassVar[str] = "rollout"

    prompt_indices: tuple[int, ...]  # consecutive
    examples: tuple[int, ...] | None = None  # None: equal to prompt_indices


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The rule that decides how many prompts of the stream a rollout batch takes.

    A batch first draws `size` prompts, some of which may be left out of training. The batch then
    draws one new prompt to replace each prompt that was left out. New prompts that are left out are
    replaced in the same way. A batch draws replacements at most `redraws` times, and takes at most
    `most` prompts in total. With `redraws` = 0, it draws exactly `size` prompts and does not
    replace those that are left out.
    """

    size: int
    most: int
    redraws: int

    def end(self, start: int, left_out: Sequence[int], given_up: Sequence[int] = ()) -> int:
        """Return the index after the last prompt of a batch that begins at prompt `start`.

        `left_out` lists the prompts that are left out, in ascending order. `given_up` lists the
        prompts that the batch passes over, as if the stream did not have them. All other prompts
        count as accepted.

        Let T(0) = size, and let R(T) be the number of left-out prompts among the batch's first T
        prompts. The batch takes T(redraws) prompts, with T(n + 1) = min(size + R(T(n)), most).
        Leaving out one more prompt, or starting later, never makes the batch end earlier. So a
        prompt may count as accepted until its result is known.

        Example: size 4, most 8, redraws 2, and prompts 1, 3 and 5 are left out. A batch begins at
        prompt 0. Of its first T(0) = 4 prompts, 2 are left out, so T(1) = 4 + 2 = 6. Of its first 6
        prompts, 3 are left out, so T(2) = 4 + 3 = 7. The batch ends before prompt 7, and its
        accepted prompts are 0, 2, 4 and 6.
        """
        first, end = bisect_left(left_out, start), _after(start, self.size, given_up)
        for _ in range(self.redraws):
            missing = bisect_left(left_out, end) - first
            further = _after(start, min(self.size + missing, self.most), given_up)
            if further == end:
                break
            end = further
        return end


@dataclass(frozen=True, slots=True)
class FilledBatch:
    """A rollout batch that takes no further prompts."""

    drawn: range  # prompt indices
    accepted: list[int]  # indices of the accepted prompts, ascending
    given_up: list[int] = field(default_factory=list)  # prompts passed over, ascending

    @property
    def came_back(self) -> list[int]:
        """Indices of the prompts whose responses were completed, accepted or not."""
        return [index for index in self.drawn if index not in self.given_up]


class Ledger:
    """Hands out prompts in chunks, and assigns the accepted ones to rollout batches.

    Prompts are handed out round by round, in the order of their stream. Batches take prompts in the
    same order, and each batch begins where the previous one ends. So a prompt's batch depends on
    which earlier prompts were accepted (`BatchRule`), never on timing. The ledger waits for slow
    prompts and never skips them, except for those that the pipeline gives up (`give_up`).

    A prompt counts as accepted until it is known to be left out. A prompt that is left out is
    replaced by the next new prompt of the stream. If sampling and training take turns, replacements
    are drawn once all other prompts have come back, so the chunks do not depend on timing.
    Otherwise, replacements are drawn as soon as there are enough of them to fill a chunk.

    Example: batches of 4 prompts, chunks of 2, `redraws` 2, lag 0. The right-hand column shows the
    index at which the batch ends (`_ends`), as known after each call:

        take()                            gives (0, 1)              4
        take()                            gives (2, 3)              4
        settle((0, 1), accepted=[0])      waits for (2, 3)          5
        settle((2, 3), accepted=[2])      two prompts are missing   6
        take()                            gives (4, 5)              6
        settle((4, 5), accepted=[4])      one prompt is missing     7
        take()                            gives (6,)                7
        settle((6,), accepted=[6])        `_fill`: the batch has the prompts 0, 2, 4 and 6
    """

    def __init__(self, config: GRPOConfig, *, first_round: int = 0, next_prompt: int = 0) -> None:
        """Create a ledger without batches.

        Args:
            config: The trial's settings.
            first_round: The round of the first batch.
            next_prompt: The index of the first prompt of that batch.
        """
        self._config = config
        self._rule = BatchRule(
            config.rollout.prompts, schedule.most_drawn(config), schedule.redraws(config)
        )
        sizes = [chunk.stop - chunk.start for chunk in schedule.chunks(config)]
        self._sizes_of_a_round = sizes * schedule.batches_per_round(config)
        self._filled: dict[BatchId, FilledBatch] = {}
        self._filling = BatchId(first_round, 0)  # the first batch that is not filled
        self._start = next_prompt  # the first prompt of the batch that is being filled
        self._next_round = first_round  # the first round that has not been planned yet
        self._next_prompt = next_prompt
        self._to_ask: list[int] = []  # sizes of the next chunks of new prompts
        # These five lists are in ascending order. They contain only prompts that are in no filled
        # batch.
        self._in_flight: list[tuple[int, ...]] = []
        self._lost: list[tuple[int, ...]] = []  # chunks to be handed out again
        self._accepted: list[int] = []
        self._left_out: list[int] = []
        self._given_up: list[int] = []

    # ---- Asking for prompts ------------------------------------------------------------------

    @property
    def due_round(self) -> int:
        """The latest round in which the next chunk can be trained on for the first time.

        The chunk may be trained on earlier. For example, with batches of 4 prompts and one batch
        per round, prompt 5 is due in round 1. If prompts 1 and 3 are left out, round 0 takes
        prompts 4 and 5 instead.
        """
        if self._lost:
            return self._round_of(self._lost[0][-1])
        if self._to_ask:
            return self._round_of(self._next_prompt + self._to_ask[0] - 1)
        return self._next_round

    @property
    def next_prompt(self) -> int:
        """Index of the next new prompt, which equals the number of prompts handed out so far."""
        return self._next_prompt

    def take(self) -> Chunk:
        """Return the next chunk, which is in flight from now on. Lost chunks come first."""
        if self._lost:
            indices = self._lost.pop(0)
        else:
            if not self._to_ask:
                self._begin_next_round()
            indices = self._new_prompts(self._to_ask.pop(0))
        insort(self._in_flight, indices)
        return Chunk(indices)

    def _begin_next_round(self) -> None:
        self._to_ask = list(self._sizes_of_a_round)
        self._next_round += 1

    def _new_prompts(self, count: int) -> tuple[int, ...]:
        first = self._next_prompt
        self._next_prompt += count
        return tuple(range(first, self._next_prompt))

    def is_due(self, chunk: Chunk, round_: int) -> bool:
        """Return True if a chunk is due in `round_` or an earlier round (see `due_round`)."""
        return self._round_of(chunk.prompt_indices[0]) <= round_

    def _round_of(self, prompt_index: int) -> int:
        """Return the latest round in which a prompt can be trained on for the first time."""
        return self._after(bisect_right(self._ends(), prompt_index)).round

    # ---- Answers ------------------------------------------------------------------------------

    def settle(self, chunk: Chunk, accepted: Iterable[int]) -> None:
        """Record that a chunk has come back.

        Prompts in `accepted` are trained on; the chunk's other prompts are left out.
        """
        self._in_flight.remove(chunk.prompt_indices)
        taken = set(accepted)
        for index in chunk.prompt_indices:
            insort(self._accepted if index in taken else self._left_out, index)
        self._fill()
        self._plan_redraws()

    def put_back(self, chunk: Chunk) -> None:
        """Record that a chunk was lost with its generator and must be handed out again."""
        self._in_flight.remove(chunk.prompt_indices)
        insort(self._lost, chunk.prompt_indices)

    def give_up(self, chunk: Chunk) -> None:
        """Record that a chunk will not come back. Later prompts take the places of its prompts.

        So giving up a chunk delays no other prompt, and the batches still get all their prompts.
        The next chunk asks for as many new prompts as were given up.
        """
        self._in_flight.remove(chunk.prompt_indices)
        self._to_ask.insert(0, len(chunk.prompt_indices))
        for index in chunk.prompt_indices:
            insort(self._given_up, index)
        self._fill()
        self._plan_redraws()

    @property
    def in_flight(self) -> int:
        """Number of prompts that were handed out and have not come back, including lost ones."""
        return sum(len(indices) for indices in (*self._in_flight, *self._lost))

    # ---- Filling batches -----------------------------------------------------------------------

    def _after(self, count: int) -> BatchId:
        """Return the id of the batch `count` places after the first batch that is not filled."""
        a_round = schedule.batches_per_round(self._config)
        round_, place = self._filling
        return BatchId(*divmod(round_ * a_round + place + count, a_round))

    def _ends(self) -> list[int]:
        """For each batch that has begun but is not filled, return the index after its last prompt.

        These indices may still increase, because prompts that have not come back count as accepted.
        """
        a_round = schedule.batches_per_round(self._config)
        begun = (self._next_round - self._filling.round) * a_round - self._filling.place
        ends, start = [], self._start
        for _ in range(begun):
            start = self._rule.end(start, self._left_out, self._given_up)
            ends.append(start)
        return ends

    def _fill(self) -> None:
        """Fill the next batches whose prompts have all come back."""
        waited_for = [indices[0][0] for indices in (self._in_flight, self._lost) if indices]
        settled = min(waited_for, default=self._next_prompt)  # all earlier prompts have come back
        for end in self._ends():
            if end > settled:
                return
            self._filled[self._filling] = FilledBatch(
                range(self._start, end), _cut(self._accepted, end), _cut(self._given_up, end)
            )
            _cut(self._left_out, end)
            self._start, self._filling = end, self._after(1)

    def _plan_redraws(self) -> None:
        """Plan chunks of new prompts to replace those that were left out."""
        ends = self._ends()
        if not ends:
            return
        missing = ends[-1] - self._next_prompt - sum(self._to_ask)
        if not (self._in_flight or self._lost or self._to_ask):
            self._to_ask = schedule.redraw_sizes(self._config, missing)
        elif not self._config.in_turns:
            largest = schedule.unit_prompts(self._config)
            self._to_ask += [largest] * (missing // largest)

    # ---- Batches -----------------------------------------------------------------------------

    def batches_of(self, round_: int) -> list[BatchId]:
        """Return the ids of the rollout batches that are first trained on in a round."""
        return [BatchId(round_, place) for place in range(schedule.batches_per_round(self._config))]

    def complete(self, round_: int) -> bool:
        """Return True if every batch of a round is filled."""
        return all(batch_id in self._filled for batch_id in self.batches_of(round_))

    def batch(self, batch_id: BatchId) -> FilledBatch:
        """Return a filled batch."""
        return self._filled[batch_id]

    def accepted_before(self, batch_id: BatchId) -> list[int]:
        """Return the accepted prompts of earlier rounds' batches with the same place as `batch_id`.

        Batches that `close` has forgotten are not included.
        """
        return [
            index
            for (round_, place), batch in self._filled.items()
            if round_ < batch_id.round and place == batch_id.place
            for index in batch.accepted
        ]

    def close(self, before_round: int) -> list[int]:
        """Forget the batches of rounds before `before_round`, and return their accepted prompts."""
        closed = [batch_id for batch_id in self._filled if batch_id.round < before_round]
        return [index for batch_id in closed for index in self._filled.pop(batch_id).accepted]

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the ledger as plain data."""
        return {
            "next_prompt": self._next_prompt,
            "next_round": self._next_round,
            "filling": list(self._filling),
            "start": self._start,
            "to_ask": list(self._to_ask),
            "in_flight": sorted([*self._in_flight, *self._lost]),
            "accepted": list(self._accepted),
            "left_out": list(self._left_out),
            "given_up": list(self._given_up),
            "filled": [
                {
                    "id": list(batch_id),
                    "drawn": [batch.drawn.start, batch.drawn.stop],
                    "accepted": list(batch.accepted),
                    "given_up": list(batch.given_up),
                }
                for batch_id, batch in self._filled.items()
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that a ledger with equal settings has returned.

        Chunks that were in flight count as lost.
        """
        self._next_prompt = state["next_prompt"]
        self._next_round = state["next_round"]
        self._filling = BatchId(*state["filling"])
        self._start = state["start"]
        self._to_ask = list(state["to_ask"])
        self._in_flight = []
        self._lost = [tuple(indices) for indices in state["in_flight"]]
        self._accepted = list(state["accepted"])
        self._left_out = list(state["left_out"])
        # Checkpoints of earlier package versions lack the key "given_up".
        self._given_up = list(state.get("given_up", ()))
        self._filled = {
            BatchId(*row["id"]): FilledBatch(
                range(*row["drawn"]), list(row["accepted"]), list(row.get("given_up", ()))
            )
            for row in state["filled"]
        }


def _after(start: int, count: int, given_up: Sequence[int]) -> int:
    """Return the index after the first `count` prompts, from `start` on, that are not given up."""
    end = start + count
    for index in given_up[bisect_left(given_up, start) :]:
        if index >= end:
            break
        end += 1
    return end


def _cut(indices: list[int], end: int) -> list[int]:
    """Remove the indices below `end` from an ascending list, and return the removed indices."""
    count = bisect_left(indices, end)
    taken, indices[:count] = indices[:count], []
    return taken
