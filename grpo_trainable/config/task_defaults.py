"""The defaults that a built-in task has of its own, in place of those in the schema.

`GRPOConfig.from_dict` fills them in for keys that are not given, so a trial's files and
`--dry-run` show them like any other value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainable.config.schema import CHECKS, GAMES

# Task -> dotted key of a section -> default. docs/defaults.md says why.
TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "math": {
        "model.preset": "arithmetic",
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 64,
        "rollout.temperature": 1.0,
        "optim.lr": 1e-4,
        "eval.temperature": 1.0,
    },
    **{
        game: {
            "model.preset": "games",
            "env.name": game,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 40,
            "rollout.temperature": 1.0,
            "optim.lr": 5e-4,
            "eval.temperature": 1.0,
        }
        for game in GAMES
    },
}


def default_of(key: str, task: str) -> Any:
    """The value of a dotted key that is not given, in a trial of this task."""
    return TASK_DEFAULTS.get(task, {}).get(key, CHECKS[key].default)


def with_task_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested plain data with the defaults of its task where a key is not given."""
    filled = dict(data)
    for key, default in TASK_DEFAULTS.get(_task_of(data), {}).items():
        section, _, name = key.rpartition(".")
        given = filled.get(section, {})
        if isinstance(given, Mapping):
            filled[section] = {name: default, **given}
    return filled


def _task_of(data: Mapping[str, Any]) -> str:
    task = data.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    return name if isinstance(name, str) else CHECKS["task.name"].default
