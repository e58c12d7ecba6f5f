"""Copy a user's files (word lists, prompts, rewards, policies) to the machines of a cluster.

A setting names a file by its path, and the actors of a trial read that path on their own machines.
So each machine that lacks the file gets a copy at the same path. A file that already exists at that
path must have the same content. No file is ever overwritten, and files that all machines already
have are not sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.storage.digests import digest_of

SHIP_S = 600.0  # time limit for copying files to all machines


class ShippingError(RuntimeError):
    """A file could not be copied to a machine. The message names the file, the machine or both."""


# ---- On one machine ----------------------------------------------------------------------------


def lacking(files: Mapping[str, str]) -> list[str]:
    """Return the paths in `files` at which this machine has no file.

    Args:
        files: Path -> expected SHA-256.

    Raises:
        ShippingError: This machine has a different file at a path, or cannot read the file there.
    """
    here = [path for path in files if Path(path).exists()]
    for path in here:
        try:
            digest = digest_of("file", path)
        except ValueError as error:
            raise ShippingError(str(error)) from None
        if digest != files[path]:
            raise ShippingError(
                f"has a different file at {path}; remove it there, or give it the same content"
            )
    return [path for path in files if path not in here]


def contents(paths: Iterable[str], files: Mapping[str, str]) -> dict[str, bytes]:
    """Return a mapping from path to content for files on this machine.

    Args:
        paths: The files to read.
        files: Path -> expected SHA-256.

    Raises:
        ShippingError: A file has changed since its SHA-256 was computed.
    """
    found = {path: Path(path).read_bytes() for path in paths}
    for path, content in found.items():
        if hashlib.sha256(content).hexdigest() != files[path]:
            raise ShippingError(
                f"{path} changed while the experiment was starting; start the experiment again"
            )
    return found


def lay_down(files: Mapping[str, bytes]) -> None:
    """Write the files that this machine lacks.

    Args:
        files: Path -> content.

    Raises:
        ShippingError: This machine has a different file at a path, or a file cannot be written.
    """
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    for path in lacking(digests):
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(files[path])
        except OSError as error:
            raise ShippingError(f"cannot write {path} ({error.strerror})") from None


# ---- On the machines of a cluster --------------------------------------------------------------


def lacking_on(files: Mapping[str, str], nodes: Iterable[str]) -> set[str]:
    """Return the paths in `files` at which at least one of the machines has no file.

    Args:
        files: Path -> expected SHA-256.
        nodes: Ray's ids of the machines.

    Raises:
        ShippingError: A machine does not answer, or has a different file at a path.
    """
    return {path for paths in _on_each(nodes, lacking, dict(files)) for path in paths}


def ship(files: Any, nodes: Iterable[str]) -> None:
    """Write files on machines that lack them.

    Args:
        files: Ray's reference to a mapping from path to content.
        nodes: Ray's ids of the machines.

    Raises:
        ShippingError: A machine does not answer, has a different file at a path, or cannot write a
            file.
    """
    _on_each(nodes, lay_down, files)


def _on_each(nodes: Iterable[str], function: Callable[[Any], Any], argument: Any) -> list[Any]:
    """Call a function on each machine, and return the answers."""
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    end = monotonic() + SHIP_S
    asked = {node: _at(node, function).remote(argument) for node in nodes}
    answers = []
    for node, ref in asked.items():
        try:
            answers.append(ray.get(ref, timeout=max(0.0, end - monotonic())))
        except (RayError, ShippingError) as error:
            cause = getattr(error, "cause", error)
            told = " ".join(str(cause).split())[:300]
            if not isinstance(cause, ShippingError):
                told = f"could not receive the files ({told})"
            raise ShippingError(f"node {names.get(node, node)} of the cluster {told}") from error
    return answers


def _at(node: str, function: Callable[..., Any]) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.remote(**options)(function)
