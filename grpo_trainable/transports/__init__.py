"""How weights travel from the learner to the generators."""

from __future__ import annotations

from grpo_trainable.transports.base import Receiver, Sender
from grpo_trainable.transports.in_process import InProcess
from grpo_trainable.transports.object_store import ObjectStoreReceiver, ObjectStoreSender

__all__ = ["InProcess", "ObjectStoreReceiver", "ObjectStoreSender", "Receiver", "Sender"]
