"""What `model.lora_targets` says. Only the standard library is imported."""

from __future__ import annotations

ALL_LINEAR = "all-linear"  # every linear layer but the head


def names_in(targets: str) -> list[str]:
    """The names of modules in `targets`, which are separated by commas."""
    return [name.strip() for name in targets.split(",")]
