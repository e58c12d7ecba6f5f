"""Which prompts belong to which rollout batch, and how far each batch has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from grpo_trainable.config import GRPOConfig


class BatchId(NamedTuple):
    """Names a rollout batch by the round that trains on it first."""

    round: int
    place: int  # among the rollout batches of that round


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompts of one rollout batch that one call of a generator samples."""

    stream: ClassVar[str] = "train"
    stage: ClassVar[str] = "rollout"

    batch: BatchId
    prompt_indices: tuple[int, ...]  # ascending


@dataclass(kw_only=True)
class _Batch:
    """One rollout batch. Chunks are the prompt indices of a `Chunk`."""

    to_ask: list[int]  # sizes of the chunks of new prompts that it still needs
    in_flight: list[tuple[int, ...]] = field(default_factory=list)
    lost: list[tuple[int, ...]] = field(default_factory=list)  # to be asked for once more
    accepted: list[int] = field(default_factory=list)  # prompt indices, ascending

    @property
    def complete(self) -> bool:
        return not (self.to_ask or self.in_flight or self.lost)


class Ledger:
    """Gives each rollout batch its prompts, and remembers which of them it accepted.

    Chunks are handed out batch by batch, and prompts in the order of their stream, so a run asks
    for the same chunks in the same order whoever samples them. A prompt belongs to the batch that
    it was asked for: nothing else follows from its index. A batch is complete when it needs no
    further chunk and every chunk of it has been settled.
    """

    def __init__(self, config: GRPOConfig, *, first_round: int = 0, next_prompt: int = 0) -> None:
        """`first_round`: the round of the first batch. `next_prompt`: the index of its first
        prompt."""
        self._sizes = [chunk.stop - chunk.start for chunk in config.chunks]
        self._batches_per_round = config.batches_per_round
        self._batches: dict[BatchId, _Batch] = {}
        self._next_batch = BatchId(first_round, 0)
        self._next_prompt = next_prompt

    # ---- Asking for prompts ------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        """The round that trains on the next chunk first."""
        return self._in_turn().round

    @property
    def next_prompt(self) -> int:
        """The index of the first prompt that was never asked for: how many were."""
        return self._next_prompt

    def take(self) -> Chunk:
        """The next chunk, which is in flight from now on. Lost ones come first in their batch."""
        batch_id = self._in_turn()
        if batch_id == self._next_batch:
            self._begin_next_batch()
        batch = self._batches[batch_id]
        indices = batch.lost.pop(0) if batch.lost else self._new_prompts(batch.to_ask.pop(0))
        batch.in_flight.append(indices)
        return Chunk(batch_id, indices)

    def _in_turn(self) -> BatchId:
        """The first batch that has a chunk to ask for."""
        asking = (i for i, batch in self._batches.items() if batch.lost or batch.to_ask)
        return min(asking, default=self._next_batch)

    def _begin_next_batch(self) -> None:
        round_, place = self._next_batch
        self._batches[self._next_batch] = _Batch(to_ask=list(self._sizes))
        last = place + 1 == self._batches_per_round
        self._next_batch = BatchId(round_ + 1, 0) if last else BatchId(round_, place + 1)

    def _new_prompts(self, count: int) -> tuple[int, ...]:
        first = self._next_prompt
        self._next_prompt += count
        return tuple(range(first, self._next_prompt))

    # ---- Answers ------------------------------------------------------------------------------

    def settle(self, chunk: Chunk, accepted: Iterable[int]) -> None:
        """A chunk came back. Its batch takes the prompts `accepted`; the others are dropped."""
        batch = self._batches[chunk.batch]
        batch.in_flight.remove(chunk.prompt_indices)
        batch.accepted = sorted([*batch.accepted, *accepted])

    def put_back(self, chunk: Chunk) -> None:
        """A chunk was lost with its generator, and is asked for once more."""
        batch = self._batches[chunk.batch]
        batch.in_flight.remove(chunk.prompt_indices)
        batch.lost = sorted([*batch.lost, chunk.prompt_indices])

    def complete(self, round_: int) -> bool:
        """Whether every batch of a round is complete."""
        batches = [self._batches.get(batch_id) for batch_id in self.batches_of(round_)]
        return all(batch is not None and batch.complete for batch in batches)

    @property
    def in_flight(self) -> int:
        """Prompts asked for of which nothing has come back yet, lost ones included."""
        return sum(
            len(indices)
            for batch in self._batches.values()
            for indices in (*batch.in_flight, *batch.lost)
        )

    # ---- Batches -----------------------------------------------------------------------------

    def batches_of(self, round_: int) -> list[BatchId]:
        """The rollout batches that a round trains on first."""
        return [BatchId(round_, place) for place in range(self._batches_per_round)]

    def accepted(self, batch_id: BatchId) -> list[int]:
        """The prompt indices of a batch, ascending."""
        return list(self._batches[batch_id].accepted)

    def accepted_before(self, batch_id: BatchId) -> list[int]:
        """The prompt indices of the batches kept that had this place in earlier rounds."""
        return [
            index
            for (round_, place), batch in self._batches.items()
            if round_ < batch_id.round and place == batch_id.place
            for index in batch.accepted
        ]

    def close(self, before_round: int) -> list[int]:
        """Forgets the batches of rounds before this one. Returns their prompt indices."""
        closed = [batch_id for batch_id in self._batches if batch_id.round < before_round]
        return [index for batch_id in closed for index in self._batches.pop(batch_id).accepted]

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "next_prompt": self._next_prompt,
            "next_batch": list(self._next_batch),
            "batches": [
                {
                    "id": list(batch_id),
                    "to_ask": batch.to_ask,
                    "in_flight": sorted([*batch.in_flight, *batch.lost]),
                    "accepted": batch.accepted,
                }
                for batch_id, batch in self._batches.items()
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, of equal settings. What was in flight then counts as lost."""
        self._next_prompt = state["next_prompt"]
        self._next_batch = BatchId(*state["next_batch"])
        self._batches = {
            BatchId(*row["id"]): _Batch(
                to_ask=list(row["to_ask"]),
                lost=[tuple(indices) for indices in row["in_flight"]],
                accepted=list(row["accepted"]),
            )
            for row in state["batches"]
        }


def ledger_of_format_2(state: Mapping[str, Any], config: GRPOConfig) -> dict[str, Any]:
    """The ledger's state from a pipeline's state in checkpoints of format 2.

    There chunks were numbered: chunk u was part u % n of rollout batch u // n, where each batch
    had n chunks, and prompts followed the numbers.
    """
    parts = config.chunks
    in_flight, begun = set(state["in_flight_units"]), state["next_unit"]

    def batch_id(batch: int) -> BatchId:
        rounds, place = divmod(batch, config.batches_per_round)
        return BatchId(state["first_round"] + rounds, place)

    def row(batch: int) -> dict[str, Any]:
        first = state["first_cursor"] + batch * config.rollout.prompts
        prompts = range(first, first + config.rollout.prompts)
        chunks = {batch * len(parts) + i: list(prompts[part]) for i, part in enumerate(parts)}
        return {
            "id": batch_id(batch),
            "to_ask": [len(chunk) for u, chunk in chunks.items() if u >= begun],
            "in_flight": [chunk for u, chunk in chunks.items() if u in in_flight],
            "accepted": [
                index
                for u, chunk in chunks.items()
                if u < begun and u not in in_flight
                for index in chunk
            ],
        }

    kept = state["learner_round"] - state["first_round"] - (config.buffer_capacity - 1)
    oldest, next_batch = max(0, kept) * config.batches_per_round, -(-begun // len(parts))
    return {
        "next_prompt": state["next_cursor"],
        "next_batch": batch_id(next_batch),
        "batches": [row(batch) for batch in range(oldest, next_batch)],
    }
