"""Adapter for TRL's `environment_factory`: objects with `reset()` and public methods as tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_trainable.adapters import tool_calls
from grpo_trainable.environments import JSONValue, Turn
from grpo_trainable.tasks.messages import text_of

TOOLS = "Tools, called as name(argument=value):\n"


def trl_environment(
    factory: Callable[[], Any], *, reward: Callable[[Any], Any] | None = None, calls: int = 8
) -> type:
    """Return a class for `env.name` that plays environments made by `factory`.

    An episode's specification is a row of the data set, and `reset` gets the whole row. An action
    that is a tool call (`tool_calls.parse_call`) is answered as in TRL. Any other action ends the
    episode.

    Args:
        factory: Returns a new environment.
        reward: Returns the reward of an environment at the end of the episode. By default, the
            environment's method `get_reward()` returns it.
        calls: Maximum number of tool calls per episode. The call that reaches this number ends the
            episode.
    """

    class Adapted:
        def __init__(self) -> None:
            self._env = factory()
            self._tools = tool_calls.public_methods(self._env, without=("reset", "get_reward"))
            if reward is None and not hasattr(self._env, "get_reward"):
                raise ValueError("the environment has no get_reward(): pass reward=FUNCTION")

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            self._calls = 0
            said = [text_of(spec.get("prompt")), text_of(self._env.reset(**spec))]
            tools = TOOLS + tool_calls.tool_lines(self._tools.values())
            return "\n".join([tools, *filter(None, said), ""])

        def step(self, action: str) -> Turn:
            call = tool_calls.parse_call(action)
            said, failed = ("", False) if call is None else tool_calls.answered(self._tools, call)
            self._calls += call is not None
            info = {"calls": int(call is not None), "failed": int(failed)}
            if call is not None and self._calls < calls:
                return Turn(f"{said}\n", info=info)
            earned = self._env.get_reward() if reward is None else reward(self._env)
            return Turn(f"{said}\n", float(tool_calls.waited_for(earned)), True, info)

        def close(self) -> None:
            """No resources to release."""

    return Adapted
