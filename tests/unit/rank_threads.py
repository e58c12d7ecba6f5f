"""Ranks that are threads of one process and sum like learners, and rounds to train on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.ranks import Replicas
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.transports.in_process import InProcess

Answer = TypeVar("Answer")
PATIENCE_S = 60.0
ONE_AT_A_TIME = threading.Lock()  # transformers cannot load two models at once


class ThreadGroup:
    """A rank that is a thread. It adds up the tensors of all threads in the order of the ranks."""

    def __init__(self, rank: int, size: int, slots: list[Tensor], barrier: threading.Barrier):
        self.rank, self.size = rank, size
        self._slots, self._barrier = slots, barrier

    def sum_(self, tensor: Tensor) -> Tensor:
        self._slots[self.rank] = tensor
        self._barrier.wait(PATIENCE_S)
        shapes = {(slot.shape, slot.dtype) for slot in self._slots}
        assert len(shapes) == 1, f"ranks sum different things: {shapes}"
        total = torch.stack([slot.detach() for slot in self._slots]).sum(dim=0)
        self._barrier.wait(PATIENCE_S)
        with torch.no_grad():
            return tensor.copy_(total)


def together(size: int, work: Callable[[ThreadGroup], Answer]) -> list[Answer]:
    """Return the result of `work` for each rank, or raise the error of any rank."""
    slots, barrier = [torch.zeros(0)] * size, threading.Barrier(size)

    def run(rank: int) -> Answer:
        try:
            return work(ThreadGroup(rank, size, slots, barrier))
        except BaseException:
            barrier.abort()  # otherwise the other ranks would wait forever
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def learner_of(config: GRPOConfig, group: ThreadGroup, dtype: torch.dtype | None = None) -> Learner:
    """Return a learner that computes in `dtype`; None keeps the dtype of its policy."""
    sender = None if group.rank else InProcess()
    with ONE_AT_A_TIME:
        learner = Learner(config, sender, ranks=Replicas(group))
    if dtype is not None:
        learner.policy.to(dtype)
    return learner


def config_with(path: str, **values: Any) -> GRPOConfig:
    """Return a config of three groups of four responses.

    Responses have up to nine tokens, and microbatches have five rows.
    """
    data: dict[str, Any] = {
        "rounds": 4,
        "model": {"path": path},
        "rollout": {"prompts": 3, "group_size": 4, "max_new_tokens": 9, "min_new_tokens": 1},
        "optim": {"lr": 1e-3, "microbatch": 5},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    if "microbatch_tokens" in data["optim"]:
        del data["optim"]["microbatch"]
    return GRPOConfig.from_dict(data)


LENGTHS = ((9, 1, 4, 2), (3, 3, 8, 1), (5, 7, 2, 6))  # response lengths in each group


def a_round(seed: int = 0) -> list[RolloutGroup]:
    """Return groups of random tokens, with log-probs like an untrained policy's."""
    generator = torch.Generator().manual_seed(seed)
    return [_group(index, lengths, generator) for index, lengths in enumerate(LENGTHS)]


def _group(index: int, lengths: tuple[int, ...], generator: torch.Generator) -> RolloutGroup:
    shape = len(lengths), max(lengths)
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    noise = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float32)
    zeros = torch.zeros(shape, dtype=torch.int32)
    return RolloutGroup(
        prompt_index=index,
        prompt_ids=torch.randint(4, 200, (3 + index,), generator=generator),
        response_ids=torch.randint(4, 200, shape, generator=generator),
        response_mask=mask,
        behaviour_log_probs=(noise - 7.6).where(mask, 0.0),
        rewards=torch.rand(len(lengths), generator=generator, dtype=torch.float32),
        finished=torch.tensor([length != 9 for length in lengths]),
        token_versions=zeros,
        token_rounds=zeros,
        uses=1,
    )
