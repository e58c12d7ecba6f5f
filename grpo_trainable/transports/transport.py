"""Parts that transports share. `grpo_trainable/protocol/weight_transfer.py` has their interface."""

from __future__ import annotations

import warnings

from grpo_trainable.protocol.calls import DeliveryFailed


class TransportError(DeliveryFailed):
    """Raised where weights cannot travel; the message names the transport and what is missing."""


def read_only_is_fine() -> None:
    """Silences torch where tensors are made over memory that must not be written.

    For the whole process, which is the one that fetches: filters are its own, and weights may be
    fetched by two threads.
    """
    warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable", UserWarning)


def gpus_seen() -> int:
    """Return how many CUDA devices this process sees."""
    import torch  # takes seconds, and most transports need no GPU

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
