"""Settings of every test run."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Torch reads this variable when it is imported. Several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a busy machine, a test must not fail because it generates its inputs slowly.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    if "OTHER_BLAS" in os.environ:
        import other_blas

        other_blas.install(os.environ["OTHER_BLAS"])


# Objects that are made while pytest collects the tests live until the end. So garbage collection is
# off meanwhile, and skips these objects later.
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
