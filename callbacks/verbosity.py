"""Whether callbacks print more than the console does.

This is a setting of the process, not of a callback: Tune pickles callbacks with the experiment, and
a resumed experiment may be more or less verbose than the first command.
"""

from __future__ import annotations

from typing import Any

from callbacks.trial_files import config_of

_on = False


def set_verbose(on: bool) -> None:
    global _on
    _on = on


def is_verbose(trial: Any) -> bool:
    """Whether the command or the trial's `callbacks.verbose` asks for it."""
    return _on or config_of(trial).callbacks.verbose
