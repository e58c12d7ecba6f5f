"""The policy to evaluate, from a trial's checkpoint or from a config."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.store import build_trained_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """Weights as a learner publishes them, with the policy's tokenizer and sizes."""

    source: str  # "checkpoint", "directory" or "preset"
    path: str  # path of a checkpoint or directory, or the name of a preset
    weights: PolicyWeights
    sha256: str  # digest of the weights (see `digest`)
    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    parameters: int  # number of parameters

    def to_dict(self) -> dict[str, Any]:
        """Return the identity of the policy as plain data."""
        return {
            "source": self.source,
            "path": self.path,
            "round": self.weights.round,
            "version": self.weights.version,
            "sha256": self.sha256,
            "parameters": self.parameters,
        }


def load_evaluated_policy(config: GRPOConfig, trained: TrainedPolicy | None) -> EvaluatedPolicy:
    """Load the policy of a checkpoint, or else the untrained policy that the config names.

    The weights have the memory layout and type in which the trial's learner publishes them, so
    sampling gives the same bits.

    Raises:
        ValueError: If the configured policy cannot be loaded, or if the checkpoint belongs to
            another policy. The message is one line.
    """
    try:
        policy, tokenizer = build_trained_policy(
            config.model, config.seed, adapters_apart=config.adapters_apart
        )
    except ValueError as error:
        raise ValueError(f"model.path={error}") from None
    if trained is not None:
        copy_parameters(policy.trained(), dict(trained.tensors), source=str(trained.directory))
    dtype = getattr(torch, config.transport_dtype)
    tensors = {
        # Weights in lower precision keep their type.
        name: tensor.detach().to(dtype if tensor.dtype == torch.float32 else tensor.dtype)
        for name, tensor in policy.weights().items()
    }
    source, path = _source(config, trained)
    return EvaluatedPolicy(
        source=source,
        path=path,
        weights=PolicyWeights(
            version=0 if trained is None else trained.version,
            round=0 if trained is None else trained.round,
            checksum=storage_checksum(tensors),
            tensors=tensors,
        ),
        sha256=digest(tensors),
        tokenizer=tokenizer,
        context_length=policy.context_length,
        vocab_size=policy.vocab_size,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
    )


def _source(config: GRPOConfig, trained: TrainedPolicy | None) -> tuple[str, str]:
    if trained is not None:
        return "checkpoint", str(trained.directory)
    if config.model.path is not None:
        return "directory", config.model.adapter or config.model.path
    return "preset", config.model.preset


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, types and bytes of all tensors, sorted by name.

    Equal weights have equal digests, whatever their source.
    """
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        sha256.update(memoryview(tensor.flatten().view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return sha256.hexdigest()
