"""Environments: text in, text out, over several turns. `ENVIRONMENTS` names the shipped ones.

Only the standard library is imported, so that a process that plays starts soon.
"""

from grpo_trainable.environments.environment import Environment, JSONValue, Turn, as_text, as_turn

# `env.name` -> what it is made by.
ENVIRONMENTS = {
    "guess": "grpo_trainable.environments.guess:Guess",
    "calculator": "grpo_trainable.environments.calculator:Calculator",
    "python": "grpo_trainable.environments.python_tool:PythonTool",
}
# What makes `python` with `env.allow_unsafe=true`.
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
