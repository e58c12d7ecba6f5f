"""Products of bfloat16 numbers by a CPU that has no instructions for them.

There torch takes four times as long for them as for float32. The same product in float32, rounded
once, is what the instructions compute: factors in bfloat16, sums in float32, one rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 numbers (AVX512-BF16, AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def widen_products(model: nn.Module) -> None:
    """Has the linear layers in bfloat16 multiply in float32 while they are on a CPU; weights,
    inputs, outputs and gradients stay bfloat16."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.bfloat16:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    if input.device.type != "cpu":
        return F.linear(input, module.weight, module.bias)
    return cast("Tensor", _WideLinear.apply(input, module.weight, module.bias))


class _WideLinear(torch.autograd.Function):
    """`F.linear` of bfloat16 tensors by float32 products; what is kept for the backward pass is
    bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        rows = grad.flatten(0, -2)
        wanted = ctx.needs_input_grad
        grad_x = (grad @ weight.float()).to(x.dtype) if wanted[0] else None
        grad_weight = rows.t() @ x.float().flatten(0, -2) if wanted[1] else None
        return (
            grad_x,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            rows.sum(dim=0).to(weight.dtype) if wanted[2] else None,
        )
