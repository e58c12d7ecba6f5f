"""Settings of every test run."""

from __future__ import annotations

import gc
import os

# Torch reads it when it is imported. Several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Collecting makes many objects that stay: the garbage collector need not look at them.
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
