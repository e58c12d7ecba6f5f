"""Deadlines of calls to real processes, which are slow, stuck or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for

from grpo_trainable.cluster.ray_actors import RayActor, RayRuntime
from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import Actor
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

DEADLINE_S = 3.0


def role() -> type:
    """Return a class that Ray pickles by value, because it is defined inside a function."""

    class Role:
        CONCURRENT = ("progress",)

        def __init__(self) -> None:
            self._steps = 0

        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> str:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)
                self._steps += 1
            return "done"

        def hang(self) -> None:
            time.sleep(600)

        def progress(self) -> int:
            return self._steps

    return Role


@contextmanager
def started(cls: type, name: str, *args: Any) -> Iterator[RayActor]:
    actor = RayActor(cls, name, *args, num_cpus=0.1, num_gpus=0)
    try:
        Watch(RayRuntime(), 120.0).result(actor.submit("start", "progress"))
        yield actor
    finally:
        actor.kill()


def test_call_that_takes_longer_than_the_deadline_is_awaited_while_it_goes_on(
    ray_session: None,
) -> None:
    with started(role(), "slow") as slow:
        call = slow.submit("work", "work", 2 * DEADLINE_S)
        assert Watch(RayRuntime(), DEADLINE_S).result(call) == "done"


@pytest.mark.parametrize("how", ["stuck", "stopped"])
def test_hang_is_noticed_beside_an_actor_that_answers(ray_session: None, how: str) -> None:
    runtime = RayRuntime()
    watch = Watch(runtime, DEADLINE_S)
    with started(role(), "busy") as busy, started(role(), "hung") as hung:
        pid = watch.result(hung.submit("pid", "pid"))
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        silent = list[Actor]()
        calls = [hung.submit("work", "hang"), busy.submit("work", "work", 0.1)]
        while not silent:
            done, silent = watch.wait(calls)
            for call in done:
                assert runtime.result(call) == "done"
                calls[1] = busy.submit("work", "work", 0.1)
        assert silent == [hung]
        assert watch.result(calls[1]) == "done"


def test_slow_reward_is_no_hang_and_the_next_unit_is_sampled_beside_it(
    ray_session: None, tmp_path: Path
) -> None:
    reward, began = tmp_path / "slow_reward.py", tmp_path / "began"
    reward.write_text(
        "import time\nfrom pathlib import Path\n"
        "def reward(response, ground_truth):\n"
        f"    Path({str(began)!r}).touch()\n    time.sleep(0.5)\n    return 1.0\n"
    )
    config = GRPOConfig.from_dict(
        {
            "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 8},
            "task": {"reward": f"{reward}:reward", "reward_deadline_s": DEADLINE_S / 2},
            "resources": {"deadline_s": DEADLINE_S, "reward_workers": 2},
        }
    )
    prompts = Prompts(config, build_task(config), read_tokenizer(None))
    requests = [prompts.request("train", index) for index in range(4)]
    with started(Generator, "generator", config, InProcess()) as generator:
        watch = Watch(RayRuntime(), DEADLINE_S)
        sampled = watch.result(generator.submit("rollout", "generate", requests))
        scoring = generator.submit("reward", "score", sampled.number)
        wait_for(began.exists, 60)
        following = watch.result(generator.submit("rollout", "generate", requests))
        scored = watch.result(scoring)
    assert [group.rewards.tolist() for group in scored.groups] == [[1.0] * 4] * 4
    (reward_span,) = scored.spans
    assert reward_span.seconds > DEADLINE_S  # sixteen rewards of 0.5 s each, two at a time
    (sampling,) = (span for span in following.spans if span.stage == "rollout")
    assert reward_span.start < sampling.start < reward_span.end
