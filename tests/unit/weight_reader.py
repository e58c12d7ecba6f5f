"""A generator's process for tests of transports, with as few imports as possible."""

from __future__ import annotations

from typing import Any

from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.transports.shm import ShmReceiver
from grpo_trainable.transports.transport import TransportError


def fetch_in_turn(handles: Any, answers: Any) -> None:
    """Fetch handles until None arrives, and answer with the result of each."""
    receiver = ShmReceiver()
    while (handle := handles.get()) is not None:
        try:
            fetched = receiver.fetch(handle)
            answers.put((fetched.round, storage_checksum(fetched.tensors) == fetched.checksum))
        except TransportError as error:
            answers.put((handle.packed.round, str(error)))
