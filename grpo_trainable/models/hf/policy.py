"""Causal language models from `transformers` as policies (extra `hf`).

B rows, S positions, D width of the hidden states, V size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from grpo_trainable.models.hf.directory import read_shape, refuse_unusable
from grpo_trainable.models.packing import pack
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.shape import PolicyShape
from grpo_trainable.plugins import one_line

PROBE_TOKENS = 16  # length of the sequence with which a model is checked
# Factor by which hidden states are magnified for a second comparison. Without this factor, the
# logits of a model with random weights are so small that a cap on them would go unnoticed.
MAGNIFIED = 1000.0


class HFPolicy(Policy):
    """A `transformers` model whose logits are its hidden states times its head."""

    def __init__(
        self, model: transformers.PreTrainedModel, shape: PolicyShape, *, head_fp32: bool = True
    ) -> None:
        """Take over `model`, and turn off its dropout, because sampling uses no dropout.

        Raises:
            ValueError: The model does not compute its logits as hidden states times the output
                head. The message is one line.
        """
        super().__init__()
        self.context_length, self.vocab_size = shape.context_length, shape.vocab_size
        self.head_fp32 = head_fp32
        self.model = model.eval()
        self._packs = False
        self._refuse_other_heads()

    @property
    def body(self) -> torch.nn.Module:
        """The module that turns ids into hidden states."""
        return self.model.get_decoder()

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""
        head: Any = self.model.get_output_embeddings()
        return head.weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) of ids (B, S), ready for the head."""
        self.refuse_too_long(input_ids.shape[1])
        return self.body(input_ids=input_ids, use_cache=False).last_hidden_state

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the hidden states (T, D) at the T positions of `wanted`, bool (B, S)."""
        if not self._packs:
            return super().states_at(input_ids, wanted)
        self.refuse_too_long(input_ids.shape[1])
        packing = pack(input_ids, wanted)
        states_1TD = self.body(
            input_ids=packing.ids[None],
            position_ids=packing.positions[None],
            # `transformers` does not change a mask of four dimensions. Packed rows never read the
            # mask.
            attention_mask=wanted.new_ones(1, 1, 1, 1),
            packing=packing,
            use_cache=False,
        ).last_hidden_state
        return packing.at(wanted, states_1TD[0])

    def layers(self) -> Sequence[torch.nn.Module]:
        """Return the modules of the largest module list in the body.

        The architectures of `transformers` use different names for the list of layers.
        """
        lists = [m for m in self.body.modules() if isinstance(m, torch.nn.ModuleList)]
        return list(max(lists, key=_parameters, default=[]))

    def weights(self) -> dict[str, Tensor]:
        """Return the live parameters under the names of `transformers`."""
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def pack_rows(self) -> None:
        """Make `states_at` process a token only once if several rows share it.

        Raises:
            ValueError: The architecture does not support packing, or computes different states
                when packed.
        """
        from grpo_trainable.models.hf.attention import replace_attention  # loads torch's compiler

        ids = self._probe().repeat(3, 1)
        ids[1:, PROBE_TOKENS // 2 :] = ids[1:, PROBE_TOKENS // 2 :].flip(1)
        wanted = torch.ones_like(ids, dtype=torch.bool)
        wanted[1, -3:] = False
        expected = self.states_at(ids, wanted)
        try:
            replace_attention(self.model)
            self._packs = True
            found = self.states_at(ids, wanted)
        except (TypeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{_cannot_pack(self.model)} ({why})") from error
        # The allowed difference, relative to the largest state, is far above rounding errors.
        allowed = 2.0**-4 if found.dtype == torch.bfloat16 else 2.0**-12
        if not bool((found - expected).abs().max() <= allowed * expected.abs().max()):
            raise ValueError(_cannot_pack(self.model))

    def checkpoint_gradients(self) -> None:
        """Make the layers recompute their activations in the backward pass.

        Raises:
            ValueError: The architecture does not support checkpointing, or applies dropout when it
                checkpoints.
        """
        model: Any = self.model
        before = self.hidden_states(self._probe())
        enable = getattr(model, "activation_checkpointing_enable", None)
        try:
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise ValueError(_cannot_checkpoint(model)) from error
        for module in model.modules():
            # Layers checkpoint only in training mode. The modules inside the layers must stay in
            # evaluation mode, because they apply dropout.
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
        if not torch.equal(before, self.hidden_states(self._probe())):
            raise ValueError(_cannot_checkpoint(model))

    # ---- Check of the head ---------------------------------------------------------------------

    @torch.no_grad()
    def _refuse_other_heads(self) -> None:
        """Compare the model's own logits with the product of hidden states and head.

        Some architectures scale or cap their logits, or add a bias. Engines and scoring
        multiply hidden states by the head themselves, so their logits would differ from those of
        the model.
        """
        name, head = type(self.model).__name__, self.model.get_output_embeddings()
        if head is None or len(self.head_weight) != self.vocab_size:
            raise ValueError(f"{name} has no output head for {self.vocab_size} tokens")
        ids = self._probe()
        for factor in (1.0, MAGNIFIED):
            with self._scaled(factor):
                hidden, theirs = self.hidden_states(ids), self.model(ids, use_cache=False).logits
            ours = hidden @ self.head_weight.t()
            # The allowed difference, relative to the largest logit, is far above rounding errors.
            allowed = 2.0**-5 if ours.dtype == torch.bfloat16 else 2.0**-12
            if not bool((ours - theirs).abs().max() <= allowed * theirs.abs().max()):
                raise ValueError(
                    f"{name} modifies its logits (with a cap, a scale or a bias), "
                    "which is not supported"
                )

    def _probe(self) -> Tensor:
        """Return ids (1, S) spread over the vocabulary."""
        count = min(PROBE_TOKENS, self.context_length)
        ids = torch.linspace(0, self.vocab_size - 1, count, dtype=torch.float64).long()
        return ids[None].to(self.head_weight.device)

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        """Within this context, multiply the hidden states from the body by `factor`."""

        def scale(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state * factor
            return output

        hook = self.body.register_forward_hook(scale)
        try:
            yield
        finally:
            hook.remove()


def load_hf_policy(directory: Path, *, dtype: str, head_fp32: bool) -> HFPolicy:
    """Load the policy from a Hugging Face directory, with its body in `dtype`.

    Only safetensors are read, nothing is downloaded, and no code from the directory is run.

    Raises:
        ValueError: The model cannot be loaded, lacks weights, or cannot serve as a policy. The
            message is one line.
    """
    refuse_unusable(directory)
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors have no common error class
        raise ValueError(f"{directory}: transformers cannot load it ({one_line(error)})") from error
    model, told = loaded
    if dtype == "bfloat16":
        _suit_to_cpu(model)
    # `transformers` would fill missing weights with random numbers and continue.
    lacking = sorted(told["missing_keys"])
    if lacking:
        raise ValueError(f"{directory}: the weights lack {lacking[0]} ({len(lacking)} missing)")
    try:
        return HFPolicy(model, read_shape(directory), head_fp32=head_fp32)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def _suit_to_cpu(model: transformers.PreTrainedModel) -> None:
    """Make a bfloat16 `model` as fast as possible on a CPU. On a GPU, this has no effect."""
    if not multiplies_bfloat16():
        widen_products(model.get_decoder())
    if model.config._attn_implementation == "sdpa":
        from grpo_trainable.models.hf.attention import replace_attention  # loads torch's compiler

        replace_attention(model)


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _cannot_pack(model: torch.nn.Module) -> str:
    return f"model.packing=true: {type(model).__name__} does not support it"


def _cannot_checkpoint(model: torch.nn.Module) -> str:
    return f"model.gradient_checkpointing=true: {type(model).__name__} does not support it"


def multiplies_bfloat16() -> bool:
    """Return True if this CPU has instructions for bfloat16 products (AVX512-BF16, AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def widen_products(model: nn.Module) -> None:
    """Make bfloat16 linear layers multiply in float32 while they are on a CPU.

    Weights, inputs, outputs and gradients stay bfloat16.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.bfloat16:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    if input.device.type != "cpu":
        return F.linear(input, module.weight, module.bias)
    return cast("Tensor", _WideLinear.apply(input, module.weight, module.bias))


class _WideLinear(torch.autograd.Function):
    """`F.linear` of bfloat16 tensors, computed with float32 products.

    Tensors kept for the backward pass are bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x, weight)
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias."""
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
