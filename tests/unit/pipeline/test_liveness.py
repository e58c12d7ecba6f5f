"""Detection of silent actors, in virtual time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import ActorLost
from grpo_trainable.simulation.runtime import VirtualActor, VirtualCall, VirtualRuntime

DEADLINE_S = 8.0


class Role:
    def work(self, start: float, end: float) -> str:
        return "done"


def actor(runtime: VirtualRuntime, name: str, seconds: float, **options: Any) -> VirtualActor:
    return VirtualActor(runtime, name, Role(), lambda name, stage: seconds, **options)


def test_answer_that_takes_long_is_awaited_while_there_is_progress() -> None:
    runtime = VirtualRuntime()
    call = actor(runtime, "a", 100.0, step_s=4.0).submit("work", "work")
    assert Watch(runtime, DEADLINE_S).result(call) == "done"
    assert runtime.now() == 100.0


def test_actor_that_comes_no_further_is_lost() -> None:
    runtime = VirtualRuntime()
    call = actor(runtime, "a", 100.0, step_s=math.inf).submit("work", "work")
    with pytest.raises(ActorLost, match=r"resources\.deadline_s=8 s from a \(work\)"):
        Watch(runtime, DEADLINE_S).result(call)
    # The actor is first asked after a quarter of the deadline, and its answer counts as progress.
    assert runtime.now() == 2.0 + DEADLINE_S


def test_answers_of_one_actor_say_nothing_of_another() -> None:
    runtime = VirtualRuntime()
    busy = actor(runtime, "busy", 1.0)
    stuck = actor(runtime, "stuck", 1.0, hangs=lambda stage, n: True, mute=True)
    watch, lost = Watch(runtime, DEADLINE_S), stuck.submit("work", "work")
    silent: list[Any] = []
    while not silent:
        done, silent = watch.wait([lost, busy.submit("work", "work")])
        assert {call.actor for call in done} <= {busy}
        for call in done:
            runtime.result(call)
    assert silent == [stuck]
    # The last progress is at 1 s, and the watch may need one more question to notice the silence.
    assert DEADLINE_S <= runtime.now() <= 1.0 + DEADLINE_S * 1.25


class StandsStill(VirtualRuntime):
    """A process that is suspended for an hour in its third wait."""

    waits = 0

    def wait(self, calls: Any, timeout_s: float) -> list[VirtualCall]:
        self.waits += 1
        if self.waits == 3:
            self.time += 3600.0
        return super().wait(calls, timeout_s)


def test_time_in_which_the_waiting_process_stood_still_does_not_count() -> None:
    runtime = StandsStill()
    # The actor does not answer progress questions until its call is done.
    call = actor(runtime, "a", 3605.0, step_s=math.inf).submit("work", "work")
    assert Watch(runtime, DEADLINE_S).result(call) == "done"
