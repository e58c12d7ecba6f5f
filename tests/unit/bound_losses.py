"""Every built-in loss with the default values of its arguments bound, as `loss.type` selects it.

A loss that selects tokens of the gradient step selects none, unless a test passes `selected`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_trainable import algo
from grpo_trainable.algo import SELECTIONS
from grpo_trainable.config import LossSettings
from grpo_trainable.learner.user_functions import configured_loss

Loss = Callable[..., tuple[Tensor, Tensor]]


def bound(name: str, **settings: Any) -> Loss:
    loss = configured_loss(LossSettings(type=name, **settings), torch.device("cpu"))
    return _without_selected(loss) if name in SELECTIONS else loss


def _without_selected(loss: Loss) -> Loss:
    def call(*tensors: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(tensors[-1], dtype=torch.bool)
        return loss(*tensors, **{"selected": nothing, **named})

    return call


LOSSES: dict[str, Loss] = {name: bound(name) for name in algo.LOSSES}
