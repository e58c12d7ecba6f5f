"""The settings of an evaluation: a trial's own, or the defaults, with what the user changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_trainable.config import (
    CHECKS,
    Check,
    ConfigError,
    GRPOConfig,
    flatten,
    make_absolute,
    mix_of,
    parse_assignment,
    set_dotted,
    shown,
)
from grpo_trainable.plugins import is_reference
from grpo_trainable.tasks.custom import declared_settings, keys_with, with_task_settings
from grpo_trainable.tasks.input_files import input_digests
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy

# The keys that an evaluation reads; a name with a dot at its end is a whole section. A trial's own
# evaluation is repeated in the batches and with the threads of its generators as well.
READ = (
    *("model.", "task.", "env.", "engine", "seed", "transport_dtype"),
    *("rollout.min_new_tokens", "rollout.max_new_tokens", "rollout.stop"),
    *("eval.prompts", "eval.samples", "eval.temperature"),
    "resources.reward_workers",
)
# Command line option -> the key that it stands for.
OPTIONS = {
    "--model": "model.path",
    "--task": "task.name",
    "--prompts": "eval.prompts",
    "--samples": "eval.samples",
    "--temperature": "eval.temperature",
    "--seed": "seed",
}


def is_among(key: str, keys: Sequence[str]) -> bool:
    """Whether a table like `READ` has a key, or its section."""
    return key in keys or f"{key.partition('.')[0]}." in keys


def evaluation_config(
    trained: TrainedPolicy | None,
    assignments: Sequence[str],
    options: Mapping[str, Any],
    directory: str,
) -> GRPOConfig:
    """The config of a checkpoint's trial, or the default one, with what the user changes.

    Another task begins with its own defaults: what the trial set for its task means nothing there.

    Args:
        trained: the checkpoint; None: the defaults.
        assignments: `KEY=VALUE`, each of a key that an evaluation reads.
        options: values by the names of `OPTIONS`; None where one was not given.
        directory: what relative paths among them mean.

    Raises:
        ConfigError: a key is unknown or not read, the settings contradict each other, or the
            checkpoint names code that the user does not name.
        PluginError: a task of the user's cannot be loaded.
        ValueError: a file that the trial read cannot be read.
        InputChanged: a file that the trial read has changed.
    """
    asked = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    named = {*asked, *(_key(text) for text in assignments)}
    base = _trial_settings(trained, task=_task_name(assignments, asked))
    _refuse_unnamed_code(base, CHECKS, named)
    default: str = CHECKS["task.name"].default
    name: str = base.get("task", {}).get("name", default)
    checks = keys_with(name) if is_reference(name) else CHECKS
    given = _given(assignments, asked, checks)
    nested: dict[str, Any] = {}
    for key, value in given.items():
        set_dotted(nested, key, value)
    for key, value in flatten(make_absolute(nested, directory, checks)).items():
        set_dotted(base, key, value)
    if is_reference(name):
        _refuse_unnamed_code(base, declared_settings(name), named)
    config = with_task_settings(GRPOConfig.from_dict(base), directory)
    if trained is not None:
        _refuse_changed(config, trained, given, checks)
    return config


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _task_name(assignments: Sequence[str], asked: Mapping[str, Any]) -> str | None:
    """The task that the user names; None: that of the trial, or the default."""
    named = [parse_assignment(text)[1] for text in assignments if _key(text) == "task.name"]
    return asked.get("task.name", named[-1] if named else None)


def _trial_settings(trained: TrainedPolicy | None, task: str | None) -> dict[str, Any]:
    """A copy of the trial's settings, nested, with the name of the `task` that is evaluated."""
    settings = {} if trained is None else trained.config.to_dict()
    own = settings.setdefault("task", {})
    if task is not None and task != own.get("name"):
        settings["task"] = {"name": task}
    return settings


def _refuse_unnamed_code(
    base: Mapping[str, Any], checks: Mapping[str, Check], named: Collection[str]
) -> None:
    """A checkpoint may be anybody's, so what it says runs no code that the user does not name."""
    flat = flatten(base)
    if flat.get("env.allow_unsafe") and "env.allow_unsafe" not in named:
        raise ConfigError(
            "env.allow_unsafe=true: a checkpoint's setting; code that the policy writes runs "
            "uncontained only where you allow it as well: --set env.allow_unsafe=true"
        )
    for key, check in checks.items():
        value = flat.get(key)
        if check.refers_to == "tasks" and key not in named:
            _refuse_unnamed_tasks(key, value)
        if check.refers_to != "object" or not is_among(key, READ) or key in named:
            continue
        if isinstance(value, str) and is_reference(value):
            raise ConfigError(
                f"{key}={shown(value)}: code that a checkpoint names runs only where you name it "
                f"as well: --set {key}={value}"
            )


def _refuse_unnamed_tasks(key: str, mix: Any) -> None:
    for label, entry in mix_of(mix).items():
        code = [v for v in entry.values() if isinstance(v, str) and is_reference(v)]
        if code:
            raise ConfigError(
                f"{key}, {label}: code that a checkpoint names runs only where you name it as "
                f"well: {code[0]}; give the whole mix by --set {key}=…"
            )


def _given(
    assignments: Sequence[str], asked: Mapping[str, Any], checks: Mapping[str, Check]
) -> dict[str, Any]:
    """Dotted key -> value of everything that the user changes."""
    given = dict(asked)
    for text in assignments:
        key, value = parse_assignment(text, checks)
        if not is_among(key, READ):
            read = ", ".join(f"{name}…" if name.endswith(".") else name for name in READ)
            raise ConfigError(
                f"{key}={shown(value)}: an evaluation does not read it; it reads {read}"
            )
        if key in asked and asked[key] != value:
            option = next(name for name, own in OPTIONS.items() if own == key)
            raise ConfigError(f"{option} {shown(asked[key])} contradicts --set {text}")
        given[key] = value
    if given.get("eval.temperature") == 0:
        given.setdefault("eval.samples", 1)  # more would all be the same
    return given


def _refuse_changed(
    config: GRPOConfig,
    trained: TrainedPolicy,
    given: Mapping[str, Any],
    checks: Mapping[str, Check],
) -> None:
    """Compares the files that trial and evaluation both read, but for data that the user names. A
    policy in another place must be the same, and so must code that the user had to name."""
    now, before = flatten(config.to_dict()), flatten(trained.config.to_dict())
    other_task = config.task.name != trained.config.task.name

    def exchanged(key: str) -> bool:
        check = checks.get(key)
        if key.startswith("task.") and other_task:
            return True
        if check is None or key not in given:  # `model.path/NAME` is no key
            return False
        return check.refers_to == "path" or now.get(key) != before.get(key)

    same = {
        key: digest
        for key, digest in trained.inputs.items()
        if is_among(key, READ) and not exchanged(key)
    }
    input_digests(config, before=same, keys=same)
