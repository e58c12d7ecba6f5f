"""Policies that the unit tests of sampling and of scoring share."""

from __future__ import annotations

import torch

from grpo_trainable.models.transformer import ModelConfig, TransformerLM


def sharpened(config: ModelConfig, seed: int = 0) -> TransformerLM:
    """Random weights ten times their usual size, so that what a token is depends on the others."""
    model = TransformerLM(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model
