"""Callbacks that cannot end an experiment: what goes wrong in one is told once."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from ray.tune import Callback

logger = logging.getLogger(__name__)

HOOKS = tuple(name for name, value in vars(Callback).items() if inspect.isfunction(value))


class Survivor(Callback):
    """Mixed in before Tune's own callbacks as well: `class X(Survivor, TBXLoggerCallback)`.

    Tune lets an exception in a callback end every trial. Here it is logged, once for each hook and
    trial, and the run goes on without what the callback would have done: with its traceback, unless
    the system refused a file (no space, no permission), which is nobody's bug.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in HOOKS:
            method = getattr(cls, hook)
            if not hasattr(method, "__survives__"):
                setattr(cls, hook, _surviving(method))


def _surviving(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            trial = kwargs.get("trial")
            told = self.__dict__.setdefault("_told", set())
            if (method.__name__, trial and trial.trial_id) not in told:
                told.add((method.__name__, trial and trial.trial_id))
                number = error.errno if isinstance(error, OSError) else None
                logger.error(
                    "%s.%s failed for %s%s; the run goes on without it (told once)",
                    type(self).__name__,
                    method.__name__,
                    "the experiment" if trial is None else f"trial {trial}",
                    "" if number is None else f" ({os.strerror(number)})",
                    exc_info=number is None,
                )
            return None

    run.__survives__ = True  # type: ignore[attr-defined]
    return run
