"""A Ray cluster of three simulated machines on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machines import missing
from ray_cluster import Cluster, ray_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why is not None:
        pytest.skip(f"no cluster of machines here: {why}")
    with ray_cluster(3) as cluster:
        yield cluster
