"""A Ray cluster that somebody else has started: joins it, and looks whether its nodes serve."""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.command_line import UsageError

ANSWER_S = 5.0  # for a connection to the address
LOOK_S = 60.0  # for all nodes together, each of which starts a process
TOKEN = (
    "its token must be in ~/.ray/auth_token here (or in RAY_AUTH_TOKEN), and Ray must be "
    f"{ray.__version__} there as well"
)


def join(address: str, **options: Any) -> None:
    """`ray.init` with the address of a cluster.

    Raises:
        UsageError: nobody listens there, or Ray does not let us in; in one line.
    """
    _refuse_silence(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--address {address}: Ray does not let us in ({reason}); {TOKEN}"
        ) from error


def _refuse_silence(address: str) -> None:
    """Tries HOST:PORT before Ray does, which would take twenty seconds and tell less."""
    found = re.fullmatch(r"(?:ray://)?(?P<host>.+):(?P<port>\d+)", address)
    if found is None:
        return  # auto
    try:
        socket.create_connection((found["host"], int(found["port"])), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: nobody answers there ({error}); `ray status` on the head of the "
            "cluster tells its address"
        ) from None


def check_nodes(storage: Path) -> None:
    """Looks from every node at the directory of the experiments and for this package.

    Raises:
        UsageError: a node does not answer, sees another directory, or lacks the package.
    """
    storage.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=storage, prefix=".seen-from-every-node-") as file:
        seen = {node: _look_from(node_id, file.name) for node, node_id in _nodes().items()}
        for node, ref in seen.items():
            try:
                wrong = ray.get(ref, timeout=LOOK_S)
            except RayError as error:
                reason = " ".join(str(error).split())[:200]
                raise UsageError(f"node {node} of the cluster cannot be used ({reason})") from error
            if wrong == "storage":
                raise UsageError(
                    f"--storage {storage}: node {node} of the cluster does not see it; choose a "
                    "directory that all nodes share"
                )
            if wrong == "package":
                raise UsageError(
                    f"node {node} of the cluster has no grpo_trainable; install it there, in the "
                    "environment that Ray was started in"
                )


def _nodes() -> dict[str, str]:
    """Address -> id of the nodes that are alive."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return {node["NodeManagerAddress"]: node["NodeID"] for node in alive}


def _look_from(node_id: str, path: str) -> Any:
    """A reference to what a node lacks: `storage`, `package` or nothing."""

    # Within a function it travels by value: a node without our package can run it.
    def look() -> str | None:
        import importlib.util
        import os

        if not os.path.exists(path):
            return "storage"
        return None if importlib.util.find_spec("grpo_trainable") else "package"

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    return ray.remote(**options)(look).remote()
