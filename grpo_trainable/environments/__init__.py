"""Environments answer actions with text, over several turns.

`ENVIRONMENTS` lists the shipped environments. This package imports only the standard library, so
the processes that play episodes start quickly.
"""

from grpo_trainable.environments.environment import Environment, JSONValue, Turn, as_text, as_turn

# `env.name` -> the class that implements it.
ENVIRONMENTS = {
    "guess": "grpo_trainable.environments.guess:Guess",
    "calculator": "grpo_trainable.environments.calculator:Calculator",
    "python": "grpo_trainable.environments.python_tool:PythonTool",
}
# The class that implements `python` with `env.allow_unsafe=true`.
UNSAFE_PYTHON = "grpo_trainable.environments.python_tool:UnsafePythonTool"

__all__ = [
    "ENVIRONMENTS",
    "UNSAFE_PYTHON",
    "Environment",
    "JSONValue",
    "Turn",
    "as_text",
    "as_turn",
]
