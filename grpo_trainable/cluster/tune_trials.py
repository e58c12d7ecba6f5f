"""Trials of this package under Tune: an invalid trial fails alone, and trial names are readable.

A search may sample settings that contradict each other. Tune asks a Trainable for its resources
before the trial exists. An error at that point would end the whole experiment, and also every
attempt to restore the experiment. Instead, the trial starts with a small bundle and fails at its
first step.

Importing this module changes three methods of Tune's `Trial`, because Tune has no public interface
for these changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Trial

from grpo_trainable.config import ConfigError, GRPOConfig, resources
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.calls import FailsAgain

# Errors in a trial's settings, or in user code that the settings name.
INVALID = (ConfigError, PluginError)


def requested(settings: Callable[[], GRPOConfig]) -> PlacementGroupFactory:
    """Return one bundle for the trial's own process, and one for each actor.

    Args:
        settings: Function that returns the settings of the trial. If this function raises
            ConfigError, there are no bundles for actors.
    """
    try:
        config = settings()
    except ConfigError:
        return PlacementGroupFactory([resources.OWN_BUNDLE])
    return PlacementGroupFactory(
        resources.bundles(config), strategy=resources.placement_strategy(config)
    )


class InvalidTrial:
    """Takes the place of a trial that cannot run. Any use except `end()` raises the trial's error.

    Tune ends the process of a failed trial, so no other trial gets this object.
    """

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise self._reason

    def end(self) -> None:
        """Do nothing, because there are no actors."""


# ---- Changes to Tune's own class -----------------------------------------------------------------

_tunes_handle_error = Trial.handle_error
_tunes_should_recover = Trial.should_recover
_tunes_name: Any = Trial._trainable_name


def _handle_error(self: Trial, exc: Any = None) -> None:
    """Count a failure as Tune does, and record whether the failure would repeat.

    Tune stores a trial without its temporary state, so a restored trial gets all its retries again.
    """
    _tunes_handle_error(self, exc)
    state: Any = self.temporary_state
    state.fails_again = isinstance(exc, (*INVALID, FailsAgain))


def _should_recover(self: Trial) -> bool:
    """Return True if Tune retries the trial. Tune does not retry a failure that would repeat."""
    return not getattr(self.temporary_state, "fails_again", False) and _tunes_should_recover(self)


def _name(self: Any, include_trial_id: bool = False) -> str:
    """Return Tune's name for a trial. The name of the trial's directory begins with it.

    Tune adds `config["env"]` to the name, because this entry of RLlib's config is the name of an
    environment. In our config, `env` is a section of settings, so this function leaves it out.
    """
    if self.custom_trial_name or not isinstance(self.config.get("env"), Mapping):
        return _tunes_name(self, include_trial_id)
    name = self.trainable_name.replace("/", "_")
    return f"{name}_{self.trial_id}" if include_trial_id else name


Trial.handle_error = _handle_error
Trial.should_recover = _should_recover
Trial._trainable_name = _name
