"""The user's own files that an experiment read: reward, loss, task, data, policy, search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from reports.records import ExperimentRecord

SHORT = 12  # number of digits of a digest to show


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """A user's file as of the start of the experiment, or of its last resume with changed code."""

    # Setting that names the file. If arms name different files, the setting is followed by the path
    # for every file except the first.
    key: str
    name: str  # file name without the directory
    sha256: str

    @property
    def setting(self) -> str:
        """Setting that names the file."""
        return self.key.partition(" ")[0]

    @property
    def short(self) -> str:
        """First digits of the digest."""
        return self.sha256[:SHORT]


def own_files(experiment: ExperimentRecord) -> list[OwnFile]:
    """Return the user's own files in the order in which the experiment recorded them."""
    paths = _texts(experiment.description, "own_files")
    digests = _texts(experiment.description, "inputs")
    return [
        OwnFile(key=key, name=PurePath(path).name, sha256=digests[key])
        for key, path in paths.items()
        if key in digests
    ]


def replaced(experiment: ExperimentRecord) -> int:
    """Count the changed files that were found by resumes after the experiment had results.

    A file that changed before each of two resumes counts twice.
    """
    found = experiment.description.get("replaced")
    return len(found) if isinstance(found, list) else 0


def changed_code(experiment: ExperimentRecord) -> str:
    """Return a warning if the user's code changed during the experiment, else an empty string."""
    if not replaced(experiment):
        return ""
    return (
        "Your code changed after the start (--accept-changed-code). If the code of the reward "
        "changed, the rewards before and after the change cannot be compared."
    )


def are_noted(experiment: ExperimentRecord) -> bool:
    """Return True if the experiment recorded the user's files. Old experiments did not."""
    return isinstance(experiment.description.get("own_files"), Mapping)


def _texts(description: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the entries of `description[key]` whose key and value are strings.

    Other content is ignored, because anyone may have written the description.
    """
    found = description.get(key)
    if not isinstance(found, Mapping):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str)}
