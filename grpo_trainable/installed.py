"""What a transport needs that a process may not have."""

from __future__ import annotations

import importlib.util
import os

INSTALL_NIXL = "pip install --no-deps nixl nixl-cu12"


def missing_for(transport: str) -> str | None:
    """What this process lacks, and how to get it; None when nothing is missing."""
    if transport == "shm" and not hasattr(os, "memfd_create"):
        return "this system has no memfd_create (Linux has)"
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        return f"the library nixl is not installed: {INSTALL_NIXL}"
    if transport in ("nccl", "cuda_ipc"):
        import torch

        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
    if transport == "nccl" and importlib.util.find_spec("cupy") is None:
        return "the library cupy is not installed: pip install cupy-cuda12x"
    return None


def missing_on_machine(transport: str) -> str | None:
    """The same for this machine, asked by a process that sees all of its GPUs; an actor sees its
    own."""
    missing = missing_for(transport)
    if missing is None and transport == "nccl":
        import torch

        if torch.cuda.device_count() < 2:
            return "needs a GPU for each actor, and there is one"
    return missing
