"""Record a command's settings in its output directory.

Only the same command can continue the work in this directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.text import plural


def record_or_match(file: Path, asked: Mapping[str, Any], *, what: str, advice: str) -> None:
    """Record the settings of a new directory, or check that the recorded settings are the same.

    Args:
        file: The file with the settings, in the directory. The directory must exist.
        asked: All settings that determine the content of the directory, as plain data.
        what: A noun for the content of the directory, such as "a set".
        advice: The beginning of the advice to repeat the original command.

    Raises:
        ValueError: If the directory contains something else, or was made with different settings.
            The message is one line.
        OSError: If the file cannot be read or written.
    """
    directory = file.parent
    if not file.exists():
        if any(directory.iterdir()):
            raise ValueError(f"{directory}: is not empty; choose a new directory")
        with replacing(file, durable=True) as new:
            new.write(json.dumps(asked, indent=1).encode() + b"\n")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{file}: is damaged; choose a new directory")
    differing = [
        f"{key} was {then} and is {now}"
        for key in sorted(before.keys() | asked.keys())
        if before.get(key) != asked.get(key)
        for then, now in [_told_apart(before.get(key), asked.get(key))]
    ]
    if differing:
        raise ValueError(
            f"{directory}: contains {what} with different settings: {'; '.join(differing)}. "
            f"{advice} the original command to continue it, or choose a new directory"
        )


def _told_apart(then: Any, now: Any) -> tuple[str, str]:
    """Describe briefly how two values differ.

    Lists of different lengths are described by their lengths, and other lists by their first
    difference.
    """
    if not (isinstance(then, list) and isinstance(now, list)):
        return json.dumps(then), json.dumps(now)
    if len(then) != len(now):
        return f"for {plural(len(then), 'prompt')}", f"for {plural(len(now), 'prompt')}"
    pairs = enumerate(zip(then, now, strict=True), start=1)
    number, (old, new) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return f"{json.dumps(old)} for prompt {number}", json.dumps(new)
