"""LoRA adapters (Hu et al., arXiv 2106.09685) on a `transformers` model, made with `peft`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from grpo_trainable.models.hf.directory import ALL_LINEAR, names_in
from grpo_trainable.models.hf.policy import HFPolicy
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.policy import Policy, widened
from grpo_trainable.plugins import one_line

ADAPTER = "default"  # peft's name for the only adapter


class LoraPolicy(Policy):
    """A policy that trains only adapters. An adapted layer adds scale · B A to its weights.

    B begins at zero, so at first the policy equals the model without adapters, unless it starts
    from existing adapters. The adapters are float32 regardless of the precision of the model.
    """

    def __init__(
        self,
        base: HFPolicy,
        *,
        rank: int,
        alpha: float | None,
        targets: str,
        seed: int,
        start: Mapping[str, Tensor] | None = None,
        apart: bool = False,
    ) -> None:
        """Add adapters to `base`, which then computes with the adapters.

        Args:
            base: The model.
            rank: Rank of A and B.
            alpha: Numerator of the scale alpha / rank. With None, the scale is 2.
            targets: "all-linear" for every linear layer except the head, or names of modules
                separated by commas.
            seed: Seed for drawing A.
            start: Adapters to start from, under the names of `trained`. With None, A is drawn at
                random, and B is zero.
            apart: Make `weights` return the adapters as separate tensors, instead of merging them
                into the model's weights.

        Raises:
            ValueError: A target does not exist, or is not a linear layer of the body; or the
                adapters to start from do not fit. The message is one line.
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
        self._started_from = () if start is None else tuple(self.trained())
        if start is not None:
            copy_parameters(self.trained(), dict(start), source="model.adapter")
            for index, name in enumerate(self._started_from):
                # A buffer moves to a device together with the policy.
                self.register_buffer(f"start_{index}", start[name].clone(), persistent=False)

    def _refuse_other_layers(self, names: Sequence[str]) -> None:
        head, adapted = self.base.model.get_output_embeddings(), self._adapted()
        for name, layer in adapted.items():
            if layer is head or not isinstance(layer, Linear):
                raise ValueError(f"model.lora_targets: {name} is not a linear layer of the body")
        for name in names:
            if not any(f".{layer}".endswith(f".{name}") for layer in adapted):
                raise ValueError(f"model.lora_targets: no layer is called {name}")

    def _draw(self, seed: int) -> None:
        """Draw A as peft does, but from a separate random generator, and set B to zero."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._adapted().values():
            first, second = layer.lora_A[ADAPTER].float(), layer.lora_B[ADAPTER].float()
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(second.weight)

    def _adapted(self) -> dict[str, Any]:
        """Return the layers that have adapters, by their names in the model."""
        modules = self.base.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, LoraLayer)}

    # ---- The interface of a policy -------------------------------------------------------------

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""
        return self.base.head_weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) of ids (B, S), ready for the head."""
        return self.base.hidden_states(input_ids)

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the hidden states (T, D) at the T positions of `wanted`, bool (B, S)."""
        return self.base.states_at(input_ids, wanted)

    def pack_rows(self) -> None:
        """Make `states_at` process a token only once if several rows share it."""
        self.base.pack_rows()

    def checkpoint_gradients(self) -> None:
        """Make the layers recompute their activations in the backward pass."""
        self.base.checkpoint_gradients()

    def weights(self) -> dict[str, Tensor]:
        """Return, by name, the tensors that an engine samples with.

        With `apart`, adapters are separate tensors. Otherwise, adapters are merged into the
        weights.
        """
        if self._apart:
            return self.base.weights()
        base = self.base_weights()
        return {name: tensor.to(base[name].dtype) for name, tensor in self.merged()}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights with the adapters merged into them. Merged weights are float32.

        Neighbouring bfloat16 numbers differ by 0.4 to 0.8 %, so rounding would remove most of a
        small update.
        """
        adapted = {f"{name}.weight": layer for name, layer in self._adapted().items()}
        for name, weight in self.base_weights().items():
            layer = adapted.get(name)
            added = None if layer is None else layer.get_delta_weight(ADAPTER)
            yield name, weight if added is None else widened(weight) + added

    def base_weights(self) -> dict[str, Tensor]:
        """Return the model's live weights without the adapters, under their original names."""
        adapters = self.trained().keys()
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self.base.weights().items()
            if name not in adapters
        }

    def trained(self) -> dict[str, Tensor]:
        """Return the adapters' live parameters, under peft's names."""
        named = self.base.weights().items()
        return {name: tensor for name, tensor in named if ".lora_" in name}

    def frozen(self) -> Collection[str]:
        """Return the names of the tensors in `weights` that training never changes."""
        if self._apart:
            return self.weights().keys() - self.trained().keys()
        changed = {f"{name}.weight" for name in self._adapted()}
        return [name for name in self.base_weights() if name not in changed]

    def untrained(self) -> Policy:
        """Return the untrained policy, which shares memory with this policy."""
        return _Untrained(self)

    def start(self) -> dict[str, Tensor]:
        """Return, by name, the adapters that the policy started from, or {} if there were none."""
        return {
            name: self.get_buffer(f"start_{index}") for index, name in enumerate(self._started_from)
        }

    @contextmanager
    def as_untrained(self) -> Iterator[None]:
        """Make the policy compute as the untrained policy does, within this context."""
        live, start = self.trained(), self.start()
        trained = {name: live[name].data for name in start}
        layers = () if start else self._adapted().values()  # if `start` is empty, turn adapters off
        for name, tensor in start.items():
            live[name].data = tensor
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for name, tensor in trained.items():
                live[name].data = tensor
            for layer in layers:
                layer.enable_adapters(True)


class _Untrained(Policy):
    """A LoRA policy in its state before training. It shares memory with the policy in training."""

    def __init__(self, policy: LoraPolicy) -> None:
        super().__init__()
        self.context_length, self.vocab_size = policy.context_length, policy.vocab_size
        self.head_fp32 = policy.head_fp32
        # A tuple hides the policy from torch. As a submodule, the policy would be frozen and moved
        # together with this module.
        self._policy = (policy,)

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""
        return self._policy[0].head_weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) of ids (B, S), ready for the head."""
        with self._policy[0].as_untrained():
            return self._policy[0].hidden_states(input_ids)

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the hidden states (T, D) at the T positions of `wanted`, bool (B, S)."""
        with self._policy[0].as_untrained():
            return self._policy[0].states_at(input_ids, wanted)

    def pack_rows(self) -> None:
        """Make `states_at` process a token only once if several rows share it."""
        self._policy[0].pack_rows()

    def checkpoint_gradients(self) -> None:
        """Raise a NotImplementedError."""
        raise NotImplementedError("the untrained policy is never trained")

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights, and the adapters that the policy started from."""
        return self._policy[0].base_weights() | self._policy[0].start()


@torch.no_grad()
def merge(model: HFPolicy, adapters: Mapping[str, Tensor], scale: float) -> None:
    """Add adapters to the weights of a model, in place.

    Args:
        model: A model without adapters.
        adapters: The matrices A and B of each adapted layer, named as in `LoraPolicy.trained`.
        scale: Factor of B A.
    """
    weights = model.weights()
    for name, matrix in adapters.items():
        layer, _, rest = name.partition(".lora_A.")
        if rest:
            weight, other = weights[f"{layer}.weight"], adapters[f"{layer}.lora_B.{rest}"]
            weight.copy_(widened(weight) + scale * (other @ matrix))
