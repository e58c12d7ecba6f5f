"""`task.mix`: the tasks that a trial mixes, each under a label, as JSON text.

    {"keyword": 0.5, "hard": {"name": "math", "weight": 0.3, "train_file": "hard.jsonl"}}

A key is the name of a task, or a label for an entry that has a `name`. A value is a weight, or an
object with the weight and the settings of the task.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_trainable.plugins import is_reference

MAX_WEIGHT = 1e6

Entry = dict[str, Any]  # `name`, `weight`, and settings of the task


def mix_of(given: Any) -> dict[str, Entry]:
    """Return the entry of each label, from the text of `task.mix` or an equivalent mapping.

    For None, the result is empty.

    Raises:
        TypeError: The value is empty, or one of these has the wrong type: the value, a label, a
            name or a weight.
        ValueError: The text is not JSON, a key occurs twice, or a label or a weight is invalid.
        RecursionError: The JSON is nested too deeply.
    """
    if given is None:
        return {}
    listed = json.loads(given, object_pairs_hook=_distinct) if isinstance(given, str) else given
    if not isinstance(listed, Mapping) or not listed:
        raise TypeError
    return _distinct([(_label(key), _entry(key, value)) for key, value in listed.items()])


def mix_text(entries: Mapping[str, Entry]) -> str:
    """Return the text of `task.mix` with these entries."""
    return json.dumps(entries, ensure_ascii=False)


def weights_of(given: Any) -> dict[str, float]:
    """Return the weight of each label, not normalised."""
    return {label: entry["weight"] for label, entry in mix_of(given).items()}


def with_absolute_paths(given: Any, settle: Callable[[Entry], Entry]) -> Any:
    """Return the mix with `settle` applied to each entry.

    An invalid mix is returned unchanged, because it is rejected later, when `task.mix` is checked.

    Args:
        given: The text of `task.mix`, or an equivalent mapping.
        settle: Function that makes the paths of an entry absolute. `settle` receives the entry
            without its weight.
    """
    try:
        entries = mix_of(given)
    except (TypeError, ValueError, RecursionError):
        return given
    return mix_text(
        {
            label: settle({k: v for k, v in entry.items() if k != "weight"})
            | {"weight": entry["weight"]}
            for label, entry in entries.items()
        }
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Reject repeated keys, because `json` would keep only the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _label(key: Any) -> str:
    """Return the label for a key. The label of a user's class is the class name.

    Labels become parts of metric names.
    """
    if not isinstance(key, str):
        raise TypeError
    label = key.rpartition(":")[2] if is_reference(key) else key
    if re.fullmatch(r"[A-Za-z][\w-]*", label) is None:
        raise ValueError
    return label


def _entry(key: str, value: Any) -> Entry:
    given = value if isinstance(value, Mapping) else {"weight": value}
    entry = {"name": key, **given}
    weight = entry.get("weight")
    if not isinstance(entry["name"], str):
        raise TypeError
    # Python counts True as a number.
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError
    if not math.isfinite(weight):
        raise TypeError
    if not 0 < weight <= MAX_WEIGHT:
        raise ValueError
    return entry
