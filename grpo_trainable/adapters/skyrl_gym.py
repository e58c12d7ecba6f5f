"""Adapter for SkyRL-Gym (https://docs.skyrl.ai) and its environments of class `BaseTextEnv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainable.adapters.optional_library import library
from grpo_trainable.environments import JSONValue, Turn
from grpo_trainable.tasks.messages import as_messages, text_of

NO_EXTRAS = ("prompt", "env_class")


def skyrl_gym_environment(name: str, **options: Any) -> type:
    """Return a class for `env.name` that plays `skyrl_gym.make(name, **options)`.

    Each episode uses a new environment. An episode's specification is a row of SkyRL's data set: a
    `prompt` (text or messages) and the other keys that the environment reads from its `extras`.

    Args:
        name: Name of the environment in SkyRL-Gym.
        **options: Options of `skyrl_gym.make`.

    Raises:
        ValueError: If SkyRL-Gym is not installed or has no environment of this name. The message
            is one line.
    """
    skyrl_gym = library("skyrl_gym", extra="skyrl-gym")
    if name not in skyrl_gym.registry:
        valid = ", ".join(sorted(skyrl_gym.registry))
        raise ValueError(f"SkyRL-Gym has no environment {name}; valid: {valid}")

    class Adapted:
        _env: Any = None

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            self.close()
            extras = {key: value for key, value in spec.items() if key not in NO_EXTRAS}
            self._env = skyrl_gym.make(name, extras=extras, **options)
            prompt: Any = spec["prompt"]
            messages, _ = self._env.init(as_messages(prompt))
            return f"{text_of(messages)}\n"

        def step(self, action: str) -> Turn:
            out = self._env.step(action)
            text, done = f"{text_of(out['observations'])}\n", bool(out["done"])
            info = {**out["metadata"], **(self._env.get_metrics() if done else {})}
            return Turn(text, float(out["reward"]), done, info)

        def close(self) -> None:
            if self._env is not None:
                self._env.close()

    return Adapted
