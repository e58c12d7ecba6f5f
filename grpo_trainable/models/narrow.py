"""bfloat16 matrices and float32 states, for this package's policies when they only sample.

A CPU with AVX512-BF16 or AMX multiplies bfloat16 matrices twice as fast as float32 matrices, and
accumulates in float32. The result of each matrix product is rounded to bfloat16. Norms, attention,
additions to the residual stream, softmax and log-probs stay in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from grpo_trainable.models.transformer import TransformerLM


class NarrowLinear(nn.Linear):
    """Maps x (..., in) to (..., out) with a bfloat16 matrix."""

    def __init__(self, linear: nn.Linear, *, widens: bool) -> None:
        """Copy `linear`. With `widens`, the copy converts the rounded product to float32."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        self._widens = widens

    def forward(self, input: Tensor) -> Tensor:
        """Return the product."""
        product = F.linear(input.to(self.weight.dtype), self.weight)
        return product.float() if self._widens else product


class NarrowEmbedding(nn.Embedding):
    """Looks up rows (..., D) in a bfloat16 table, and converts them to float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = nn.Parameter(embedding.weight.detach().bfloat16(), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the table's rows for these ids."""
        return super().forward(input).float()


def narrow(model: TransformerLM) -> None:
    """Convert the model's matrices to bfloat16. Names do not change, and tied weights stay tied."""
    tied = model.head.weight is model.embedding.weight
    model.embedding = NarrowEmbedding(model.embedding)
    model.head = NarrowLinear(model.head, widens=True)
    if tied:
        model.head.weight = model.embedding.weight
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.qkv = NarrowLinear(attention.qkv, widens=True)
        # These results stay bfloat16: they are multiplied again, or added to float32 states.
        attention.out = NarrowLinear(attention.out, widens=False)
        mlp.gate_up = NarrowLinear(mlp.gate_up, widens=False)
        mlp.down = NarrowLinear(mlp.down, widens=False)
