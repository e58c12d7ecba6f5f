"""Import an adapter's optional library when the adapter's factory is called."""

from __future__ import annotations

import importlib
from typing import Any

from grpo_trainable.plugins import missing_library


def library(module: str, extra: str) -> Any:
    """Import `module` from an optional library, which the extra named `extra` installs.

    Raises:
        ValueError: If the library is not installed. The message is one line with the command that
            installs it.
    """
    name = module.partition(".")[0]
    missing = missing_library(name, f"pip install -e '.[{extra}]'")
    if missing is not None:
        raise ValueError(missing)
    return importlib.import_module(module)
