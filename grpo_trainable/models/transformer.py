"""The decoder-only policy: pre-norm RMSNorm, RoPE, SwiGLU, causal attention, optional tied head.

Shape suffixes: B rows, S positions, D d_model, N heads, H head size, F d_ff, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.packing import Packing, pack
from grpo_trainable.models.policy import Policy

RMS_EPS = 1e-5


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        return F.rms_norm(x, self.weight.shape, self.weight, RMS_EPS)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return the tables (cos, cos) and (-sin, sin), each (context_length, head_dim)."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.context_length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of the last axis: rotary position embedding (arXiv 2104.09864).

    x is (..., H). cos and sin are rows of `rope_tables` that broadcast to x.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def project(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys (2, B, N, S, H), and values (B, N, S, H)."""
        b, s, _ = x_BSD.shape
        qkv = self.qkv(x_BSD).view(b, s, 3, self.num_heads, self.head_dim)
        qk, v = qkv.split((2, 1), dim=2)  # the gradient of a slice would be as large as qkv
        qk = rotate(qk.permute(2, 0, 3, 1, 4), cos_SH, sin_SH)
        return qk, v.squeeze(2).transpose(1, 2)

    def attend(self, qk: Tensor, v_BNSH: Tensor) -> Tensor:
        """Return causal attention after the output projection, (B, S, D)."""
        q_BNSH, k_BNSH = qk.unbind()
        out_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True)
        return self.out(out_BNSH.transpose(1, 2).flatten(2))

    def forward(
        self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """Return attention (B, S, D) of x.

        With `packing`, x is a single row of the T packed tokens.
        """
        if packing is None:
            return self.attend(*self.project(x_BSD, cos_SH, sin_SH))
        return self._attend_packed(x_BSD, cos_SH, sin_SH, packing)

    def _attend_packed(
        self, x_1TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, packing: Packing
    ) -> Tensor:
        """Let each row attend to its own tokens, and run the projections once per token."""
        heads = (self.num_heads, self.head_dim)
        qkv = self.qkv(x_1TD[0]).unflatten(-1, (3, *heads))
        qk, v = qkv.split((2, 1), dim=1)
        qk = rotate(qk, cos_TH[:, None, None], sin_TH[:, None, None])
        q, k = packing.to_rows(qk.flatten(1)).unflatten(-1, (2, *heads)).unbind(2)
        v = packing.to_rows(v.flatten(1)).unflatten(-1, heads)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out_BNSH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(packing.from_rows(out_BNSH.transpose(1, 2).flatten(2)))[None]


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (arXiv 2002.05202). gate and up are one matrix, (2 F, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the output (B, S, D) of x."""
        gate, up = self.gate_up(x_BSD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and SwiGLU, each preceded by a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = SwiGLU(config)

    def forward(
        self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """Return the output (B, S, D) of x."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SH, sin_SH, packing)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


def _checkpointed(block: Block, *inputs: Tensor | Packing | None) -> Tensor:
    """Run a block. Its activations are recomputed in the backward pass."""
    from torch.utils.checkpoint import checkpoint  # loads large, otherwise unused parts of torch

    return cast("Tensor", checkpoint(block, *inputs, use_reentrant=False))


class TransformerLM(Policy):
    """A causal language model.

    Weights are drawn from `seed` alone. With `seed=None`, the caller fills in the weights.
    `hidden_states` and `head_weight` are separate so that a caller can project only the positions
    that it needs. The head is the largest matrix of a small policy.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.context_length, self.vocab_size = config.context_length, config.vocab_size
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        # Registered as a ModuleList, but typed as a list of blocks.
        blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.blocks = cast("list[Block]", blocks)
        self.final_norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._packs = False
        self._checkpoints_gradients = False
        if seed is not None:
            self._initialise(seed)
        self._store_by_column()

    def _initialise(self, seed: int) -> None:
        """Draw weights from a truncated normal with std 0.02.

        For matrices whose outputs are added to the residual stream, the std is divided by
        sqrt(2 · number of layers), as in GPT-2.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = residual_std if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.trunc_normal_(
                    parameter, std=std, a=-3 * std, b=3 * std, generator=generator
                )

    def _store_by_column(self) -> None:
        """Store the matrices by column, with unchanged shapes and values.

        Multiplying a few dozen rows by weights that have to be read from memory is then up to a
        sixth faster. Training takes as long as with storage by row. A tied head is still stored by
        row, because its rows are looked up as embeddings.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.weight is not self.embedding.weight:
                module.weight.data = module.weight.data.t().contiguous().t()

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""
        return self.head.weight

    def layers(self) -> Sequence[nn.Module]:
        """Return the blocks, in order."""
        return self.blocks

    def pack_rows(self) -> None:
        """Make `states_at` process a token only once if several rows share it."""
        self._packs = True

    def checkpoint_gradients(self) -> None:
        """Make each block recompute its activations in the backward pass."""
        self._checkpoints_gradients = True

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) of ids (B, S), normalised and ready for the head.

        Raises:
            ValueError: S is longer than the context.
        """
        length = input_ids.shape[1]
        self.refuse_too_long(length)
        return self._states(input_ids, self.cos[:length], self.sin[:length])

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the hidden states (T, D) at the T positions of `wanted`, bool (B, S)."""
        if not self._packs:
            return super().states_at(input_ids, wanted)
        self.refuse_too_long(input_ids.shape[1])
        packing = pack(input_ids, wanted)
        cos_TH, sin_TH = self.cos[packing.positions], self.sin[packing.positions]
        states_1TD = self._states(packing.ids[None], cos_TH, sin_TH, packing)
        return packing.at(wanted, states_1TD[0])

    def _states(self, ids: Tensor, *positions: Tensor | Packing) -> Tensor:
        x_BSD = self.embedding(ids)
        again = self._checkpoints_gradients and torch.is_grad_enabled()
        for block in self.blocks:
            run = partial(_checkpointed, block) if again else block
            x_BSD = run(x_BSD, *positions)
        return self.final_norm(x_BSD)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits (B, S, V) of ids (B, S)."""
        return self.head(self.hidden_states(input_ids))
