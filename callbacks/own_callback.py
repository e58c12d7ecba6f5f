"""Load a user's Tune callback from a file or a module."""

from __future__ import annotations

from ray.tune import Callback

from callbacks.fail_safe import FailSafeCallback
from grpo_trainable.plugins import PluginError, load, one_line

OPTION = "--callback"


def own_callback(reference: str) -> Callback:
    """Load a user's callback class, and return an instance whose exceptions are only logged.

    A pickle of the instance contains only `reference`. So a resume loads the class again, even from
    a changed file, and makes a new instance.

    Raises:
        PluginError: The class cannot be imported, is not a callback, or cannot be instantiated.
    """
    found = load(OPTION, reference)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise PluginError(f"{OPTION} {reference}: must be a class derived from ray.tune.Callback")
    try:

        class OwnCallback(FailSafeCallback, found):
            def __reduce__(self) -> tuple:
                return own_callback, (reference,)

        OwnCallback.__name__ = found.__name__  # the name in error messages
        return OwnCallback()
    except Exception as error:
        raise PluginError(
            f"{OPTION} {reference}: cannot be instantiated: {one_line(error)}"
        ) from error
