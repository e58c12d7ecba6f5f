"""Code that transports share. `protocol/weight_transfer.py` defines the transports' interface."""

from __future__ import annotations

import warnings

from grpo_trainable.protocol.calls import DeliveryFailed


class TransportError(DeliveryFailed):
    """Weights cannot be transferred. The message names the transport and the reason."""


def read_only_is_fine() -> None:
    """Silence torch's warning about tensors in read-only memory.

    The filter stays active for the whole process, because two threads may fetch weights. Only a
    process that fetches weights calls this function.
    """
    warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable", UserWarning)


def gpus_seen() -> int:
    """Return the number of CUDA devices that this process sees."""
    import torch  # this import takes seconds, and most transports need no GPU

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
