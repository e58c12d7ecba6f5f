"""Adapter for OpenEnv (https://meta-pytorch.org/OpenEnv) that uses a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from grpo_trainable.adapters.optional_library import library
from grpo_trainable.environments import JSONValue, Turn

NO_ACTION = Turn("not an action\n", info={"illegal": 1})


def openenv_environment(
    url: str,
    *,
    act: Callable[[str], Mapping[str, Any]] = json.loads,
    describe: Callable[[Mapping[str, Any]], str] = json.dumps,
) -> type:
    """Return a class for `env.name` that plays the environment of an OpenEnv server.

    An episode's specification contains the arguments of `reset`, such as {"seed": N}. An action is
    invalid if `act` raises a ValueError or a TypeError, or if the server rejects it. An invalid
    action leaves the environment unchanged, and the policy reads "not an action".

    Args:
        url: Address of the server.
        act: Parses the text of an action into fields. By default the text is JSON.
        describe: Describes the fields of an observation as text. By default the text is JSON.

    Raises:
        ValueError: If OpenEnv is not installed. The message is one line.
    """
    connect = library("openenv", extra="openenv").GenericEnvClient

    class Adapted:
        def __init__(self) -> None:
            self._client = connect(base_url=url).sync()

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            return f"{describe(self._client.reset(**spec).observation)}\n"

        def step(self, action: str) -> Turn:
            try:
                fields = dict(act(action))
            except (ValueError, TypeError):
                return NO_ACTION
            try:
                result = self._client.step(fields)
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                return NO_ACTION
            text, reward = f"{describe(result.observation)}\n", float(result.reward or 0.0)
            return Turn(text, reward, bool(result.done), {"illegal": 0})

        def close(self) -> None:
            self._client.close()

    return Adapted
