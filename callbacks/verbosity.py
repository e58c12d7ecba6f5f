"""Whether callbacks print more than the console does.

Of the process, not of a callback: Tune pickles callbacks with the experiment, and a resumed one may
be asked for more or less than the first.
"""

from __future__ import annotations

from typing import Any

from callbacks.trial_files import config_of

_on = False


def set_verbose(on: bool) -> None:
    global _on
    _on = on


def is_verbose(trial: Any) -> bool:
    """Asked for in general, or by `callbacks.verbose` of the trial."""
    return _on or config_of(trial).callbacks.verbose
