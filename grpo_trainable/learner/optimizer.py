"""AdamW for the policy and its critic, with schedules, gradient clipping and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.adamw import AdamW, ParameterGroup
from grpo_trainable.learner.ranks import ALONE, Ranks


class StepTaken(NamedTuple):
    """The figures of one optimizer step."""

    grad_norm: float  # norm of the policy's gradient, before clipping
    lr: float
    skipped: bool  # True: nothing changed, because loss or gradient was not finite
    critic_grad_norm: float  # norm of the critic's gradient, before clipping; 0 without a critic


class PolicyOptimizer:
    """Takes gradient steps, and skips steps whose loss or gradient is not finite."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: GRPOConfig,
        critic: Mapping[str, Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Create an optimizer that has not taken any steps.

        Args:
            parameters: The policy's trained parameters by name, without duplicates.
            config: The trial's settings.
            critic: The parameters that belong only to the critic, by name. These parameters have
                their own learning rate, and their gradient norm is clipped separately.
            ranks: The ranks whose gradients add up to the step's gradient.
        """
        self._config = config
        self._ranks = ranks
        self._masters = MasterWeights({**parameters, **(critic or {})})
        self._parameters = self._masters.parameters
        self._policy = [self._parameters[name] for name in parameters]
        self._critic = [self._parameters[name] for name in critic or ()]
        self._adamw = _adamw([self._policy, self._critic], config)
        self.steps = 0  # number of steps taken, which is the policy's version
        self.skipped = 0
        self._skipped_in_a_row = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step.

        The rate depends only on the number of steps taken, so there is no scheduler state to save.
        """
        return self._scheduled(self._config.optim.lr)

    def _scheduled(self, lr: float) -> float:
        """Apply the linear warm-up, and the decay that follows it, to a learning rate.

        The first of w warm-up steps has the rate lr / (w + 1), and the first step after the warm-up
        has the rate lr.
        """
        k, optim = self._config.k, self._config.optim
        warmup, total = optim.warmup_rounds * k, self._config.rounds * k
        if self.steps < warmup:
            return lr * (self.steps + 1) / (warmup + 1)
        done = min(1.0, (self.steps - warmup) / max(1, total - warmup))
        match optim.schedule:
            case "linear":
                return lr * (1 - done)
            case "cosine":
                return lr * (1 + math.cos(math.pi * done)) / 2
        return lr

    def step(self, loss: float) -> StepTaken:
        """Take a step with the parameters' gradients, then drop the gradients.

        Args:
            loss: The step's loss. The step is skipped if this loss or a gradient norm is not
                finite.

        Raises:
            RuntimeError: More than `optim.max_skipped_steps` consecutive steps had a loss or
                gradient that was not finite.
        """
        lr = self.learning_rate
        rates = (lr, self._scheduled(self._config.critic_lr))
        for group, rate in zip(self._adamw.groups, rates, strict=True):
            group.lr = rate
        self._ranks.sum_gradients([*self._policy, *self._critic])
        grad_norm, critic_norm = self._limited(self._policy), self._limited(self._critic)
        skip = not all(map(math.isfinite, (loss, grad_norm, critic_norm)))
        if skip:
            self.skipped += 1
            self._skipped_in_a_row += 1
        else:
            self._adamw.step()
            self._masters.round_off()
            self.steps += 1
            self._skipped_in_a_row = 0
        self._adamw.zero_grad()
        self._give_up_when_stuck()
        return StepTaken(grad_norm=grad_norm, lr=lr, skipped=skip, critic_grad_norm=critic_norm)

    def _limited(self, parameters: Sequence[Tensor]) -> float:
        """Clip the gradient norm of `parameters`.

        Return the norm before clipping, or 0 if there are no parameters.
        """
        if not parameters:
            return 0.0
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.optim.grad_clip)
        return float(self._ranks.whole(norm))

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        self._adamw.zero_grad()

    def _give_up_when_stuck(self) -> None:
        allowed = self._config.optim.max_skipped_steps
        if self._skipped_in_a_row > allowed:
            raise RuntimeError(
                f"{self._skipped_in_a_row} gradient steps in a row had a loss or gradient that "
                f"was not finite (optim.max_skipped_steps={allowed}); "
                "lower optim.lr or check the rewards"
            )

    def warm_up(self) -> None:
        """Run clipping and a step of AdamW once, then drop the gradients.

        All existing gradients are clipped. A second AdamW, whose only parameter is a single scalar,
        takes the step. So the warm-up neither copies a large policy nor allocates moments for it.
        The first real step still allocates the policy's moments.
        """
        self._limited(self._policy)
        self._limited(self._critic)
        self._adamw.zero_grad()
        number = torch.nn.Parameter(torch.zeros(1, device=self._policy[0].device))
        number.grad = torch.ones_like(number)
        _adamw([[number]], self._config).step()

    # ---- Checkpoints -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return AdamW's moments and counters, and the master weights, keyed by PARAMETER/NAME.

        The result contains the live tensors, not copies.
        """
        return self._masters.tensors() | {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state[parameter].items()
        }

    def counters(self) -> dict[str, Any]:
        """Return the counters for a checkpoint."""
        return {
            "version": self.steps,
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state(self, state: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Continue from a state. Each tensor is removed from `state` once it is copied."""
        self._masters.load_state(state)
        for name, parameter in self._parameters.items():
            prefix = f"{name}/"
            self._adamw.state[parameter] = {
                key.removeprefix(prefix): _stored_like(
                    parameter, self._ranks.part(state.pop(key), parameter)
                )
                for key in [key for key in state if key.startswith(prefix)]
            }
        self.steps = counters["version"]
        self.skipped = counters["skipped_steps"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]


def _adamw(parameters: Sequence[list[Tensor]], config: GRPOConfig) -> AdamW:
    """Create an AdamW in which each list of parameters is a group with its own learning rate."""
    return AdamW(
        [ParameterGroup(parameters=group, lr=config.optim.lr) for group in parameters],
        betas=config.optim.betas,
        weight_decay=config.optim.weight_decay,
    )


def _stored_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy a tensor of AdamW's state to the parameter's device.

    A tensor that has the parameter's shape also gets the parameter's memory layout, because the
    fused optimizer assumes equal layouts.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


# In a checkpoint, a master weight has the key PARAMETER/master. The other keys end in names from
# AdamW.
MASTER = "master"


class MasterWeights:
    """The float32 tensors that an optimizer trains.

    These tensors are the float32 parameters themselves, and float32 copies of all other parameters.
    As soon as the backward pass has computed the gradient of a copied parameter, that gradient is
    added, in float32, to the gradient of the copy.
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
        """Round the copies, and write them into the policy."""
        for name, parameter in self._rounded.items():
            parameter.copy_(self.copies[name])

    # ---- Checkpoints -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies, keyed by PARAMETER/master."""
        return {f"{name}/{MASTER}": copy for name, copy in self.copies.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state. The master weights are removed from `state`."""
        for name, copy in self.copies.items():
            copy.copy_(state.pop(f"{name}/{MASTER}"))


def _pass_on_gradient(parameter: Tensor, copy: Tensor) -> None:
    def pass_on(_: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.float(), None
        copy.grad = gradient if copy.grad is None else copy.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(pass_on)
