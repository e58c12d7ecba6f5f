"""Callbacks that cannot end an experiment, because their exceptions are logged and not raised."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from ray.tune import Callback

from grpo_trainable.config import ConfigError

logger = logging.getLogger(__name__)

# Trials of other Trainables for which `_log_foreign` has logged its line.
_foreign: set[str] = set()

HOOKS = tuple(name for name, value in vars(Callback).items() if inspect.isfunction(value))


class FailSafeCallback(Callback):
    """Base of callbacks whose exceptions are logged instead of ending every trial.

    For each hook and trial, only the first exception is logged. The run continues without the work
    that the callback would have done. The log includes the traceback, unless the operating system
    refused to read or write a file (no space, no permission), because that is not a bug in the
    callback.

    A class can inherit from this class and Tune's own callbacks if this class comes first:
    `class X(FailSafeCallback, TBXLoggerCallback)`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in HOOKS:
            method = getattr(cls, hook)
            if not hasattr(method, "__fail_safe__"):
                setattr(cls, hook, _fail_safe(method))


def _fail_safe(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ConfigError:
            # If the settings of one of our trials could not be used, the trial would have failed
            # before a callback could read them.
            _log_foreign(kwargs.get("trial"))
            return None
        except Exception as error:
            _log_once(self, method.__name__, kwargs.get("trial"), error)
            return None

    run.__fail_safe__ = True  # type: ignore[attr-defined]
    return run


def _log_foreign(trial: Any) -> None:
    if str(trial) in _foreign:
        return
    _foreign.add(str(trial))
    logger.error(
        "%s: grpo_callbacks() record only trials of GRPOTrainable, which has the name GRPO, and "
        "cannot read this trial's settings. Leave these callbacks out: RLlib's algorithm, "
        "GRPO-RLlib, logs through RLlib and Tune",
        trial,
    )


def _log_once(callback: Any, hook: str, trial: Any, error: Exception) -> None:
    logged = callback.__dict__.setdefault("_logged", set())
    key = (hook, trial and trial.trial_id)
    if key in logged:
        return
    logged.add(key)
    number = error.errno if isinstance(error, OSError) else None
    logger.error(
        "%s.%s failed for %s%s; the run continues without it (reported once)",
        type(callback).__name__,
        hook,
        "the experiment" if trial is None else f"trial {trial}",
        "" if number is None else f" ({os.strerror(number)})",
        exc_info=error if number is None else None,
    )
