"""The Ray runtime: waits that check for a request to stop, and the errors of actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from grpo_trainable.cluster import ray_actors
from grpo_trainable.cluster.ray_actors import LOOK_S, RayRuntime
from grpo_trainable.protocol.calls import ActorLost, FailsAgain


class FakeRay:
    """A stand-in for `ray.wait` that advances a clock. Each answer arrives at a given time."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.arrives_at: dict[str, float] = {}

    def wait(
        self, refs: list[str], *, num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[str], list[str]]:
        first = min(self.arrives_at[ref] for ref in refs)
        self.time_s = max(self.time_s, min(first, self.time_s + timeout))
        done = [ref for ref in refs if self.arrives_at[ref] <= self.time_s][:num_returns]
        return done, [ref for ref in refs if ref not in done]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_actors, "ray", fake)
    monkeypatch.setattr(ray_actors, "now", lambda: fake.time_s)
    return fake


def calls(fake: FakeRay, **arrives_at: float) -> list[Any]:
    fake.arrives_at = arrives_at
    return [SimpleNamespace(ref=ref) for ref in arrives_at]


def refs(found: list[Any]) -> list[str]:
    return [call.ref for call in found]


@pytest.mark.parametrize("looks", [False, True])
def test_a_wait_ends_with_the_first_answer_or_at_its_time_limit(fake_ray, looks):
    runtime = RayRuntime(look=(lambda: None) if looks else None)
    both = calls(fake_ray, a=2.5, b=7.0)
    assert refs(runtime.wait(both, 10.0)) == ["a"]
    assert fake_ray.time_s == 2.5
    assert refs(runtime.wait(both[1:], 3.0)) == []
    assert fake_ray.time_s == 5.5
    assert refs(runtime.wait(both[1:], 0.0)) == []
    fake_ray.time_s = 8.0
    assert refs(runtime.wait(both, 0.0)) == ["a", "b"]


def test_a_long_wait_looks_once_in_an_interval(fake_ray):
    looked: list[float] = []
    runtime = RayRuntime(look=lambda: looked.append(fake_ray.time_s))
    runtime.wait(calls(fake_ray, a=3.5), 10.0)
    assert looked == [0.0, LOOK_S, 2 * LOOK_S, 3 * LOOK_S]


def test_many_short_waits_do_not_look_more_often(fake_ray):
    looked: list[float] = []
    runtime = RayRuntime(look=lambda: looked.append(fake_ray.time_s))
    never = calls(fake_ray, a=100.0)
    for _ in range(8):
        runtime.wait(never, LOOK_S / 4)
    assert looked == [0.0, LOOK_S]


def test_a_look_that_raises_ends_the_wait(fake_ray):
    def look() -> None:
        if fake_ray.time_s > 1.5:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        RayRuntime(look=look).wait(calls(fake_ray, a=100.0), 50.0)
    assert fake_ray.time_s == 2.0


# ---- Errors of actors ----------------------------------------------------------------------------

STARTED = "The actor died because of an error raised in its creation task, Traceback:\n  File\n"
MISTAKE = "task.reward=my.py:f: cannot be imported: ModuleNotFoundError: No module named 'x'"


@pytest.mark.parametrize(
    ("last_line", "never_started", "kind", "message"),
    [
        (
            f"grpo_trainable.plugins.PluginError: {MISTAKE}",
            True,
            FailsAgain,
            f"generator-0 cannot start: {MISTAKE}",
        ),
        (
            "grpo_trainable.config.values.ConfigError: k=0: must be an integer >= 1",
            True,
            FailsAgain,
            "generator-0 cannot start: k=0: must be an integer >= 1",
        ),
        (
            "OSError: the disk does not answer",
            True,
            ActorLost,
            "warm-up: generator-0 died (OSError: the disk does not answer)",
        ),
        (
            "grpo_trainable.plugins.PluginError: said by a process that died later",
            False,
            ActorLost,
            "warm-up: generator-0 died (grpo_trainable.plugins.PluginError: said by a process that "
            "died later)",
        ),
    ],
)
def test_only_a_mistake_of_the_user_that_keeps_an_actor_from_starting_fails_again(
    monkeypatch, last_line, never_started, kind, message
):
    def get(ref: str, timeout: float | None) -> None:
        raise RayActorError(error_msg=STARTED + last_line, actor_init_failed=never_started)

    monkeypatch.setattr(ray_actors, "ray", SimpleNamespace(get=get))
    call: Any = SimpleNamespace(stage="warm-up", actor=SimpleNamespace(name="generator-0"), ref="a")
    with pytest.raises(kind) as failed:
        RayRuntime().result(call)
    assert type(failed.value) is kind
    assert str(failed.value) == message
