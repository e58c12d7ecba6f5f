"""A model's own tensors by name, and copying into them."""

from __future__ import annotations

import torch
from torch import Tensor


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Live parameters by name, a tied head once."""
    return dict(model.named_parameters())


def copy_parameters(model: torch.nn.Module, tensors: dict[str, Tensor], *, source: str) -> None:
    """Copies `tensors` into the model's own storage.

    Raises:
        ValueError: names or shapes do not match exactly; nothing has been copied then.
    """
    parameters = unique_parameters(model)
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())
        raise ValueError(f"{source}: parameters do not match the model, first at {odd[0]!r}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(
                f"{source}: {name} is {tuple(tensors[name].shape)}, "
                f"the model's is {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
