"""The defaults that a built-in task has of its own, in place of those in the schema.

`GRPOConfig.from_dict` fills them in for keys that are not given, so a trial's files and
`--dry-run` show them like any other value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainable.config.mix import mix_of
from grpo_trainable.config.schema import CHECKS, CONTROL, GAMES, MIX

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
    CONTROL: {
        "model.env": "CartPole-v1",
        "rollout.group_size": 8,
        "rollout.prompts": 8,
        "rollout.max_new_tokens": 500,
        "rollout.temperature": 1.0,
        "loss.advantage": "group_to_go",
        "loss.aggregation": "token_mean",
        "optim.lr": 3e-3,
        "optim.microbatch": 64,
        "eval.prompts": 20,
        "eval.samples": 1,
        "eval.temperature": 0.0,
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
    """A copy of nested plain data with the defaults of its task where a key is not given; those of
    a mix are the defaults of its tasks where these are all the same task."""
    filled = dict(data)
    task = data.get("task")
    task = dict(task) if isinstance(task, Mapping) else {}
    if task.get("mix") is not None and task.get("name") is None:
        filled["task"] = {**task, "name": MIX}
    for key, default in TASK_DEFAULTS.get(_task_of(task), {}).items():
        section, _, name = key.rpartition(".")
        given = filled.get(section, {})
        if isinstance(given, Mapping):
            filled[section] = {name: default, **given}
    return filled


def _task_of(task: Mapping[str, Any]) -> str:
    name = task.get("name")
    try:
        mixed = {entry["name"] for entry in mix_of(task.get("mix")).values()}
    except (TypeError, ValueError, RecursionError):
        mixed = set()  # the check of the key refuses it
    if len(mixed) == 1:
        (name,) = mixed
    return name if isinstance(name, str) else CHECKS["task.name"].default
