"""The ledger: the prompts of each rollout batch, for any order of answers and losses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline.ledger import BatchId, BatchRule, Chunk, FilledBatch, Ledger


def config_of(
    prompts: int, chunk: int | None, batches: int = 1, capacity: int = 1, **values: Any
) -> GRPOConfig:
    """Return a config with `batches` batches a round, in chunks of at most `chunk` prompts."""
    replay = {"buffer_capacity": capacity, "buffer": {"sample_batches": 2}} if capacity > 1 else {}
    rollout = {"prompts": prompts, "unit_prompts": chunk, **values.pop("rollout", {})}
    return GRPOConfig.from_dict(
        {"rollout": rollout, "k": batches, "k_mode": "fresh_batches", **replay, **values}
    )


def resampling(
    prompts: int, chunk: int | None, batches: int = 1, *, lag: int = 0, **rollout: Any
) -> GRPOConfig:
    return config_of(
        prompts,
        chunk,
        batches,
        rollout={"zero_advantage": "resample", **rollout},
        lag=lag,
        placement="disaggregated",
    )


def take(ledger: Ledger, count: int) -> list[Chunk]:
    return [ledger.take() for _ in range(count)]


def asked(chunks: list[Chunk]) -> list[tuple[int, ...]]:
    return [chunk.prompt_indices for chunk in chunks]


def test_prompts_are_asked_for_in_order_batch_by_batch() -> None:
    ledger = Ledger(config_of(prompts=5, chunk=2, batches=2))
    assert ledger.due_round == 0
    chunks = asked(take(ledger, 6))
    assert chunks == [(0, 1), (2, 3), (4,), (5, 6), (7, 8), (9,)]
    assert ledger.due_round == 1
    assert ledger.take().prompt_indices == (10, 11)
    assert ledger.due_round == 1
    assert ledger.next_prompt == ledger.in_flight == 12


def test_a_batch_holds_what_was_accepted_in_the_order_of_the_prompts() -> None:
    ledger = Ledger(config_of(prompts=4, chunk=2))
    first, second = take(ledger, 2)
    ledger.settle(second, [3, 2])
    assert not ledger.complete(0)
    ledger.settle(first, [1])  # the reward of prompt 0 failed
    assert ledger.complete(0)
    assert ledger.batch(BatchId(0, 0)) == FilledBatch(range(4), [1, 2, 3])
    assert ledger.in_flight == 0


def test_a_round_is_complete_when_each_of_its_batches_is() -> None:
    ledger = Ledger(config_of(prompts=1, chunk=1, batches=2))
    (first,) = take(ledger, 1)
    ledger.settle(first, [0])
    assert not ledger.complete(0)  # the second batch has not been requested
    (second,) = take(ledger, 1)
    assert not ledger.complete(0)
    ledger.settle(second, [])
    assert ledger.complete(0)
    assert not ledger.complete(1)


def test_a_lost_chunk_is_next_in_turn_and_still_in_flight() -> None:
    ledger = Ledger(config_of(prompts=2, chunk=1))
    chunks = take(ledger, 3)
    assert ledger.due_round == 1
    ledger.put_back(chunks[1])
    ledger.put_back(chunks[0])
    assert ledger.due_round == 0
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
    assert ledger.batch(BatchId(2, 1)).accepted == [10, 11]
    assert ledger.close(before_round=1) == [0, 1, 2, 3]
    assert ledger.accepted_before(BatchId(2, 1)) == [6, 7]


# ---- Replacement prompts -------------------------------------------------------------------------


def test_where_a_batch_ends_by_hand() -> None:
    rule = BatchRule(size=4, most=100, redraws=9)
    assert rule.end(10, []) == 14
    # Prompts 11 and 12 are left out, so 14 and 15 are drawn. Prompt 15 is left out, so 16 is drawn.
    # Indices before 10 do not count.
    assert rule.end(10, [8, 9, 11, 12, 15]) == 17
    # With at most one redraw, 14 and 15 are drawn. With at most 5 prompts, only 14 is drawn.
    assert BatchRule(4, 100, 1).end(10, [11, 12, 15]) == 16
    assert BatchRule(4, 5, 9).end(10, [11, 12, 15]) == 15
    assert BatchRule(4, 100, 0).end(10, [10, 11, 12, 13]) == 14


def by_hand(
    left_out: Callable[[int], bool], config: GRPOConfig, batches: int
) -> list[tuple[range, list[int]]]:
    """Fill batches prompt by prompt, as if every result were known."""
    filled, start = [], 0
    for _ in range(batches):
        accepted, index, draws, missing = [], start, 0, config.rollout.prompts
        while missing and draws <= schedule.redraws(config):
            for _ in range(min(missing, start + schedule.most_drawn(config) - index)):
                accepted += [] if left_out(index) else [index]
                index += 1
            draws, missing = draws + 1, config.rollout.prompts - len(accepted)
        filled.append((range(start, index), accepted))
        start = index
    return filled


def test_what_is_left_out_is_drawn_anew_once_all_others_are_back() -> None:
    """Use three prompts a batch, two batches a round. Prompts 1, 2 and 7 have equal rewards."""
    ledger = Ledger(resampling(prompts=3, chunk=2, batches=2))
    chunks = take(ledger, 4)
    assert asked(chunks) == [(0, 1), (2,), (3, 4), (5,)]
    ledger.settle(chunks[3], [5])
    ledger.settle(chunks[0], [0])
    ledger.settle(chunks[1], [])
    assert ledger.due_round == 1  # no redraw while prompts 3 and 4 are in flight
    ledger.settle(chunks[2], [3, 4])
    assert ledger.due_round == 0
    assert not ledger.complete(0)
    (again,) = take(ledger, 1)
    assert again.prompt_indices == (6, 7)
    ledger.settle(again, [6])
    (once_more,) = take(ledger, 1)
    assert once_more.prompt_indices == (8,)
    ledger.settle(once_more, [8])
    # Prompts keep the order of the stream: the second batch had prompt 5 before it drew prompt 6.
    assert ledger.batch(BatchId(0, 0)) == FilledBatch(range(5), [0, 3, 4])
    assert ledger.batch(BatchId(0, 1)) == FilledBatch(range(5, 9), [5, 6, 8])
    assert ledger.due_round == 1


def test_with_a_lag_a_round_takes_what_was_drawn_for_the_next() -> None:
    """With four prompts a batch, the waiting round needs no further draw."""
    ledger = Ledger(resampling(prompts=4, chunk=2, lag=1))
    first, second, third, fourth = take(ledger, 4)
    ledger.settle(first, [0])
    ledger.settle(second, [2])
    # Prompts 1 and 3 are left out. Their replacements, 8 and 9, are drawn at the end of the second
    # round, where they fill a chunk.
    assert ledger.due_round == 1
    assert not ledger.complete(0)
    ledger.settle(third, [4, 5])
    assert ledger.batch(BatchId(0, 0)) == FilledBatch(range(6), [0, 2, 4, 5])
    (again,) = take(ledger, 1)
    assert again.prompt_indices == (8, 9)
    ledger.settle(again, [8, 9])
    assert not ledger.complete(1)  # prompts 6 and 7 come before prompt 8
    ledger.settle(fourth, [6, 7])
    assert ledger.batch(BatchId(1, 0)) == FilledBatch(range(6, 10), [6, 7, 8, 9])


def test_redraws_are_shared_out_among_generators() -> None:
    config = resampling(prompts=8, chunk=None)
    several = GRPOConfig.from_dict({**config.to_dict(), "resources": {"num_generators": 3}})
    assert schedule.unit_prompts(several) == 3
    assert schedule.redraw_sizes(several, 0) == []
    assert schedule.redraw_sizes(several, 2) == [1, 1]
    assert schedule.redraw_sizes(several, 5) == [1, 2, 2]
    assert schedule.redraw_sizes(several, 10) == [2, 3, 2, 3]
    assert schedule.redraw_sizes(resampling(prompts=8, chunk=3), 7) == [3, 3, 1]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_stream_without_signal_closes_every_batch_at_its_bound(lag: int) -> None:
    ledger = Ledger(resampling(prompts=4, chunk=4, lag=lag, oversample=2.6, redraws=9))
    for round_ in range(3):
        while not ledger.complete(round_):
            ledger.settle(ledger.take(), [])
    # 2.6 times 4 prompts, rounded down, is 10.
    assert ledger.batch(BatchId(2, 0)) == FilledBatch(range(20, 30), [])


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["keep", "resample"]),
    st.sampled_from([(1.5, 8), (2.0, 1), (2.5, 3), (8.0, 8)]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
    st.integers(0, 2**16),
)
def test_batches_follow_from_the_stream_whatever_is_lost_and_restored(
    prompts: int,
    chunk: int,
    batches: int,
    zero_advantage: str,
    bounds: tuple[float, int],
    lag: int,
    share: float,
    seed: int,
) -> None:
    """Check that every requested prompt belongs to a batch, for any order of answers."""
    oversample, redraws = max(bounds[0], 1 + 1 / prompts), bounds[1]
    rng = random.Random(seed)
    if zero_advantage == "keep":
        config = config_of(prompts, min(chunk, prompts), batches)
    else:
        config = resampling(
            prompts, min(chunk, prompts), batches, lag=lag, oversample=oversample, redraws=redraws
        )

    def left_out(index: int) -> bool:
        return random.Random(f"{seed} {index}").random() < share

    rounds, ahead = 3, lag + 1
    ledger = Ledger(config)
    in_flight: list[Chunk] = []
    settled: set[int] = set()
    trained = 0
    filled: list[tuple[range, list[int]]] = []
    while trained < rounds:
        may_take = ledger.due_round < min(rounds, trained + ahead)
        steps = ["take"] * may_take + ["settle", "settle", "lose", "restore"] * bool(in_flight)
        assert steps, "nothing to do and nothing to wait for"
        step = rng.choice(steps)
        if step == "restore":
            state = json.loads(json.dumps(ledger.state()))
            ledger = Ledger(config)
            ledger.load_state(state)
            in_flight = []
        elif step == "take":
            in_flight.append(ledger.take())
        else:
            one = in_flight.pop(rng.randrange(len(in_flight)))
            if step == "lose":
                ledger.put_back(one)
                continue
            assert not settled & set(one.prompt_indices)
            settled |= set(one.prompt_indices)
            ledger.settle(one, [i for i in one.prompt_indices if not left_out(i)])
        assert ledger.in_flight + len(settled) == ledger.next_prompt
        while trained < rounds and ledger.complete(trained):
            for batch_id in ledger.batches_of(trained):
                batch = ledger.batch(batch_id)
                filled.append((batch.drawn, batch.accepted))
            trained += 1
            ledger.close(trained)
    assert filled == by_hand(left_out, config, rounds * batches)
    assert ledger.next_prompt == filled[-1][0].stop == len(settled)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**16))
def test_a_synchronous_round_asks_for_the_same_chunks_in_any_order_of_answers(
    prompts: int, chunk: int, batches: int, seed: int
) -> None:
    config = resampling(prompts, min(chunk, prompts), batches, oversample=6.0)

    def chunks_of(order: Callable[[int], int]) -> list[tuple[int, ...]]:
        ledger, in_flight, taken = Ledger(config), [], []
        while not ledger.complete(1):
            admitted = 0 if not ledger.complete(0) else 1
            while ledger.due_round <= admitted and len(in_flight) < 3:
                in_flight.append(ledger.take())
                taken.append(in_flight[-1].prompt_indices)
            one = in_flight.pop(order(len(in_flight)))
            accepted = [
                i for i in one.prompt_indices if random.Random(f"{seed} {i}").random() < 0.5
            ]
            ledger.settle(one, accepted)
        return taken

    expected = chunks_of(lambda count: 0)
    assert chunks_of(random.Random(seed).randrange) == expected
