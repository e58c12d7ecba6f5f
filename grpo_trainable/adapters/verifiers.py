"""Adapter for verifiers (https://github.com/PrimeIntellect-ai/verifiers).

Each episode is one conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from grpo_trainable.adapters.dialogue import Dialogue
from grpo_trainable.adapters.optional_library import library
from grpo_trainable.adapters.verifiers_agent import played
from grpo_trainable.environments import JSONValue, Turn


def verifiers_environment(**config: Any) -> type:
    """Return a class for `env.name` that plays an environment of `verifiers.v1`.

    An episode's specification is {"idx": N}, the number of a task in the taskset. An action is the
    agent's reply. The last action earns the reward of the trace. The trace's metrics become the
    `info` of the last turn.

    Args:
        **config: Fields of the `EnvConfig` for `load_environment`: `taskset={"id": …}`, and one
            field per agent, named after the agent.

    Raises:
        ValueError: If verifiers is not installed (the message is one line), or if the config is
            invalid.
    """
    vf = library("verifiers.v1", extra="verifiers")
    env = vf.load_environment(vf.resolve_env_config(config))
    tasks, stream = [], iter(env.taskset)

    class Adapted:
        _dialogue: Dialogue[Any] | None = None

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            index = spec["idx"]
            assert isinstance(index, int), spec
            self.close()
            tasks.extend(islice(stream, max(index + 1 - len(tasks), 0)))
            if not 0 <= index < len(tasks):
                raise ValueError(f"idx={index}: the taskset has {len(tasks)} tasks")
            self._dialogue = Dialogue(lambda ask: played(vf, env, tasks[index], ask))
            text = self._dialogue.listen()
            if text is None:
                raise ValueError("the episode ended before the policy received a message")
            return text

        def step(self, action: str) -> Turn:
            assert self._dialogue is not None, "call reset before step"
            text = self._dialogue.reply(action.strip())
            if text is not None:
                return Turn(text)
            trace = self._dialogue.result()
            return Turn(reward=trace.reward, done=True, info=trace.metrics)

        def close(self) -> None:
            if self._dialogue is not None:
                self._dialogue.close()
            self._dialogue = None

    return Adapted
