"""How weights travel from the learner to the generators."""

from __future__ import annotations

from grpo_trainable.transports.base import TransportError
from grpo_trainable.transports.choice import (
    Choice,
    check_here,
    check_together,
    choose_transport,
    make_receiver,
    make_sender,
)
from grpo_trainable.transports.in_process import InProcess
from grpo_trainable.transports.rdt import Group
from grpo_trainable.transports.shm import ShmReceiver, ShmSender

__all__ = [
    "Choice",
    "Group",
    "InProcess",
    "ShmReceiver",
    "ShmSender",
    "TransportError",
    "check_here",
    "check_together",
    "choose_transport",
    "make_receiver",
    "make_sender",
]
