from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from virtual_time import one_token_group

from grpo_trainable.pipeline.replay_buffer import SAMPLINGS, ReplayBuffer, ReplaySample
from grpo_trainable.protocol.versions import StalenessGate

FRESH, OLDER = range(6, 9), range(6)


def gate(learner_round: int, lag: int = 0, max_age: int | None = None) -> StalenessGate:
    max_age = lag if max_age is None else max_age
    return StalenessGate(lag=lag, max_age=max_age, learner_round=learner_round)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def indices(taken: ReplaySample) -> list[int]:
    return [group.prompt_index for group in taken.groups]


def third_round(sampling: str, fraction: float = 0.5, uses: Sequence[int] = (2, 2, 1, 1, 1, 1)):
    """Return a buffer of three rounds of three groups. Two rounds have been trained on."""
    buffer = ReplayBuffer(sampling, fraction)
    buffer.add(
        [one_token_group(c, round_=c // 3, uses=u) for c, u in zip(OLDER, uses, strict=True)]
    )
    buffer.add([one_token_group(c, round_=2) for c in FRESH])
    return buffer


def sample(buffer: ReplayBuffer, count: int, seed: int = 0) -> ReplaySample:
    return buffer.sample(FRESH, OLDER, count, gate(2, max_age=2), rng(seed))


# ---- Without replay ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_one_rollout_batch_comes_out_by_prompt_index_and_whole(sampling: str) -> None:
    buffer = ReplayBuffer(sampling)
    buffer.add([one_token_group(c) for c in (5, 1)])
    buffer.add([one_token_group(c) for c in (0, 3, 2)])
    taken = buffer.sample(range(3), (), 3, gate(0), rng())
    assert indices(taken) == [0, 1, 2]
    assert [group.uses for group in taken.groups] == [1, 1, 1]
    assert (taken.first_used, taken.stale) == (3, 0)
    assert (len(buffer), buffer.waiting) == (5, 2)
    assert buffer.evict(range(3), gate(1, lag=1)) == 0
    assert [group.prompt_index for group in buffer.groups()] == [3, 5]


def test_groups_that_never_came_are_left_out() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(4)])
    taken = buffer.sample(range(3, 6), (), 3, gate(0), rng())
    assert indices(taken) == [4]
    assert taken.stale == 0


def test_stale_groups_are_dropped_and_counted() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(c, round_=c) for c in (0, 1, 2)])
    # Round 2 is about to be trained: at lag 1, weights of round 0 are too old.
    taken = buffer.sample(range(3), (), 3, gate(2, lag=1), rng())
    assert indices(taken) == [1, 2]
    assert taken.stale == 1
    assert len(buffer) == 2


def test_two_groups_of_one_prompt_are_our_mistake() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(0)])
    with pytest.raises(AssertionError):
        buffer.add([one_token_group(0)])


# ---- Sampling from the buffer --------------------------------------------------------------------


def test_recency_takes_the_newest() -> None:
    assert indices(sample(third_round("recency"), 5)) == [4, 5, 6, 7, 8]


def test_fifo_takes_the_least_used_and_of_these_the_oldest() -> None:
    assert indices(sample(third_round("fifo"), 5)) == [2, 3, 6, 7, 8]
    assert indices(sample(third_round("fifo"), 8)) == [0, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_uniform_takes_every_group_equally_often_and_none_twice() -> None:
    counts: Counter[int] = Counter()
    for seed in range(900):
        taken = indices(sample(third_round("uniform"), 4, seed))
        assert len(set(taken)) == 4
        assert taken == sorted(taken)
        counts.update(taken)
    # In 900 samples of 4 of the 9 groups, each group is expected 400 times, with a standard
    # deviation of 15.
    assert set(counts) == set(range(9))
    assert all(abs(count - 400) < 75 for count in counts.values())


def test_mixed_takes_its_fraction_of_fresh_ones() -> None:
    for seed in range(50):
        taken = indices(sample(third_round("mixed", 0.4), 5, seed))
        assert len(taken) == len(set(taken)) == 5
        assert sum(index in FRESH for index in taken) == 2  # ceil(0.4 x 5)


def test_mixed_fills_up_with_what_there_is() -> None:
    # There are no older groups left: take all fresh ones and no more.
    buffer = ReplayBuffer("mixed", 0.5)
    buffer.add([one_token_group(c, round_=2) for c in FRESH])
    assert indices(sample(buffer, 6)) == [6, 7, 8]
    # Two of the fresh groups were dropped.
    buffer = third_round("mixed", 1.0)
    for index in (7, 8):
        del buffer._groups[index]
    taken = indices(sample(buffer, 3))
    assert 6 in taken
    assert len(taken) == 3


def test_a_draw_of_more_than_there_is_takes_all() -> None:
    for sampling in SAMPLINGS:
        assert indices(sample(third_round(sampling), 100)) == list(range(9))


def test_the_same_seed_draws_the_same() -> None:
    for sampling in ("uniform", "mixed"):
        first, second, other = (sample(third_round(sampling), 4, seed) for seed in (1, 1, 3))
        assert indices(first) == indices(second) != indices(other)


# ---- Uses and age --------------------------------------------------------------------------------


def test_every_draw_is_a_use_and_only_the_first_is_new() -> None:
    buffer = third_round("fifo")
    taken = sample(buffer, 5)
    assert {group.prompt_index: group.uses for group in taken.groups} == {
        2: 2,
        3: 2,
        6: 1,
        7: 1,
        8: 1,
    }
    assert taken.first_used == 3
    uses = {group.prompt_index: group.uses for group in buffer.groups()}
    assert uses == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1}


def test_used_groups_are_held_to_their_age_and_unused_ones_to_the_lag() -> None:
    buffer = third_round("uniform", uses=(2, 1, 0, 1, 0, 1))
    # The oldest groups are two rounds old, and the others are one round old. At lag 0, only fresh
    # groups may be used for the first time.
    taken = buffer.sample(FRESH, OLDER, 100, gate(2, lag=0, max_age=1), rng())
    assert indices(taken) == [3, 5, 6, 7, 8]
    assert taken.stale == 2
    assert [group.prompt_index for group in buffer.groups()] == [3, 5, 6, 7, 8]


def test_eviction_counts_what_was_never_trained_on() -> None:
    buffer = third_round("uniform", uses=(2, 0, 1, 1, 0, 1))
    assert buffer.evict([0, 1, 2], gate(2, lag=1, max_age=9)) == 1
    assert [group.prompt_index for group in buffer.groups()] == [3, 4, 5, 6, 7, 8]
    # Prompt 4 was sampled in round 1. In round 3 it is too old for a first use.
    assert buffer.evict([], gate(3, lag=1, max_age=9)) == 1
    assert [group.prompt_index for group in buffer.groups()] == [3, 5, 6, 7, 8]
