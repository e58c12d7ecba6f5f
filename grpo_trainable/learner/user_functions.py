"""The configured loss and advantage: built-in functions or user-defined ones.

A user-defined function is tried on a small batch when the learner is built, and by `user_code`
before any actor starts. The result of the function is checked at every call. Each mistake raises a
`PluginError`, whose message is one line and names the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.algo import (
    ADVANTAGES,
    LOSSES,
    SELECTIONS,
    Advantage,
    Selection,
    TokenLoss,
    masked_sum,
)
from grpo_trainable.config import LossSettings
from grpo_trainable.plugins import PluginError, load, one_line, users_line


def loss_function(loss_type: str, device: torch.device) -> TokenLoss:
    """Return the loss that `loss.type` names. A user-defined loss is first tried on `device`.

    Raises:
        PluginError: The user-defined function cannot be loaded or fails its test call.
    """
    return LOSSES.get(loss_type) or UserLoss(loss_type, device)


def configured_loss(settings: LossSettings, device: torch.device) -> TokenLoss:
    """Return the loss that `loss.type` names, bound to the settings that only this loss reads.

    Raises:
        PluginError: As in `loss_function`.
    """
    loss = loss_function(settings.type, device)
    return partial(loss, **_own_settings(loss, settings))


def configured_selection(settings: LossSettings) -> Selection | None:
    """Return the function that selects tokens for the loss, or None if the loss selects none."""
    select = SELECTIONS.get(settings.type)
    return None if select is None else partial(select, **_own_settings(select, settings))


def _own_settings(function: Callable[..., Any], settings: LossSettings) -> dict[str, Any]:
    """Return the settings that a built-in function takes as keyword arguments.

    The clip range is left out, because it is passed to every loss.
    """
    return {
        name: getattr(settings, name)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and name not in ("clip_low", "clip_high", "selected")
    }


def advantage_function(advantage: str, group_size: int) -> Advantage:
    """Return the advantage that `loss.advantage` names.

    A user-defined advantage is first tried on groups of `group_size` responses.

    Raises:
        PluginError: The user-defined function cannot be loaded or fails its test call.
    """
    return ADVANTAGES.get(advantage) or UserAdvantage(advantage, group_size)


class UserLoss:
    """A user-defined loss, with the signature and the two results of a built-in loss."""

    def __init__(self, reference: str, device: torch.device) -> None:
        self._function = _UserFunction("loss.type", reference, like=LOSSES["no_baseline"])
        self._try(device)

    def __call__(self, *batch: Tensor, **clip: float) -> tuple[Tensor, Tensor]:
        """Call the function. If the function returns only the loss, no token counts as clipped.

        Raises:
            PluginError: The function raised an exception or did not return a loss per token.
        """
        log_probs, _, _, mask = batch
        returned = self._function(*batch, **clip)
        token_loss, clipped = returned, torch.zeros_like(mask)
        if isinstance(returned, tuple) and len(returned) == 2:
            token_loss, clipped = returned
        self._function.require(
            token_loss,
            log_probs,
            "the loss, one number per token (loss.aggregation averages them),",
        )
        self._function.require(clipped, mask, "the mask of clipped tokens")
        if not token_loss.requires_grad:
            raise self._function.error(
                "the loss carries no gradient: compute it from log_probs, without detach or no_grad"
            )
        return token_loss, clipped

    def _try(self, device: torch.device) -> None:
        """Check that losses and gradients of three short responses are finite."""
        mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]], device=device).bool()
        # The ratios are e^0.1, 1 and e^-0.1. The advantages are positive, negative and 0.
        old = -mask.float()
        log_probs = (old + 0.1 * mask * torch.tensor([[1], [0], [-1]], device=device)).detach()
        advantages = mask * torch.tensor([[1.0], [-1.0], [0.0]], device=device)
        parameters = log_probs.clone().requires_grad_()
        given = (parameters * 1, old, advantages, mask)
        before = [tensor.detach().clone() for tensor in given]
        token_loss, _ = self(*given, clip_low=0.2, clip_high=0.2)
        if not all(torch.equal(*pair) for pair in zip(given, before, strict=True)):
            raise self._function.error("changes its arguments in place; work on copies of them")
        (gradient,) = torch.autograd.grad(
            masked_sum(token_loss, mask), parameters, allow_unused=True
        )
        if gradient is None or not gradient.any():
            raise self._function.error(
                "the loss has no gradient with respect to log_probs, so nothing would be learned"
            )
        for what, values in (("loss", token_loss), ("gradient", gradient)):
            if not values[mask].isfinite().all():
                raise self._function.error(
                    f"the {what} of three ordinary responses is not finite; "
                    "look for a division by 0 or the square root of 0"
                )


class UserAdvantage:
    """A user-defined advantage, with the signature of a built-in advantage."""

    def __init__(self, reference: str, group_size: int) -> None:
        self._function = _UserFunction("loss.advantage", reference, like=ADVANTAGES["group_std"])
        self._try(group_size)

    @torch.no_grad()
    def __call__(self, rewards: Tensor, *, eps: float) -> Tensor:
        """Call the function without recording gradients.

        Raises:
            PluginError: The function raised an exception or did not return one advantage per
                reward.
        """
        advantages = self._function(rewards, eps=eps)
        self._function.require(advantages, rewards, "the advantage of each reward")
        return advantages

    def _try(self, group_size: int) -> None:
        """Check that advantages are finite, both for different rewards and for equal rewards."""
        rewards = torch.stack([torch.linspace(0, 1, group_size), torch.full((group_size,), 0.5)])
        advantages = self(rewards.clone(), eps=1e-8)
        if not advantages.isfinite().all():
            raise self._function.error(
                f"gives {_rounded(advantages)} for the rewards {_rounded(rewards)}; "
                "add eps to every divisor"
            )


class _UserFunction:
    """Wraps a user-defined function, and reports each of its mistakes in one line."""

    def __init__(self, key: str, reference: str, *, like: Callable[..., Any]) -> None:
        """Load a function and check its arguments.

        Args:
            key: The setting that names the function.
            reference: The function's name in that setting.
            like: A built-in function that is called with the same arguments.
        """
        self._key = key
        self._reference = reference
        self._call = load(key, reference)
        self._check_arguments(like)

    def _check_arguments(self, like: Callable[..., Any]) -> None:
        parameters = inspect.signature(like).parameters.values()
        positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        try:
            inspect.signature(self._call).bind(*positional, **dict.fromkeys(named))
        except (TypeError, ValueError) as error:
            arguments = ", ".join((*positional, "*", *named))
            raise self.error(f"{error}; the function must take ({arguments})") from None

    def __call__(self, *tensors: Tensor, **settings: float) -> Any:
        try:
            return self._call(*tensors, **settings)
        except Exception as error:
            raise self.error(f"raised {one_line(error)}{users_line(error)}") from error

    def require(self, value: Any, like: Tensor, what: str) -> None:
        """Raise an error unless `value` is a tensor with the shape, type and device of `like`."""
        if _described(value) != _described(like):
            raise self.error(f"{what} must be {_described(like)}, but it is {_described(value)}")

    def error(self, reason: str) -> PluginError:
        """Return the error for a mistake in the function."""
        return PluginError(f"{self._key}={self._reference}: {reason}")


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"a {dtype} tensor of shape {tuple(value.shape)} on {value.device}"


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in values.tolist()]
