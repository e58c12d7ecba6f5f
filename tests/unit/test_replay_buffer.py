from __future__ import annotations

import pytest
from fakes import one_token_group

from grpo_trainable.replay_buffer import ReplayBuffer
from grpo_trainable.versions import StalenessGate


def gate(learner_round: int, lag: int = 0) -> StalenessGate:
    return StalenessGate(lag=lag, max_age=lag, learner_round=learner_round)


def test_a_rollout_batch_comes_out_by_cursor_and_once() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(c) for c in (5, 1)])
    buffer.add([one_token_group(c) for c in (0, 3, 2)])
    groups, stale = buffer.take(range(3), gate(0))
    assert [group.cursor for group in groups] == [0, 1, 2]
    assert [group.uses for group in groups] == [1, 1, 1]
    assert stale == 0
    assert buffer.take(range(3), gate(0)) == ([], 0)
    assert len(buffer) == 2


def test_groups_that_never_came_are_left_out() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(4)])
    groups, stale = buffer.take(range(3, 6), gate(0))
    assert [group.cursor for group in groups] == [4]
    assert stale == 0


def test_stale_groups_are_dropped_and_counted() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(c, round_=c) for c in (0, 1, 2)])
    # Round 2 is about to be trained: at lag 1, weights of round 0 are too old.
    groups, stale = buffer.take(range(3), gate(2, lag=1))
    assert [group.cursor for group in groups] == [1, 2]
    assert stale == 1
    assert len(buffer) == 0


def test_reused_groups_are_held_to_their_age_alone() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(0, round_=0, uses=1), one_token_group(1, round_=0)])
    gate_of_replay = StalenessGate(lag=0, max_age=3, learner_round=3)
    groups, stale = buffer.take(range(2), gate_of_replay)
    assert [(group.cursor, group.uses) for group in groups] == [(0, 2)]
    assert stale == 1


def test_checkpoint_sees_the_groups_by_cursor() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(c) for c in (7, 2, 5)])
    assert [group.cursor for group in buffer.groups()] == [2, 5, 7]
    assert len(buffer) == 3


def test_two_groups_of_one_cursor_are_our_mistake() -> None:
    buffer = ReplayBuffer()
    buffer.add([one_token_group(0)])
    with pytest.raises(AssertionError):
        buffer.add([one_token_group(0)])
