"""Brings a user's files to the machines of a cluster: word lists, prompts, rewards, policies.

A setting names a file by its path, which the actors of a trial read wherever they run. So each
machine gets the file at that path, where it has none. One that is there must be the same: nothing
is ever overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.atomic import replacing
from grpo_trainable.digests import digest_of

SHIP_S = 600.0  # for all machines together


class ShippingError(RuntimeError):
    """A machine cannot have a file; in one line that names both."""


def contents(files: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, bytes]:
    """Path -> content, of `files`: config key -> path. `digests`: config key -> SHA-256.

    Raises:
        ShippingError: a file is not what it was when its digest was taken.
    """
    found: dict[str, bytes] = {}
    for key, path in files.items():
        content = Path(path).read_bytes()
        if hashlib.sha256(content).hexdigest() != digests[key]:
            raise ShippingError(f"{key}: {path} has changed while the experiment was started")
        found[path] = content
    return found


def lay_down(files: Mapping[str, bytes]) -> str | None:
    """Writes the files that this machine lacks; what is in the way, in a line, or None."""
    for path, content in files.items():
        expected = hashlib.sha256(content).hexdigest()
        try:
            if not Path(path).exists():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    file.write(content)
            if digest_of("file", path) != expected:
                return f"has another file at {path}; remove it there, or make it the same"
        except (OSError, ValueError) as error:
            return f"cannot have {path} ({getattr(error, 'strerror', None) or error})"
    return None


def ship(files: Any, nodes: Iterable[str]) -> None:
    """Lays files down on machines, by their ids. `files`: a reference to what `contents` gives.

    Raises:
        ShippingError: a machine does not answer, or a file is in the way.
    """
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    asked = {node: _lay_down_at(node, files) for node in nodes}
    for node, ref in asked.items():
        try:
            wrong = ray.get(ref, timeout=SHIP_S)
        except RayError as error:
            wrong = f"does not take files ({' '.join(str(error).split())[:200]})"
        if wrong is not None:
            raise ShippingError(f"node {names.get(node, node)} of the cluster {wrong}")


def _lay_down_at(node: str, files: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    return ray.remote(**options)(lay_down).remote(files)
