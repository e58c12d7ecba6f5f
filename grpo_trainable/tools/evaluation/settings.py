"""Settings of an evaluation: a trial's settings or the defaults, with the user's changes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_trainable.config import (
    CHECKS,
    OF_TRAINING,
    Check,
    ConfigError,
    GRPOConfig,
    flatten,
    make_absolute,
    mix_of,
    parse_assignment,
    parse_assignments,
    prepared,
    set_dotted,
    shown,
)
from grpo_trainable.config.reward_kinds import must_be_named
from grpo_trainable.plugins import is_reference
from grpo_trainable.tasks.custom import declared_settings, keys_with, with_task_settings
from grpo_trainable.tasks.input_files import InputChanged, input_digests

if TYPE_CHECKING:
    from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy

# The keys that an evaluation reads. A name with a final dot is a whole section, except for keys
# that only training reads (`OF_TRAINING`). An evaluation of a trial's checkpoint also uses the
# batch size and the thread count of the trial's generators.
READ = (
    *("model.", "task.", "env.", "eval.", "engine", "seed", "transport_dtype"),
    *("rollout.min_new_tokens", "rollout.max_new_tokens", "rollout.stop"),
    "resources.reward_workers",
)
# Command line option -> the key that it sets.
OPTIONS = {
    "--model": "model.path",
    "--task": "task.name",
    "--prompts": "eval.prompts",
    "--samples": "eval.samples",
    "--temperature": "eval.temperature",
    "--top-p": "eval.top_p",
    "--seed": "seed",
}


def is_read(key: str) -> bool:
    """Return True if an evaluation reads a key."""
    return key not in OF_TRAINING and (key in READ or f"{key.partition('.')[0]}." in READ)


def evaluation_config(
    trained: TrainedPolicy | None,
    assignments: Sequence[str],
    options: Mapping[str, Any],
    directory: str,
) -> GRPOConfig:
    """Return the config of a checkpoint's trial, or the default config, with the user's changes.

    If the user names a different task, the task settings start from their defaults, because the
    trial's task settings do not apply to that task.

    Args:
        trained: The checkpoint, or None to start from the defaults.
        assignments: Strings `KEY=VALUE` for keys that an evaluation reads.
        options: Values of the options in `OPTIONS`, keyed by name. None means that an option is
            not given.
        directory: Directory against which relative paths in these values are resolved.

    Raises:
        ConfigError: If a key is unknown or has no effect, if the settings contradict each other, if
            a model cannot be downloaded, or if the checkpoint names code that the user does not
            name.
        PluginError: If a user's task cannot be loaded.
        ValueError: If a file that the trial used can no longer be read.
        InputChanged: If a file that the trial read has changed.
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
    config = with_task_settings(GRPOConfig.from_dict(prepared(base, directory)), directory)
    if trained is not None:
        _refuse_changed(config, trained, given, checks)
    return config


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _task_name(assignments: Sequence[str], asked: Mapping[str, Any]) -> str | None:
    """Return the task that the user names, or None if the user names no task."""
    named = [parse_assignment(text)[1] for text in assignments if _key(text) == "task.name"]
    return asked.get("task.name", named[-1] if named else None)


def _trial_settings(trained: TrainedPolicy | None, task: str | None) -> dict[str, Any]:
    """Return a nested copy of the trial's settings, with `task` as the task to evaluate."""
    settings = {} if trained is None else trained.config.to_dict()
    of_eval = settings.get("eval", {})  # leave out settings that only schedule evaluations
    settings["eval"] = {k: v for k, v in of_eval.items() if f"eval.{k}" not in OF_TRAINING}
    own = settings.setdefault("task", {})
    if task is not None and task != own.get("name"):
        settings["task"] = {"name": task}
    return settings


