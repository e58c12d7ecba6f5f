"""The tensors of a model by name: copying into them, and replacing them."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.model_config import match_shapes

# Alignment of torch's own tensors, in bytes. Products of tensors with a different alignment may
# differ in their last bits.
ALIGNMENT = 64


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the live parameters by name. A tied head appears once."""
    return dict(model.named_parameters())


def copy_parameters(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], *, source: str
) -> None:
    """Copy `tensors` into the parameters' storage.

    Raises:
        ValueError: Names or shapes do not match exactly. The parameters are left unchanged.
    """
    _match(parameters, tensors, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def adopt_parameters(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], *, source: str
) -> None:
    """Make `tensors` the parameters of a model.

    The memory of `tensors` is used in place. A tensor is copied only if its type or device differs
    from the parameter's, or if its memory is not aligned like that of torch's own tensors. Adopted
    memory is never written to, so it may be read-only.

    Raises:
        ValueError: Names or shapes do not match exactly.
    """
    _match(parameters, tensors, source)
    for name, parameter in parameters.items():
        tensor = tensors[name].to(device=parameter.device, dtype=parameter.dtype)
        aligned = tensor.data_ptr() % ALIGNMENT == 0
        parameter.data = tensor if aligned else tensor.clone()


def _match(parameters: dict[str, Tensor], tensors: dict[str, Tensor], source: str) -> None:
    """Compare names and shapes.

    Raises:
        ValueError: Names or shapes differ.
    """
    match_shapes(_shapes(parameters), _shapes(tensors), source)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
