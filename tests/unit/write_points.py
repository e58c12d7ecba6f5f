"""A process that dies at a chosen point while it writes files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def killed_at(event: int, action: Callable[[], object], directory: Path) -> bool:
    """Run `action` in a child process; return True if it was SIGKILLed before the `event`-th event.

    An event creates `directory`, or opens, renames or removes a file in it. If there are fewer
    events, the process ends normally.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if name in EVENTS and str(arguments[0]).startswith(str(directory)):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(count)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL
