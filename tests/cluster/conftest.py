"""A Ray cluster of three machines on this one."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import machines, missing
from ray_cluster import PORT, Cluster, ray_start


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why is not None:
        pytest.skip(f"no cluster of machines here: {why}")
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="disk-") as disk, machines(3, Path(disk)) as made:
        address = f"{made[0].address}:{PORT}"
        for machine in made:
            join_or_begin = (
                ("--head", f"--port={PORT}", "--include-dashboard=false")
                if machine is made[0]
                else (f"--address={address}",)
            )
            status, printed = machine.run(ray_start(machine, disk, join_or_begin), environment)
            assert status == 0, printed
        yield Cluster(made, Path(disk), address, environment)
