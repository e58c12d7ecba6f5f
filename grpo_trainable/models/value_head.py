"""A critic's part of a model: the head that turns hidden states into values, and a body for it.

T positions, D width of the hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo_trainable.models.policy import NamedWeights


class ValueHead(nn.Module):
    """One number for each hidden state, in float32 whatever the body computes in.

    It begins at 0: a critic that knows nothing yet leaves the returns as they are.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Values (T,) of hidden states (T, D)."""
        return hidden_TD.float() @ self.weight + self.bias


def trained_body(policy: NamedWeights) -> dict[str, Tensor]:
    """The parameters that training changes and hidden states depend on, by name: all but a head
    that is a matrix of its own."""
    head = policy.head_weight
    places = sum(p is head for _, p in policy.named_parameters(remove_duplicate=False))
    tied = places > 1
    return {name: p for name, p in policy.trained().items() if tied or p is not head}
