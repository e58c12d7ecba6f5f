"""The files of the user's that an experiment rests on: reward, loss, task, data, policy, space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from reports.records import ExperimentRecord

SHORT = 12  # digits of a digest that are shown


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """A file as it was when the experiment started."""

    key: str  # the setting that names it; where arms name several files, followed by the path
    name: str  # its name without the directory
    sha256: str

    @property
    def setting(self) -> str:
        return self.key.partition(" ")[0]

    @property
    def short(self) -> str:
        return self.sha256[:SHORT]


def own_files(experiment: ExperimentRecord) -> list[OwnFile]:
    """The user's own files, in the order in which the experiment noted them."""
    paths = _texts(experiment.description, "own_files")
    digests = _texts(experiment.description, "inputs")
    return [
        OwnFile(key=key, name=PurePath(path).name, sha256=digests[key])
        for key, path in paths.items()
        if key in digests
    ]


def are_noted(experiment: ExperimentRecord) -> bool:
    """Whether the version that started the experiment noted which files are the user's."""
    return isinstance(experiment.description.get("own_files"), Mapping)


def _texts(description: Mapping[str, Any], key: str) -> dict[str, str]:
    """A mapping of texts; anybody may have written the experiment's description."""
    found = description.get(key)
    if not isinstance(found, Mapping):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str)}
