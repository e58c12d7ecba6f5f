"""LoRA adapters on a model of transformers, by `peft` (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from grpo_trainable.models.hf.directory import ALL_LINEAR, names_in, one_line
from grpo_trainable.models.hf.policy import HFPolicy
from grpo_trainable.models.policy import Policy, widened

ADAPTER = "default"  # peft's name of the only adapter


class LoraPolicy(Policy):
    """A policy of which only adapters are trained: a layer adds scale · B A to its weights.

    B begins at zero, so the policy begins as the model it is made of. The adapters are float32
    whatever the model is.
    """

    def __init__(
        self,
        base: HFPolicy,
        *,
        rank: int,
        alpha: float | None,
        targets: str,
        seed: int,
        apart: bool = False,
    ) -> None:
        """Put adapters into `base`, which computes with them from then on.

        `targets`: "all-linear" for every linear layer but the head, or names of modules separated
        by commas. `alpha`: the scale is alpha / rank, 2 by default. A is drawn from `seed`.
        `apart`: `weights` has the adapters beside the model's weights, not merged into them.

        Raises:
            ValueError: a target is not there, or is no linear layer of the body; in one line.
        """
        super().__init__()
        self.context_length, self.vocab_size = base.context_length, base.vocab_size
        self.head_fp32 = base.head_fp32
        self._apart = apart
        names = names_in(targets)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,  # pyright: ignore[reportArgumentType]
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
        )
        base.requires_grad_(False)
        try:
            inject_adapter_in_model(config, base.model)
        except ValueError as error:
            raise ValueError(f"model.lora_targets: {one_line(error)}") from error
        self.base = base
        self._refuse_other_layers([] if names == [ALL_LINEAR] else names)
        self._draw(seed)

    def _refuse_other_layers(self, names: Sequence[str]) -> None:
        head, adapted = self.base.model.get_output_embeddings(), self._adapted()
        for name, layer in adapted.items():
            if layer is head or not isinstance(layer, Linear):
                raise ValueError(f"model.lora_targets: {name} is no linear layer of the body")
        for name in names:
            if not any(f".{layer}".endswith(f".{name}") for layer in adapted):
                raise ValueError(f"model.lora_targets: no layer is called {name}")

    def _draw(self, seed: int) -> None:
        """Draws A as peft does, from a generator of its own."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._adapted().values():
            first, second = layer.lora_A[ADAPTER].float(), layer.lora_B[ADAPTER].float()
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(second.weight)

    def _adapted(self) -> dict[str, Any]:
        """The layers that have adapters, by the name that the model gives them."""
        modules = self.base.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, LoraLayer)}

    # ---- As any policy -------------------------------------------------------------------------

    @property
    def head_weight(self) -> Tensor:
        return self.base.head_weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        return self.base.hidden_states(input_ids)

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        return self.base.states_at(input_ids, wanted)

    def pack_rows(self) -> None:
        self.base.pack_rows()

    def checkpoint_gradients(self) -> None:
        self.base.checkpoint_gradients()

    def weights(self) -> dict[str, Tensor]:
        if self._apart:
            return self.base.weights()
        base = self.base_weights()
        return {name: tensor.to(base[name].dtype) for name, tensor in self.merged()}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights with the adapters merged into them, these in float32.

        In bfloat16 a weight has neighbours 0.4 to 0.8 % away, and most of what a small update adds
        would be rounded off.
        """
        adapted = {f"{name}.weight": layer for name, layer in self._adapted().items()}
        for name, weight in self.base_weights().items():
            layer = adapted.get(name)
            added = None if layer is None else layer.get_delta_weight(ADAPTER)
            yield name, weight if added is None else widened(weight) + added

    def base_weights(self) -> dict[str, Tensor]:
        """The model's live weights without the adapters, under the names that they have there."""
        adapters = self.trained().keys()
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self.base.weights().items()
            if name not in adapters
        }

    def trained(self) -> dict[str, Tensor]:
        """The adapters' live parameters, under peft's names."""
        named = self.base.weights().items()
        return {name: tensor for name, tensor in named if ".lora_" in name}

    def frozen(self) -> Collection[str]:
        if self._apart:
            return self.weights().keys() - self.trained().keys()
        changed = {f"{name}.weight" for name in self._adapted()}
        return [name for name in self.base_weights() if name not in changed]

    def without_adapters(self) -> Policy:
        return _WithoutAdapters(self)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Has the layers leave their adapters out meanwhile."""
        layers = self._adapted().values()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class _WithoutAdapters(Policy):
    """The model that a LoRA policy was made of, in the same memory."""

    def __init__(self, policy: LoraPolicy) -> None:
        super().__init__()
        self.context_length, self.vocab_size = policy.context_length, policy.vocab_size
        self.head_fp32 = policy.head_fp32
        # A tuple hides it from torch: a submodule would be frozen and moved with this one.
        self._policy = (policy,)

    @property
    def head_weight(self) -> Tensor:
        return self._policy[0].head_weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        with self._policy[0].disabled():
            return self._policy[0].hidden_states(input_ids)

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        with self._policy[0].disabled():
            return self._policy[0].states_at(input_ids, wanted)

    def pack_rows(self) -> None:
        self._policy[0].pack_rows()

    def checkpoint_gradients(self) -> None:
        raise NotImplementedError("it is never trained")

    def weights(self) -> dict[str, Tensor]:
        return self._policy[0].base_weights()
