"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) without `torch.optim.Optimizer`.

The constructor of `torch.optim.Optimizer` imports torch's compiler, which nothing here needs. The
import takes more than a second of CPU time in every process that trains. The results are the same
as with `torch.optim.AdamW`, because this code calls the same fused kernel on the same state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

EPSILON = 1e-8  # as in torch.optim.AdamW


@dataclass(kw_only=True)
class ParameterGroup:
    """Parameters that share a learning rate."""

    parameters: list[Tensor]
    lr: float


class AdamW:
    """AdamW for groups of floating-point parameters."""

    def __init__(
        self, groups: Iterable[ParameterGroup], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.groups = list(groups)
        self._betas = betas
        self._weight_decay = weight_decay
        # The state that a checkpoint stores for each parameter, under the names of
        # torch.optim.AdamW: `step`, `exp_avg`, `exp_avg_sq`. A parameter's state is empty before
        # its first step.
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.groups:
            self._step(group)

    def _step(self, group: ParameterGroup) -> None:
        parameters = [each for each in group.parameters if each.grad is not None]
        states = [self._state_of(each) for each in parameters]
        beta1, beta2 = self._betas
        adamw(
            parameters,
            [each.grad for each in parameters if each.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # maxima of `exp_avg_sq`, used only by AMSGrad
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group.lr,
            weight_decay=self._weight_decay,
            eps=EPSILON,
            maximize=False,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state

    def zero_grad(self) -> None:
        """Drop the gradients and free their memory."""
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None
