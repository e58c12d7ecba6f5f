"""Policies and a transport that tests of sampling, scoring and training share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import LiveWeights, PolicyWeights


def sharpened(config: ModelConfig, seed: int = 0) -> TransformerLM:
    """Return random weights of ten times the usual size, so that tokens depend on each other."""
    model = TransformerLM(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model


class Pieces:
    """A stand-in for a tokenizer: two special tokens, then the given pieces of text.

    The special tokens have the ids 0 and 1. Id 1 is for padding.
    """

    pad_id = 1

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        as_bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.token_bytes = [b"", b"", *as_bytes]


def write_quick_policy(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    make: Callable[[ModelConfig, int], TransformerLM] = TransformerLM,
    seed: int = 3,
    **shape: int,
) -> str:
    """Write a policy that is quick to train, with random weights, and return its path.

    The tokenizer defaults to the shipped tokenizer. `shape` contains fields of the policy's
    `ModelConfig`.
    """
    tokenizer = tokenizer or read_tokenizer(None)
    quick = {"context_length": 48, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**quick, **shape})
    save_policy(directory, make(config, seed), tokenizer, torch.float32)
    return str(directory)


class Mailbox:
    """A transport that keeps every snapshot. Its handles are versions."""

    name = "mailbox"

    def __init__(self) -> None:
        self.snapshots: dict[int, PolicyWeights] = {}

    def publish(self, weights: LiveWeights, frozen: Collection[str] = ()) -> int:
        tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        self.snapshots[weights.version] = PolicyWeights(
            version=weights.version,
            round=weights.round,
            checksum=storage_checksum(tensors),
            tensors=tensors,
        )
        return weights.version

    def release(self, before_round: int) -> None:
        pass

    def fetch(self, handle: int, received: Any = None) -> PolicyWeights:
        return self.snapshots[handle]

    def close(self) -> None:
        pass