def must_name(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return those of a trial's settings that an evaluation uses only if the user names them.

    These are code and judges, because checkpoints may be untrusted. Code named by settings that a
    user's task declares is left out, because finding it would run the task's file.

    Returns:
        Key -> the assignment `KEY=VALUE` that names it.
    """
    found = _unnamed(settings, CHECKS)
    flat = flatten(settings)
    if _code_in_mix(flat.get("task.mix")):
        found["task.mix"] = flat["task.mix"]
    if flat.get("env.allow_unsafe"):
        found["env.allow_unsafe"] = True
    return {key: assignment(key, value) for key, value in found.items()}


def assignment(key: str, value: Any) -> str:
    """Return the argument of the option `--set` that gives a setting this value."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _unnamed(settings: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return key -> value for the settings whose values name code or a judge."""
    flat = flatten(settings)
    found = {}
    for key, check in checks.items():
        value = flat.get(key)
        is_object = check.refers_to == "object" and isinstance(value, str) and is_reference(value)
        if is_read(key) and (is_object or (check.refers_to == "rewards" and must_be_named(value))):
            found[key] = value
    return found


def _refuse_unnamed_code(
    base: Mapping[str, Any], checks: Mapping[str, Check], named: Collection[str]
) -> None:
    """Reject code and judges that only a checkpoint names: checkpoints may be untrusted."""
    flat = flatten(base)
    if flat.get("env.allow_unsafe") and "env.allow_unsafe" not in named:
        raise ConfigError(
            "env.allow_unsafe=true: a checkpoint's setting is not enough; to run the policy's code "
            "without a sandbox, allow it yourself: --set env.allow_unsafe=true"
        )
    mix = flat.get("task.mix")
    if "task.mix" not in named and (code := _code_in_mix(mix)):
        label, first = code[0]
        raise ConfigError(
            f"task.mix, {label}: code or a judge that a checkpoint names is used only if you name "
            f"it too: {first}; give the whole mix with --set task.mix=…"
        )
    for key, value in _unnamed(base, checks).items():
        if key not in named:
            raise ConfigError(
                f"{key}={shown(value)}: code or a judge that a checkpoint names is used only if "
                f"you name it too: --set {shlex.quote(assignment(key, value))}"
            )


def _code_in_mix(mix: Any) -> list[tuple[str, str]]:
    """Return the code and the judges in a mix of tasks, each with the label of its task."""
    found = []
    for label, entry in mix_of(mix).items():
        others = (value for name, value in entry.items() if name != "reward")
        code = [v for v in others if isinstance(v, str) and is_reference(v)]
        found += [(label, one) for one in [*code, *must_be_named(entry.get("reward"))]]
    return found


def _given(
    assignments: Sequence[str], asked: Mapping[str, Any], checks: Mapping[str, Check]
) -> dict[str, Any]:
    """Return everything that the user changes, as dotted key -> value."""
    given = dict(asked)
    for key, value in parse_assignments(assignments, checks).items():
        if not is_read(key):
            read = ", ".join(f"{name}…" if name.endswith(".") else name for name in READ)
            why = "only training reads it" if key in OF_TRAINING else f"it reads {read}"
            raise ConfigError(f"{key}={shown(value)}: has no effect on an evaluation; {why}")
        if key in asked and asked[key] != value:
            option = next(name for name, own in OPTIONS.items() if own == key)
            raise ConfigError(
                f"{option} {shown(asked[key])} contradicts --set {key}={shown(value)}"
            )
        given[key] = value
    if given.get("eval.temperature") == 0:
        given.setdefault("eval.samples", 1)  # further samples would be identical
        given.setdefault("eval.top_p", 1.0)
    return given


def _refuse_changed(
    config: GRPOConfig,
    trained: TrainedPolicy,
    given: Mapping[str, Any],
    checks: Mapping[str, Check],
) -> None:
    """Check that files read by both the trial and the evaluation have not changed.

    Data files that the user names may differ. A policy at another path must have the same content.
    Code that the user had to name must have the same content too.

    Raises:
        InputChanged: If a file has changed.
        ValueError: If a file cannot be read.
    """
    now, before = flatten(config.to_dict()), flatten(trained.config.to_dict())
    other_task = config.task.name != trained.config.task.name

    def exchanged(key: str) -> bool:
        setting = key.partition("/")[0]  # the key of a file in a directory is SETTING/NAME
        check = checks.get(setting)
        if key.startswith("task.") and other_task:
            return True
        if check is None or setting not in given:
            return False
        # Each file of a reward model has its own key, but the setting names the model.
        named = setting if check.refers_to == "rewards" else key
        return check.refers_to == "path" or now.get(named) != before.get(named)

    same = {
        key: digest for key, digest in trained.inputs.items() if is_read(key) and not exchanged(key)
    }
    try:
        input_digests(config, before=same, keys=same)
    except InputChanged as error:
        setting = str(error).partition(":")[0].partition("/")[0]
        raise InputChanged(f"{error}{_way_on(setting, checks)}") from None


def _way_on(setting: str, checks: Mapping[str, Check]) -> str:
    """Return a clause that says how to evaluate with the changed file of a setting, or ""."""
    refers_to = checks[setting].refers_to if setting in checks else "nothing"
    if refers_to == "path":
        return f", or evaluate with the changed file: add --set {setting}=FILE"
    if refers_to not in ("object", "rewards") or setting == "task.name":
        return (
            ""  # with another task, the evaluation would not use the trial's settings of its task
        )
    return f", or copy the changed file to another name, and evaluate with --set {setting}=…"
