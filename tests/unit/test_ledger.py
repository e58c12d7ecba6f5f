"""The ledger: which prompts belong to which rollout batch, whatever happens on the way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.ledger import BatchId, Chunk, Ledger, ledger_of_format_2


def config_of(prompts: int, chunk: int, batches: int = 1, capacity: int = 1) -> GRPOConfig:
    """Rounds of so many rollout batches, in chunks of at most `chunk` prompts."""
    replay = {"buffer_capacity": capacity, "buffer": {"sample_batches": 2}} if capacity > 1 else {}
    return GRPOConfig.from_dict(
        {
            "rollout": {"prompts": prompts, "unit_prompts": chunk},
            "k": batches,
            "k_mode": "fresh_batches",
            **replay,
        }
    )


def take(ledger: Ledger, count: int) -> list[Chunk]:
    return [ledger.take() for _ in range(count)]


def test_prompts_are_asked_for_in_order_batch_by_batch() -> None:
    ledger = Ledger(config_of(prompts=5, chunk=2, batches=2))
    assert ledger.next_round == 0
    chunks = [(*chunk.batch, chunk.prompt_indices) for chunk in take(ledger, 7)]
    assert chunks == [
        (0, 0, (0, 1)),
        (0, 0, (2, 3)),
        (0, 0, (4,)),
        (0, 1, (5, 6)),
        (0, 1, (7, 8)),
        (0, 1, (9,)),
        (1, 0, (10, 11)),
    ]
    assert ledger.next_round == 1
    assert ledger.next_prompt == ledger.in_flight == 12


def test_a_batch_holds_what_was_accepted_in_the_order_of_the_prompts() -> None:
    ledger = Ledger(config_of(prompts=4, chunk=2))
    first, second = take(ledger, 2)
    ledger.settle(second, [3, 2])
    assert not ledger.complete(0)
    ledger.settle(first, [1])  # the reward of prompt 0 failed
    assert ledger.complete(0)
    assert ledger.accepted(BatchId(0, 0)) == [1, 2, 3]
    assert ledger.in_flight == 0


def test_a_round_is_complete_when_each_of_its_batches_is() -> None:
    ledger = Ledger(config_of(prompts=1, chunk=1, batches=2))
    (first,) = take(ledger, 1)
    ledger.settle(first, [0])
    assert not ledger.complete(0)  # the second batch was not asked for
    (second,) = take(ledger, 1)
    assert not ledger.complete(0)
    ledger.settle(second, [])
    assert ledger.complete(0)
    assert not ledger.complete(1)


def test_a_lost_chunk_is_next_in_turn_and_still_in_flight() -> None:
    ledger = Ledger(config_of(prompts=2, chunk=1))
    chunks = take(ledger, 3)
    assert ledger.next_round == 1
    ledger.put_back(chunks[1])
    ledger.put_back(chunks[0])
    assert ledger.next_round == 0
    assert ledger.in_flight == 3
    assert not ledger.complete(0)
    assert take(ledger, 2) == chunks[:2]
    assert ledger.take().prompt_indices == (3,)
    assert ledger.next_prompt == 4


def test_batches_of_one_place_are_replayed_together_until_they_are_closed() -> None:
    ledger = Ledger(config_of(prompts=2, chunk=2, batches=2))
    for chunk in take(ledger, 6):
        ledger.settle(chunk, chunk.prompt_indices)
    # Two prompts a batch, two batches a round.
    assert ledger.accepted_before(BatchId(2, 1)) == [2, 3, 6, 7]
    assert ledger.accepted(BatchId(2, 1)) == [10, 11]
    assert ledger.close(before_round=1) == [0, 1, 2, 3]
    assert ledger.accepted_before(BatchId(2, 1)) == [6, 7]


def test_a_batch_may_need_more_prompts_than_it_was_begun_with() -> None:
    """As when groups that teach nothing are replaced by others: nothing is computed from a
    prompt's index, so a batch may ask again after later ones have begun."""
    ledger = Ledger(config_of(prompts=3, chunk=3))
    first, second = take(ledger, 2)
    ledger.settle(first, [0, 2])
    state = ledger.state()
    state["batches"][0]["to_ask"] = [1]
    ledger.load_state(state)
    assert not ledger.complete(0)
    assert ledger.next_round == 0
    more = ledger.take()
    assert more == Chunk(first.batch, (6,))
    ledger.settle(more, [6])
    assert ledger.complete(0)
    assert ledger.accepted(first.batch) == [0, 2, 6]
    assert ledger.take() == second  # lost with the state's pipeline
    assert ledger.take() == Chunk(BatchId(2, 0), (7, 8, 9))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.data())
def test_every_prompt_is_settled_once_whatever_is_lost_and_restored(
    prompts: int, chunk: int, batches: int, data: st.DataObject
) -> None:
    config = config_of(prompts, min(chunk, prompts), batches)
    ledger = Ledger(config)
    in_flight: list[Chunk] = []
    settled: dict[int, Chunk] = {}
    rejected: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        step = data.draw(st.sampled_from(["take", "settle", "lose", "restore"]))
        if step == "restore":
            state = json.loads(json.dumps(ledger.state()))
            ledger = Ledger(config)
            ledger.load_state(state)
            in_flight = []
        elif step == "take" or not in_flight:
            in_flight.append(ledger.take())
        else:
            one = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            if step == "lose":
                ledger.put_back(one)
                continue
            accepted = [i for i in one.prompt_indices if data.draw(st.booleans())]
            rejected |= set(one.prompt_indices) - set(accepted)
            ledger.settle(one, accepted)
            for index in one.prompt_indices:
                assert settled.setdefault(index, one) is one
        assert ledger.in_flight + len(settled) == ledger.next_prompt
    while len(settled) < ledger.next_prompt:
        in_flight = in_flight or [ledger.take()]
        one = in_flight.pop()
        ledger.settle(one, one.prompt_indices)
        settled |= dict.fromkeys(one.prompt_indices, one)
    for index, one in settled.items():
        batch = index // prompts
        assert one.batch == (batch // batches, batch % batches)
        assert (index in ledger.accepted(one.batch)) == (index not in rejected)


def test_a_state_of_format_2_is_read() -> None:
    """Two batches a round of three prompts, in chunks of two and one. The state is of after round
    4, began anew at round 3 with prompt 20, and keeps two rounds for replay."""
    state = {
        "first_round": 3,
        "first_cursor": 20,
        "learner_round": 5,
        "next_unit": 11,  # the sixth batch is half asked for
        "next_cursor": 37,
        "in_flight_units": [8, 10],
    }
    config = config_of(prompts=3, chunk=2, batches=2, capacity=2)
    ledger = ledger_of_format_2(state, config)
    assert (ledger["next_prompt"], ledger["next_batch"]) == (37, (6, 0))
    rows = [
        (row["id"], row["to_ask"], row["in_flight"], row["accepted"]) for row in ledger["batches"]
    ]
    assert rows == [
        ((4, 0), [], [], [26, 27, 28]),
        ((4, 1), [], [], [29, 30, 31]),
        ((5, 0), [], [[32, 33]], [34]),
        ((5, 1), [1], [[35, 36]], []),
    ]
