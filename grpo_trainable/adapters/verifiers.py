"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers): the policy talks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from grpo_trainable.adapters.dialogue import Dialogue
from grpo_trainable.adapters.libraries import library
from grpo_trainable.adapters.verifiers_agent import played
from grpo_trainable.environments import JSONValue, Turn


def verifiers_environment(**config: Any) -> type:
    """A class for `env.name`, of the environment that `verifiers.v1.load_environment` makes of this
    `EnvConfig`: `taskset={"id": …}`, and each agent by its name.

    A specification is {"idx": N}, a task of the taskset. An action is the agent's reply. The reward
    is the trace's, at the end; its metrics are numbers of `info`.

    Raises:
        ValueError: verifiers is missing, in one line, or the config is invalid.
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
            index: Any = spec["idx"]
            tasks.extend(islice(stream, max(index + 1 - len(tasks), 0)))
            if not 0 <= index < len(tasks):
                raise ValueError(f"idx={index}: the taskset has {len(tasks)} tasks")
            self._dialogue = Dialogue(lambda ask: played(vf, env, tasks[index], ask))
            text = self._dialogue.listen()
            if text is None:
                raise ValueError("the episode ended before the policy was asked anything")
            return text

        def step(self, action: str) -> Turn:
            assert self._dialogue is not None, "reset begins an episode"
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
