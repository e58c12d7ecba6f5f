"""Join a running Ray cluster, and check that its nodes can run the trials."""

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

ANSWER_S = 5.0  # time limit for connecting to the address
LOOK_S = 60.0  # time limit for a node's answer, including the start of a process on the node
TOKEN = (
    "if the cluster has a token, put the token in ~/.ray/auth_token on this machine (or in "
    "RAY_AUTH_TOKEN) and set RAY_AUTH_MODE=token; and check that the cluster also runs Ray "
    f"{ray.__version__}"
)


def join(address: str, **options: Any) -> None:
    """Call `ray.init` with the address of a cluster.

    Raises:
        UsageError: Nothing listens at the address, or Ray refuses the connection. The message is
            one line.
    """
    _refuse_silence(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--address {address}: Ray refuses the connection ({reason}); {TOKEN}"
        ) from error


def _refuse_silence(address: str) -> None:
    """Try HOST:PORT before Ray does. Ray would take twenty seconds and explain less."""
    found = re.fullmatch(r"(?:ray://)?(?P<host>.+):(?P<port>\d+)", address)
    if found is None:
        return  # the address is `auto`
    try:
        socket.create_connection((found["host"], int(found["port"])), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: nothing answers there ({error}); `ray start --head` printed "
            "the address when the cluster started"
        ) from None


def check_nodes(storage: AnyPath) -> None:
    """Check that every node sees the directory of the experiments and has this package.

    Raises:
        UsageError: A node does not answer, does not see the directory, cannot write to the store,
            does not have the package, or has a different version.
    """
    if not isinstance(storage, Path):
        _check_each(storage, partial(_may_write, storage))
        return
    storage.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=storage, prefix=".seen-from-every-node-") as file:
        _check_each(storage, partial(_exists, file.name))


def ship_to_nodes(files: Mapping[str, str]) -> dict[str, bytes]:
    """Send each node the user's files that the node lacks.

    Args:
        files: Path -> SHA-256.

    Returns:
        Path -> content of the files that at least one node lacked. Trials send these files to nodes
        that join later.

    Raises:
        UsageError: A file cannot be copied to a node. The message is one line.
    """
    try:
        shipped = contents(lacking_on(files, _nodes().values()), files) if files else {}
        if shipped:
            ship(ray.put(shipped), _nodes().values())
    except ShippingError as error:
        raise UsageError(str(error)) from None
    return shipped


def _check_each(storage: AnyPath, refuses: Callable[[], str | None]) -> None:
    """Check the package and the storage on every node.

    Args:
        storage: The storage, for messages.
        refuses: A function that runs on a node. The function returns None, or one line
            that says why the node cannot use the storage.
    """
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
                f"node {node} of the cluster has {has}; install this machine's version on that "
                "node, in the environment that Ray runs in"
            )
        if wrong is not None:
            raise UsageError(f"--storage {storage}: node {node} of the cluster {wrong}")


def _exists(path: str) -> str | None:
    seen = os.path.exists(path)
    return None if seen else "does not see it; choose a directory that all nodes share"


def _may_write(storage: StoredPath) -> str | None:
    wrong = refusal(storage)
    return None if wrong is None else f"cannot use it ({wrong}); give that node credentials too"


def _nodes() -> dict[str, str]:
    """Return the nodes that are alive, as address -> id."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return {node["NodeManagerAddress"]: node["NodeID"] for node in alive}


def _look_from(node_id: str, refuses: Callable[[], str | None]) -> Any:
    """Return a Ray reference to a pair: a node's package digest, and the result of `refuses`.

    The digest is None if the node does not have the package. The node calls `refuses` only if its
    digest equals this machine's digest.
    """
    pickled, here = pickle.dumps(refuses), package_digest()

    # A nested function is pickled by value, so a node without this package can run it.
    def look() -> tuple[str | None, str | None]:
        import importlib.util
        import pickle

        if importlib.util.find_spec("grpo_trainable") is None:
            return None, None
        try:
            from grpo_trainable.storage.digests import package_digest
        except ImportError:
            return "older than digests", None
        if (digest := package_digest()) != here:
            return digest, None
        return digest, pickle.loads(pickled)()

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": there}
    return ray.remote(**options)(look).remote()
