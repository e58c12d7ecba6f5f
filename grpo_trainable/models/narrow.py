"""Matrices in bfloat16 around states in float32: a policy of this package that only samples.

A CPU with AVX512-BF16 or AMX multiplies bfloat16 in half the time of float32 and adds up in
float32. Each product is rounded to bfloat16; norms, attention, the sum of the residual stream,
softmax and log-probs stay in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from grpo_trainable.models.transformer import TransformerLM


class NarrowLinear(nn.Linear):
    """x (..., in) to (..., out), by a matrix in bfloat16."""

    def __init__(self, linear: nn.Linear, *, widens: bool) -> None:
        """`widens`: the product is float32, with the digits of bfloat16."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        self._widens = widens

    def forward(self, input: Tensor) -> Tensor:
        product = F.linear(input.to(self.weight.dtype), self.weight)
        return product.float() if self._widens else product


class NarrowEmbedding(nn.Embedding):
    """Rows (..., D) in float32 of a table in bfloat16."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = nn.Parameter(embedding.weight.detach().bfloat16(), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def narrow(model: TransformerLM) -> None:
    """Puts matrices in bfloat16 in the place of the model's, a tied head once; names stay."""
    tied = model.head.weight is model.embedding.weight
    model.embedding = NarrowEmbedding(model.embedding)
    model.head = NarrowLinear(model.head, widens=True)
    if tied:
        model.head.weight = model.embedding.weight
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.qkv = NarrowLinear(attention.qkv, widens=True)
        # What these give is multiplied again, or added to float32.
        attention.out = NarrowLinear(attention.out, widens=False)
        mlp.gate_up = NarrowLinear(mlp.gate_up, widens=False)
        mlp.down = NarrowLinear(mlp.down, widens=False)
