"""Set-up of a worker process: it takes the standard streams and ends when its parent ends."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from typing import TextIO


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process and its group when the other end of the pipe is closed."""
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, os.O_ASYNC)
    # If the pipe was closed before this point, no signal comes. Nothing is ever written to the
    # pipe, so it is readable only if it is closed.
    if select.select([lifeline_fd], [], [], 0)[0]:
        sys.exit()


def take_standard_streams() -> tuple[TextIO, TextIO]:
    """Return the streams of the protocol, and detach the user's code from them.

    After this call, the user's code reads empty input, and everything that it prints goes to
    standard error.
    """
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # by line: a killed process does not flush
    return requests, replies
