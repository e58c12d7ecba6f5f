"""Differences between two evaluations besides their policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grpo_trainable.config import defaults_with
from grpo_trainable.text import plural
from grpo_trainable.tools.evaluation.settings import is_read
from reports.evaluations.record import EvaluationRecord
from reports.markup import visible

# Sections of a config that say how the responses of a policy are sampled and scored.
SECTIONS = ("task", "env", "rollout", "eval")
# Settings in these sections that change neither a response to a prompt nor its reward. Files of
# prompts may change the true answers, but the answers are compared directly.
NO_EFFECT = {
    *("task.train_file", "task.eval_file", "task.keywords_file", "task.keywords_per_prompt"),
    *("task.size", "task.max_error_rate", "task.strict"),
    *("env.allow_unsafe", "env.patience_s", "eval.prompts", "eval.samples"),
}
_MIX = "task.mix"


def takes_part(key: str) -> bool:
    """Return True if a setting or an input file takes part in sampling or scoring.

    The policy, the engine and the choice of prompts do not count.

    Args:
        key: A config key, or the key of a file, such as `task.reward/1`. In a mix of tasks, such a
            key begins with `task.mix/LABEL/NAME`.
    """
    setting = key.partition("/")[0]
    if setting == _MIX and key != _MIX:
        setting = f"task.{key.split('/')[2]}"
    section = setting.partition(".")[0]
    return section in SECTIONS and is_read(setting) and setting not in NO_EFFECT


def changes(own: EvaluationRecord, other: EvaluationRecord) -> list[str]:
    """Return what may change rewards or responses besides the policy, as short texts.

    These are settings for sampling and scoring, the content of files such as a reward function or a
    judge, and true answers of prompts. A setting or file that is missing from an evaluation of an
    earlier version is not compared.
    """
    ours, theirs = _settings(own), _settings(other)
    ours_mixed, theirs_mixed = _mix(own), _mix(other)
    if ours_mixed.keys() != theirs_mixed.keys():
        ours[_MIX], theirs[_MIX] = (
            ", ".join(sorted(m)) or None for m in (ours_mixed, theirs_mixed)
        )
    for label in ours_mixed.keys() & theirs_mixed.keys():
        for settings, entry, beside in (
            (ours, ours_mixed[label], theirs_mixed[label]),
            (theirs, theirs_mixed[label], ours_mixed[label]),
        ):
            settings.update(_of_entry(label, entry, beside))
    files, before = (record.origin.get("files", {}) for record in (own, other))
    changed = [
        key
        for key in sorted(ours.keys() & theirs.keys())
        if _parsed(ours[key]) != _parsed(theirs[key])
    ]
    named = {name for key in changed for name in _under(key, files)}
    edited = {key for key in files.keys() & before.keys() if files[key] != before[key]}
    return [
        *(_told(key, ours[key], theirs[key], files, before) for key in changed),
        *(f"{key} (its file has changed)" for key in sorted(edited - named)),
        *_other_answers(own, other),
    ]


def _settings(record: EvaluationRecord) -> dict[str, Any]:
    """Return key -> value for the settings that change responses or rewards, without the mix."""
    settings = {
        f"{section}.{name}": value
        for section in SECTIONS
        for name, value in record.config.get(section, {}).items()
    }
    return {key: value for key, value in settings.items() if takes_part(key) and key != _MIX}


def _mix(record: EvaluationRecord) -> dict[str, Mapping[str, Any]]:
    """Return label -> settings for the tasks of a mix; empty if there is no mix."""
    mix = _parsed(record.config.get("task", {}).get("mix"))
    entries = mix.items() if isinstance(mix, Mapping) else ()
    return {label: entry if isinstance(entry, Mapping) else {} for label, entry in entries}


def _of_entry(
    label: str, entry: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the key `task.mix/LABEL/NAME` and the value of each setting that either entry gives.

    Args:
        label: The label of a task that is in both mixes.
        entry: The settings that one mix gives. Other settings have their defaults.
        other: The settings that the other mix gives.
    """
    defaults = defaults_with(str(entry.get("name")))
    for name in {**entry, **other}:
        key = f"{_MIX}/{label}/{name}"
        if name != "weight" and takes_part(key):
            yield key, entry.get(name, defaults.get(f"task.{name}"))


def _parsed(value: Any) -> Any:
    """Return a setting's value, parsed if it is JSON, so that spaces do not matter."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass  # a text that only looks like JSON is compared as it is
    return value


def _under(key: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the files that a setting names. The labels of a mix name no files."""
    if key == _MIX:
        return {}
    return {name: digest for name, digest in files.items() if f"{name}/".startswith(f"{key}/")}


def _told(
    key: str, own: Any, other: Any, files: Mapping[str, str], before: Mapping[str, str]
) -> str:
    """Return a setting with its two values, and say if the files that the values name are equal."""
    ours, theirs = _under(key, files), _under(key, before)
    of_files = ""
    if ours and theirs:
        of_files = f"; the files {'are equal' if ours == theirs else 'differ'}"
    return f"{key}={_text(own)} (the other: {_text(other)}{of_files})"


def _text(value: Any) -> str:
    """Return a value as one visible line. The other evaluation may come from anybody."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return visible(" ".join(text.split()))


def _other_answers(own: EvaluationRecord, other: EvaluationRecord) -> Iterable[str]:
    """Yield the number of shared prompts whose true answers differ.

    If an evaluation repeats a prompt less often than the other one, it may have only some of the
    prompt's true answers.
    """
    ours, theirs = _answers(own), _answers(other)
    shared = [(ours[text], theirs[text]) for text in ours.keys() & theirs.keys()]
    count = sum(not (mine <= others or others <= mine) for mine, others in shared)
    if count:
        yield f"the true answers of {plural(count, 'prompt')}"


def _answers(record: EvaluationRecord) -> dict[str, set[str]]:
    """Return the true answers of each prompt. A repeated prompt may have several."""
    found: dict[str, set[str]] = {}
    for own in record.generations:
        # Convert the answers as writing them to a file does: keys that are numbers become texts.
        stored = json.loads(json.dumps(own.ground_truth))
        found.setdefault(own.prompt, set()).add(json.dumps(stored, sort_keys=True))
    return found
