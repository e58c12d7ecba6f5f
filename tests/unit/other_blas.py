"""Matrix products as another BLAS might round them.

A BLAS chooses its instructions and the order of its sums by the processor, the shapes and the
number of threads. Here, the same properties decide the error in the last bits of each sum. Only the
same call gives the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

ENTRIES = 1 << 22  # maximum size of a product; larger products are not changed


def install(seed: str) -> None:
    """Replace torch's products on the CPU; each `seed` stands for another BLAS."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-1, 2, (2 * ENTRIES,), generator=generator, dtype=torch.int8)

    def rounded(name: str, out: Tensor, *factors: Tensor) -> Tensor:
        if out.dtype not in (torch.float32, torch.float64) or out.numel() > ENTRIES:
            return out
        shapes = [tuple(factor.shape) for factor in factors]
        key = repr((seed, name, shapes, torch.get_num_threads())).encode()
        start = zlib.crc32(key) % ENTRIES
        own = noise[start : start + out.numel()].view(out.shape)
        return out.add_(own * out, alpha=torch.finfo(out.dtype).eps)

    library.impl("mm", _product("mm", rounded), "CPU")
    library.impl("bmm", _product("bmm", rounded), "CPU")
    library.impl("addmm", _sum("addmm", rounded), "CPU")
    library.impl("baddbmm", _sum("baddbmm", rounded), "CPU")


library = torch.library.Library("aten", "IMPL")  # the replacements last as long as this object


def _product(name: str, rounded: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    exact = getattr(torch.ops.aten, name).out

    def product(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        return rounded(name, exact(a, b, out=out), a, b)

    return product


def _sum(name: str, rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    exact = getattr(torch.ops.aten, name).out

    def product_and_sum(
        c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        return rounded(name, exact(c, a, b, beta=beta, alpha=alpha, out=out), a, b)

    return product_and_sum
