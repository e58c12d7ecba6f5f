"""Differences between two evaluations besides their policies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_trainable.config import shown
from grpo_trainable.tools.evaluation.settings import is_read
from reports.evaluations.record import EvaluationRecord
from reports.markup import visible

# Sections of a config that say how the responses of a policy are sampled and scored.
SECTIONS = ("task", "env", "rollout", "eval")
# Settings in these sections that change neither a response to a prompt nor its reward. Files of
# prompts may change the true answers, but these are compared directly.
NO_EFFECT = {
    *("task.train_file", "task.eval_file", "task.keywords_file", "task.keywords_per_prompt"),
    *("task.size", "task.max_error_rate", "task.strict"),
    *("env.allow_unsafe", "env.patience_s", "eval.prompts", "eval.samples"),
}
_MIX = "task.mix"


def takes_part(key: str) -> bool:
    """Return True if an input file, named by its config key, takes part in sampling or scoring.

    The files of the policy and of the prompts do not count.
    """
    setting = key.partition("/")[0]
    if setting == _MIX:  # task.mix/LABEL/NAME, perhaps with another / and the name of a file
        setting = f"task.{key.split('/')[2]}"
    return is_read(setting) and not setting.startswith("model.") and setting not in NO_EFFECT


def changes(own: EvaluationRecord, other: EvaluationRecord) -> list[str]:
    """Return what may change rewards or responses besides the policy, as short texts.

    These are settings for sampling and scoring, the content of files such as a reward function or a
    judge, and true answers of prompts. A setting or file that an evaluation of an earlier version
    does not have is not compared.
    """
    ours, theirs = _settings(own), _settings(other)
    files, before = (record.origin.get("files", {}) for record in (own, other))
    changed = [
        key
        for key in ours.keys() & theirs.keys()
        if ours[key] != theirs[key]
        and not _only_moved(ours[key], theirs[key], _under(key, files), _under(key, before))
    ]
    named = {name for key in changed for name in _under(key, files)}
    edited = [key for key in files.keys() & before.keys() if files[key] != before[key]]
    return [
        *(f"{k}={_text(ours[k])} (the other: {_text(theirs[k])})" for k in sorted(changed)),
        *(f"{key} (its file has changed)" for key in sorted(set(edited) - named)),
        *_other_answers(own, other),
    ]


def _settings(record: EvaluationRecord) -> dict[str, Any]:
    """Return key -> value for the settings that change responses or rewards.

    A mix of tasks has the key `task.mix/LABEL` for each of its tasks.
    """
    every = {
        f"{section}.{name}": _parsed(value)
        for section in SECTIONS
        for name, value in record.config.get(section, {}).items()
    }
    mix = every.pop(_MIX, None)
    settings = {key: value for key, value in every.items() if takes_part(key)}
    for label, entry in mix.items() if isinstance(mix, Mapping) else ():
        if isinstance(entry, Mapping):
            settings[f"{_MIX}/{label}"] = {
                name: value
                for name, value in entry.items()
                if name != "weight" and f"task.{name}" not in NO_EFFECT
            }
    return settings


def _parsed(value: Any) -> Any:
    """Return a setting's value, parsed if it is JSON, so that spaces do not matter."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass  # a text that only looks like JSON is compared as it is
    return value


def _under(key: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the files that a setting names."""
    return {name: digest for name, digest in files.items() if f"{name}/".startswith(f"{key}/")}


def _only_moved(own: Any, other: Any, files: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Return True if two values name the same objects in files with equal content."""
    return bool(files) and files == before and _without_files(own) == _without_files(other)


def _without_files(value: Any) -> str:
    """Return a value as text, where `DIRECTORY/FILE.py:NAME` has become `NAME`."""
    return re.sub(r'[^\s"\[,]*[:/]', "", json.dumps(value))


def _text(value: Any) -> str:
    return visible(value) if isinstance(value, str) else shown(value)


def _other_answers(own: EvaluationRecord, other: EvaluationRecord) -> Iterable[str]:
    ours, theirs = _answers(own), _answers(other)
    differing = [text for text in ours.keys() & theirs.keys() if ours[text] != theirs[text]]
    if differing:
        yield f"the true answers of prompts ({len(differing)} differ)"


def _answers(record: EvaluationRecord) -> dict[str, set[str]]:
    """Return the true answers of each prompt. A repeated prompt may have several."""
    found: dict[str, set[str]] = {}
    for own in record.generations:
        found.setdefault(own.prompt, set()).add(json.dumps(own.ground_truth, sort_keys=True))
    return found
