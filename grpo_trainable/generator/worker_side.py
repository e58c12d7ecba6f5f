"""Set up a worker process: take over its standard streams, and end it when its parent ends."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from typing import TextIO


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process group when the parent closes the pipe `lifeline_fd`."""
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, os.O_ASYNC)
    # If the pipe was closed before this point, no signal comes. Nothing is ever written to the
    # pipe, so it is readable only if it is closed.
    if select.select([lifeline_fd], [], [], 0)[0]:
        sys.exit()


def take_standard_streams() -> tuple[TextIO, TextIO]:
    """Return the streams for requests and replies, and detach the user's code from them.

    After this call, the user's code reads empty input, and everything that it prints goes to
    standard error.
    """
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Flush after every line, because a process that is killed loses unflushed output.
    sys.stdout = os.fdopen(1, "w", buffering=1)
    return requests, replies
