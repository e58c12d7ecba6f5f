"""What TRL takes as `environment_factory`: `reset()`, and public methods that are tools."""

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
    """A class for `env.name`, of the environments that `factory` makes.

    A specification is a row of the data set, all of which `reset` gets. An action that is a tool
    call (`tool_calls.parse_call`) is answered as TRL would; any other ends the episode.

    Args:
        reward: what the environment has earned, asked once in the end; None: its `get_reward()`.
        calls: the most tool calls of an episode, the last of which ends it.
    """

    class Adapted:
        def __init__(self) -> None:
            self._env = factory()
            self._tools = tool_calls.public_methods(self._env, without=("reset", "get_reward"))
            if reward is None and not hasattr(self._env, "get_reward"):
                raise ValueError("the environment has no get_reward(): give reward=FUNCTION")

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
            """Holds nothing."""

    return Adapted
