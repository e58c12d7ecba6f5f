"""Names from private and alpha modules of Ray, which may move in any version of Ray.

No other file mentions such a module; `tests/unit/test_imports.py` checks this. Other files do use
private attributes of Tune's objects: docs/architecture/actors.md lists them.

The first import of a name from this file loads the Ray module that defines the name. So a process
loads only the Ray modules that it uses.

Code that differs between versions of Ray also belongs in this file
(docs/decisions/ray-versions.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray._private import services as services
    from ray._private.state import jobs as jobs
    from ray._raylet import Config as Config  # pyright: ignore[reportAttributeAccessIssue]
    from ray.air._internal.json import SafeFallbackEncoder as SafeFallbackEncoder
    from ray.air.constants import EXPR_PROGRESS_FILE as EXPR_PROGRESS_FILE
    from ray.air.constants import EXPR_RESULT_FILE as EXPR_RESULT_FILE
    from ray.air.constants import TRAINING_ITERATION as TRAINING_ITERATION
    from ray.experimental import deregister_nixl_memory as deregister_nixl_memory
    from ray.experimental import register_nixl_memory as register_nixl_memory
    from ray.experimental import set_target_for_ref as set_target_for_ref
    from ray.experimental import wait_tensor_freed as wait_tensor_freed
    from ray.experimental.collective import create_collective_group as create_collective_group
    from ray.experimental.collective import destroy_collective_group as destroy_collective_group
    from ray.experimental.internal_kv import _internal_kv_del as _internal_kv_del
    from ray.experimental.internal_kv import _internal_kv_exists as _internal_kv_exists
    from ray.experimental.internal_kv import _internal_kv_get as _internal_kv_get
    from ray.experimental.internal_kv import _internal_kv_put as _internal_kv_put
    from ray.experimental.rdt.util import (
        get_tensor_transport_manager as get_tensor_transport_manager,
    )
    from ray.train._internal.session import _TrainingResult as _TrainingResult
    from ray.train._internal.storage import StorageContext as StorageContext
    from ray.train._internal.storage import _FilesystemSyncer as _FilesystemSyncer
    from ray.tune.execution.tune_controller import TuneController as TuneController
    from ray.util.collective.const import get_store_name as get_store_name

_NAMES = {
    "ray._private": ("services",),
    "ray._private.state": ("jobs",),
    "ray._raylet": ("Config",),
    "ray.air._internal.json": ("SafeFallbackEncoder",),
    "ray.air.constants": ("EXPR_PROGRESS_FILE", "EXPR_RESULT_FILE", "TRAINING_ITERATION"),
    "ray.experimental": (
        "deregister_nixl_memory",
        "register_nixl_memory",
        "set_target_for_ref",
        "wait_tensor_freed",
    ),
    "ray.experimental.collective": ("create_collective_group", "destroy_collective_group"),
    "ray.experimental.internal_kv": (
        "_internal_kv_del",
        "_internal_kv_exists",
        "_internal_kv_get",
        "_internal_kv_put",
    ),
    "ray.experimental.rdt.util": ("get_tensor_transport_manager",),
    "ray.train._internal.session": ("_TrainingResult",),
    "ray.train._internal.storage": ("StorageContext", "_FilesystemSyncer"),
    "ray.tune.execution.tune_controller": ("TuneController",),
    "ray.util.collective.const": ("get_store_name",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

# Names that older versions of Ray do not have -> the first version that has them.
_SINCE = {"deregister_nixl_memory": (2, 56)}

SYNCER_LOGGER = "ray.train._internal.syncer"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def too_old_for(name: str) -> str | None:
    """Return None if this version of Ray defines a name, or else a one-line message."""
    installed, since = importlib.metadata.version("ray"), _SINCE.get(name, (0, 0))
    if _numbers(installed) >= since:
        return None
    needed = ".".join(map(str, since))
    return f"needs Ray {needed} or newer, and Ray {installed} is installed"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
