"""A Ray cluster that somebody else has started: joins it, and looks whether its nodes serve."""

from __future__ import annotations

import os
import pickle
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_trainable.cluster.shipping import ShippingError, contents, lacking_on, ship
from grpo_trainable.command_line import UsageError
from grpo_trainable.storage.digests import package_digest
from grpo_trainable.storage.object_store import AnyPath, StoredPath, refusal

ANSWER_S = 5.0  # time limit for a connection to the address
LOOK_S = 60.0  # time limit for all nodes, each of which starts a process
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


def check_nodes(storage: AnyPath) -> None:
    """Looks from every node at the directory of the experiments and for this package.

    Raises:
        UsageError: a node does not answer, sees another directory, or lacks the package as it is
            here.
    """
    if not isinstance(storage, Path):
        _check_each(storage, partial(_may_write, storage))
        return
    storage.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=storage, prefix=".seen-from-every-node-") as file:
        _check_each(storage, partial(_exists, file.name))


def ship_to_nodes(files: Mapping[str, str]) -> dict[str, bytes]:
    """Gives every node those of the user's files, path -> SHA-256, that it lacks. Returns what any
    node lacked: one that joins later gets it from the trials that run there.

    Raises:
        UsageError: a node cannot have one, in one line.
    """
    try:
        shipped = contents(lacking_on(files, _nodes().values()), files) if files else {}
        if shipped:
            ship(ray.put(shipped), _nodes().values())
    except ShippingError as error:
        raise UsageError(str(error)) from None
    return shipped


def _check_each(storage: AnyPath, refuses: Callable[[], str | None]) -> None:
    """`refuses` says on a node, in a line, why the storage cannot be used from there."""
    here = package_digest()
    seen = {node: _look_from(node_id, refuses) for node, node_id in _nodes().items()}
    for node, ref in seen.items():
        try:
            package, wrong = ray.get(ref, timeout=LOOK_S)
        except RayError as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"node {node} of the cluster cannot be used ({reason})") from error
        if package != here:
            has = "no grpo_trainable" if package is None else "another version of grpo_trainable"
            raise UsageError(
                f"node {node} of the cluster has {has}; install the one that is here, in the "
                "environment that Ray was started in there"
            )
        if wrong is not None:
            raise UsageError(f"--storage {storage}: node {node} of the cluster {wrong}")


def _exists(path: str) -> str | None:
    seen = os.path.exists(path)
    return None if seen else "does not see it; choose a directory that all nodes share"


def _may_write(storage: StoredPath) -> str | None:
    wrong = refusal(storage)
    return None if wrong is None else f"cannot use it ({wrong}); give it credentials as well"


def _nodes() -> dict[str, str]:
    """Address -> id of the nodes that are alive."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return {node["NodeManagerAddress"]: node["NodeID"] for node in alive}


def _look_from(node_id: str, refuses: Callable[[], str | None]) -> Any:
    """A reference to the digest of our package on a node, None where it has none, and what else is
    wrong there; not asked where the package is another one."""
    pickled, here = pickle.dumps(refuses), package_digest()

    # A function within a function travels by value: a node without our package can run it.
    def look() -> tuple[str | None, str | None]:
        import importlib.util
        import pickle

        if importlib.util.find_spec("grpo_trainable") is None:
            return None, None
        try:
            from grpo_trainable.storage.digests import package_digest
        except ImportError:
            return "of before there were digests", None
        if (digest := package_digest()) != here:
            return digest, None
        return digest, pickle.loads(pickled)()

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    return ray.remote(**options)(look).remote()
