"""The ledger's state as earlier formats of checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline.ledger import BatchId


def ledger_state(state: Mapping[str, Any], config: GRPOConfig) -> Mapping[str, Any]:
    """The ledger's state in a pipeline's state of any format that is read."""
    if "ledger" not in state:
        return of_format_3(of_format_2(state, config), config)
    ledger = state["ledger"]
    return ledger if "filling" in ledger else of_format_3(ledger, config)


def of_format_3(ledger: Mapping[str, Any], config: GRPOConfig) -> dict[str, Any]:
    """The present state from one of format 3, where each batch had a record from its beginning on,
    and `rollout.prompts` prompts, next to those of the batch before."""
    rows = ledger["batches"]
    first = ledger["next_prompt"] + sum(sum(row["to_ask"]) for row in rows)
    first -= len(rows) * config.rollout.prompts

    def drawn(place: int) -> list[int]:
        start = first + place * config.rollout.prompts
        return [start, start + config.rollout.prompts]

    filled: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        if row["to_ask"] or row["in_flight"]:
            break
        filled.append(
            {"id": list(row["id"]), "drawn": drawn(place), "accepted": list(row["accepted"])}
        )
    others = rows[len(filled) :]
    in_flight = sorted(list(indices) for row in others for indices in row["in_flight"])
    accepted = sorted(index for row in others for index in row["accepted"])
    start, next_prompt = drawn(len(filled))[0], ledger["next_prompt"]
    known = {*accepted, *(index for indices in in_flight for index in indices)}
    # A round is begun as a whole now.
    round_, place = ledger["next_batch"]
    unbegun = schedule.batches_per_round(config) - place if place else 0
    sizes = [chunk.stop - chunk.start for chunk in schedule.chunks(config)]
    return {
        "next_prompt": next_prompt,
        "next_round": round_ + 1 if place else round_,
        "filling": list(others[0]["id"] if others else ledger["next_batch"]),
        "start": start,
        "to_ask": [size for row in others for size in row["to_ask"]] + sizes * unbegun,
        "in_flight": in_flight,
        "accepted": accepted,
        "left_out": [index for index in range(start, next_prompt) if index not in known],
        "filled": filled,
    }


def of_format_2(state: Mapping[str, Any], config: GRPOConfig) -> dict[str, Any]:
    """The ledger of format 3 from a pipeline's state in checkpoints of format 2.

    There chunks were numbered: chunk u was part u % n of rollout batch u // n, where each batch
    had n chunks, and prompts followed the numbers.
    """
    parts = schedule.chunks(config)
    in_flight, begun = set(state["in_flight_units"]), state["next_unit"]

    def batch_id(batch: int) -> BatchId:
        rounds, place = divmod(batch, schedule.batches_per_round(config))
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
    oldest, next_batch = max(0, kept) * schedule.batches_per_round(config), -(-begun // len(parts))
    return {
        "next_prompt": state["next_cursor"],
        "next_batch": batch_id(next_batch),
        "batches": [row(batch) for batch in range(oldest, next_batch)],
    }
