"""Trials with invalid settings, under Tune: each fails with its reason, and the others run.

A search may sample settings that contradict each other. Tune asks a Trainable for its resources
before the trial exists, so an error at that point would end the whole experiment, and every restore
of it. Instead, the trial starts with a small bundle and fails at its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Trial

from grpo_trainable.config import ConfigError, GRPOConfig, resources


def requested(settings: Callable[[], GRPOConfig]) -> PlacementGroupFactory:
    """Return one bundle for the trial's own process, and one for each actor.

    Args:
        settings: Returns the settings of the trial. If it raises ConfigError, there are no actors.
    """
    try:
        config = settings()
    except ConfigError:
        return PlacementGroupFactory([resources.OWN_BUNDLE])
    return PlacementGroupFactory(
        resources.bundles(config), strategy=resources.placement_strategy(config)
    )


class InvalidTrial:
    """Takes the place of a trial whose settings are invalid. Using it raises the reason."""

    def __init__(self, reason: ConfigError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise self._reason

    def reset(self, *_: Any) -> bool:
        """Return False, because other settings need actors, for which no bundle is reserved."""
        return False

    def end(self) -> None:
        """Do nothing, because there are no actors."""


_tunes_handle_error = Trial.handle_error


def _handle_error(self: Trial, exc: Any = None) -> None:
    """Count a failure as Tune does, and allow no retry after a failure that would repeat."""
    _tunes_handle_error(self, exc)
    if isinstance(exc, ConfigError):
        self.max_failures = 0


Trial.handle_error = _handle_error  # Tune has no public way to do this
