"""Environments of OpenEnv (https://meta-pytorch.org/OpenEnv), over a server that runs already."""

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
    """A class for `env.name`, of the environment that a server of OpenEnv has at `url`.

    A specification is what `reset` takes, such as {"seed": N}. What `act` refuses with a ValueError
    and what the server finds invalid is no action: the policy is told so, and nothing changes.

    Args:
        act: the fields of an action, from its text; by default the text is JSON.
        describe: the text of an observation, from its fields; by default JSON.

    Raises:
        ValueError: OpenEnv is missing, in one line.
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
