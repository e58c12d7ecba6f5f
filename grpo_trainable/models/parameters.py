"""The tensors of a model by name: copying into them, and putting others in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainable.models.model_config import match_shapes

# Bytes to which torch aligns its own tensors; products of other memory may differ in their last
# bits.
ALIGNMENT = 64


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Live parameters by name, a tied head once."""
    return dict(model.named_parameters())


def copy_parameters(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], *, source: str
) -> None:
    """Copies `tensors` into a model's own storage.

    Raises:
        ValueError: names or shapes do not match exactly; nothing has been copied then.
    """
    _match(parameters, tensors, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def adopt_parameters(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], *, source: str
) -> None:
    """Makes `tensors` the parameters of a model.

    Their memory is used in place, and copied only where type or device differ or where it is not
    aligned like torch's own. Adopted memory is never written to, so it may be read-only.

    Raises:
        ValueError: as `copy_parameters`.
    """
    _match(parameters, tensors, source)
    for name, parameter in parameters.items():
        tensor = tensors[name].to(device=parameter.device, dtype=parameter.dtype)
        aligned = tensor.data_ptr() % ALIGNMENT == 0
        parameter.data = tensor if aligned else tensor.clone()


def _match(parameters: dict[str, Tensor], tensors: dict[str, Tensor], source: str) -> None:
    """Compares names and shapes.

    Raises:
        ValueError: they are not the same.
    """
    match_shapes(_shapes(parameters), _shapes(tensors), source)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
