"""Float32 copies of parameters in lower precision, which the optimizer trains in their place.

A step of AdamW changes a weight by about the learning rate. Numbers in bfloat16 lie 0.4 to 0.8 %
apart, so that most such changes would be rounded away (Micikevicius et al., arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MASTER = "master"  # what a checkpoint calls one, beside AdamW's own names


class MasterWeights:
    """What an optimizer trains: float32 parameters themselves, float32 copies of all others.

    A gradient is added to its copy's, in float32, as soon as the backward pass has it.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._rounded = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.dtype.itemsize < 4 and parameter.requires_grad
        }
        self.copies = {
            name: torch.nn.Parameter(parameter.detach().float())
            for name, parameter in self._rounded.items()
        }
        self.parameters: dict[str, Tensor] = {**parameters, **self.copies}
        for name, parameter in self._rounded.items():
            _pass_on_gradient(parameter, self.copies[name])

    @torch.no_grad()
    def round_off(self) -> None:
        """Puts the copies, rounded, into the policy."""
        for name, parameter in self._rounded.items():
            parameter.copy_(self.copies[name])

    # ---- Checkpoints -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The copies, by parameter/master."""
        return {f"{name}/{MASTER}": copy for name, copy in self.copies.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Goes on from `state`, and takes the master weights out of it."""
        for name, copy in self.copies.items():
            copy.copy_(state.pop(f"{name}/{MASTER}"))


def _pass_on_gradient(parameter: Tensor, copy: Tensor) -> None:
    def pass_on(_: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.float(), None
        copy.grad = gradient if copy.grad is None else copy.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(pass_on)
