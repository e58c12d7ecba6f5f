"""Import a library that a single adapter needs, when the adapter's factory is called."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def library(module: str, extra: str) -> Any:
    """Import `module` from an optional library, which this package's `extra` installs.

    Raises:
        ValueError: If the library is not installed. The message is one line with the command that
            installs it.
    """
    name = module.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"the library {name} is not installed: pip install -e '.[{extra}]'")
    return importlib.import_module(module)
