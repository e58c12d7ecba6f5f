"""What `model.lora_targets` says. Only the standard library is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping

ALL_LINEAR = "all-linear"  # every linear layer but the head
MATRIX = ".weight"
IN_A_LAYER = re.compile(r"\.\d+\.")  # the layers of a body are numbered; embedding and head are not


def names_in(targets: str) -> list[str]:
    """The names of modules in `targets`, which are separated by commas."""
    return [name.strip() for name in targets.split(",")]


def refuse_unknown_targets(targets: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Looks for the modules that `targets` names among the stored tensors of a model.

    Raises:
        ValueError: one is not there, or is no linear layer of the body, in one line.
    """
    names = names_in(targets)
    if names == [ALL_LINEAR]:
        return
    modules = {
        name.removesuffix(MATRIX): len(shape) == 2 and IN_A_LAYER.search(name) is not None
        for name, shape in shapes.items()
        if name.endswith(MATRIX)
    }
    linear = sorted({module.rpartition(".")[2] for module, fits in modules.items() if fits})
    valid = f"valid: {ALL_LINEAR}, or some of {', '.join(linear)}"
    for name in names:
        found = [module for module in modules if f".{module}".endswith(f".{name}")]
        if not found:
            raise ValueError(f"model.lora_targets: no layer is called {name!r}; {valid}")
        if not all(modules[module] for module in found):
            raise ValueError(f"model.lora_targets: {name} is no linear layer of the body; {valid}")
