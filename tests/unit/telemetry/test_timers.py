from __future__ import annotations

import pytest

from grpo_trainable.telemetry import timers
from grpo_trainable.telemetry.timers import Span, StageClock, WallClock, covered_seconds


class FakeNow:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 100.0
        monkeypatch.setattr(timers, "now", lambda: self.time)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock(monkeypatch) -> FakeNow:
    return FakeNow(monkeypatch)


def test_now_is_wall_clock_time_and_never_runs_backwards():
    readings = [timers.now() for _ in range(1000)]
    assert readings == sorted(readings)
    assert readings[0] > 1.7e9


def test_a_stage_lasts_from_entry_to_exit(clock):
    stages = StageClock()
    with stages.call():
        with stages("rollout"):
            clock.sleep(2)
        clock.sleep(1)
        with stages("reward"):
            clock.sleep(4)
    assert stages.take() == [Span("rollout", 100, 102), Span("reward", 103, 107)]
    assert stages.take() == []


def test_idle_is_the_time_between_two_calls_and_not_before_the_first(clock):
    stages = StageClock()
    clock.sleep(5)
    with stages.call():
        clock.sleep(1)
    clock.sleep(3)
    with stages.call(), stages("optimize"):
        clock.sleep(2)
    assert stages.take() == [Span("idle", 106, 109), Span("optimize", 109, 111)]


def test_actor_is_not_idle_while_another_of_its_threads_works(clock):
    stages = StageClock()
    with stages.call():
        clock.sleep(1)
    with stages.concurrent():
        clock.sleep(2)
        with stages.call(), stages("rollout"):
            clock.sleep(1)
        clock.sleep(4)
    clock.sleep(8)
    with stages.call():
        pass
    assert stages.take() == [Span("rollout", 103, 104), Span("idle", 108, 116)]


def test_waiting_for_weights_is_a_stage_from_when_they_were_sent_or_it_had_nothing_else_to_do(
    clock,
):
    stages = StageClock()
    with stages.call("sync", since=90) as waited_s:  # the actor's first call
        clock.sleep(1)
    assert (waited_s, stages.take()) == (0, [])
    clock.sleep(3)  # from 101 to 104; the weights are sent at 102
    with stages.call("sync", since=102) as waited_s:
        clock.sleep(1)
    assert (waited_s, stages.take()) == (2, [Span("idle", 101, 102), Span("sync", 102, 104)])
    clock.sleep(3)  # from 105 to 108; the weights were sent before
    with stages.call("sync", since=103) as waited_s:
        pass
    assert (waited_s, stages.take()) == (3, [Span("idle", 105, 105), Span("sync", 105, 108)])
    clock.sleep(2)  # the other machine's clock is ahead
    with stages.call("sync", since=200) as waited_s:
        pass
    assert (waited_s, stages.take()) == (0, [Span("idle", 108, 110)])


def test_a_failed_stage_and_a_failed_call_still_end(clock):
    stages = StageClock()

    def fail():
        clock.sleep(2)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"), stages.call(), stages("optimize"):
        fail()
    clock.sleep(1)
    with stages.call():
        pass
    assert stages.take() == [Span("optimize", 100, 102), Span("idle", 102, 103)]


def test_a_stage_ends_when_the_work_of_its_device_has(clock):
    stages = StageClock(synchronize=lambda: clock.sleep(7))
    with stages("optimize"):
        clock.sleep(1)
    assert [span.seconds for span in stages.take()] == [8]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(2, 4)], 2),
        ([(2, 4), (6, 7)], 3),
        ([(2, 5), (3, 4)], 3),  # one inside another
        ([(4, 7), (2, 5)], 5),  # overlapping, out of order
        ([(2, 4), (2, 4)], 2),
        ([(-3, 2), (9, 14)], 3),  # cut off at both ends
        ([(-3, 0), (10, 12)], 0),  # outside
        ([(-3, 30)], 10),
    ],
)
def test_covered_seconds_counts_every_moment_once(spans, expected):
    assert covered_seconds([Span("x", *span) for span in spans], 0, 10) == expected


def rounds(wall: WallClock, times: list[tuple[float, float]]) -> list[float]:
    return [wall.round_ended(start, end, eval_s=0.0) for start, end in times]


def test_every_round_and_the_gaps_between_them_are_counted():
    wall = WallClock()
    assert rounds(wall, [(0, 10), (12, 20), (21, 25), (28, 30)]) == [10, 10, 5, 5]
    assert wall.seconds == 30


def test_evaluation_and_checkpoints_are_subtracted():
    wall = WallClock()
    assert wall.round_ended(0, 10, eval_s=4) == 10 - 4
    wall.leave_out(2)
    assert wall.round_ended(13, 25, eval_s=6) == (25 - 10) - 2 - 6
    assert wall.round_ended(26, 28, eval_s=0) == 3
    assert wall.seconds == 6 + 7 + 3


def test_a_checkpoint_before_the_first_round_takes_nothing_from_it():
    wall = WallClock()
    wall.leave_out(5)
    assert wall.round_ended(26, 30, eval_s=1) == 3


def test_time_before_a_resume_is_kept_and_the_pause_is_not_counted():
    before = WallClock()
    rounds(before, [(0, 10), (12, 20)])
    resumed = WallClock(before.seconds)
    rounds(resumed, [(1000, 1004), (1005, 1006)])
    assert resumed.seconds == 20 + 4 + 2
