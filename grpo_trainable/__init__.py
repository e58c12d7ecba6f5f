"""GRPO for language models as a Ray Tune Trainable.

Importing this package is cheap. Torch and Ray are imported when a name that needs them is first
used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainable.config import GRPOConfig
    from grpo_trainable.trainable import GRPOTrainable

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainable", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "GRPOConfig":
        from grpo_trainable.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainable":
        from grpo_trainable.trainable import GRPOTrainable

        return GRPOTrainable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
