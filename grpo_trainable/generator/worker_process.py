"""A process with a user's code in it, and the conversation with it: JSON lines, each with a
deadline. It can be killed at any time, with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from grpo_trainable.telemetry.progress import advance

WAIT_S = 0.5  # how long a process is waited for until the wait is told as progress
START_DEADLINE_S = 120.0  # a user's module may import torch on a busy machine
# A process that a worker has started is known by this variable, wherever it went since.
MARK = "GRPO_TRAINABLE_WORKER"
MOST_SWEEPS = 100
MOST_BYTES = 64 << 20  # the longest reply; more is no reply


class WorkerProcess:
    """One process and the conversation with it."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], directory: str | None = None
    ) -> None:
        """Runs `python -m MODULE FIRST LIFELINE_FD REST…` in `directory`. `name`: what is wrong
        where it cannot start, such as `task.reward=my.py:score`."""
        self._name = name
        first, *rest = arguments
        self._mark = uuid.uuid4().hex
        program = [sys.executable, "-m", module, first]
        # The worker ends when our end of this pipe closes, even if we are killed.
        lifeline, our_end = os.pipe()
        self._lifeline = os.fdopen(our_end, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [*program, str(lifeline), *rest],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=directory,
                # A Ray worker has the driver's sys.path, but its children do not inherit that.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    MARK: self._mark,
                },
                pass_fds=[lifeline],
                # Its own group, so that kill() takes the user's subprocesses too and Ctrl-C, which
                # is ours to handle, does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = b""
        self._killed = self._stopped = False

    def wait_until_ready(self) -> None:
        """ValueError with the name when what it is for cannot be had."""
        try:
            reply = self._converse(b"", START_DEADLINE_S)
        except TimeoutError:
            reason = f"not imported within {START_DEADLINE_S:g} s"
        except EOFError as death:
            reason = f"its import ended the process, {death}"
        else:
            if "error" not in reply:
                return
            self.kill()
            raise ValueError(reply["error"])
        raise ValueError(f"{self._name}: {reason}")

    def ask(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The reply; when none comes TimeoutError, or EOFError saying how the process died."""
        return self._converse(json.dumps(message).encode() + b"\n", deadline_s)

    def is_alive(self) -> bool:
        """Whether it may be asked; one that was told to end need not have ended yet."""
        return not self._stopped and self._process.poll() is None

    def stop(self) -> None:
        """End it from another thread than the one that talks to it, which is told so by EOFError
        and has yet to `kill` it."""
        self._stopped = True
        if self._process.poll() is None:
            self._signal_group()

    def started(self) -> list[int]:
        """The processes that it has started and that are not over, by number."""
        mark = f"{MARK}={self._mark}".encode()
        return [pid for pid in _processes_with(mark) if pid != self._process.pid]

    def kill(self) -> None:
        """End it and the processes it started; it is gone on return. Again is harmless."""
        if not self._killed:
            self._killed = True
            self._signal_group()
            self._process.wait()
            self._kill_strays()
        for pipe in (self._stdin, self._stdout, self._lifeline):
            pipe.close()

    def _signal_group(self) -> None:
        # It leads its group, whose number nobody else gets while one of its processes is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Ends what has left the group, such as a daemon. What hides its environment stays."""
        mark = f"{MARK}={self._mark}".encode()
        for _ in range(MOST_SWEEPS):  # one that is being killed may still start another
            strays = list(_processes_with(mark))
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _converse(self, data: bytes, deadline_s: float) -> dict[str, Any]:
        """Send `data`, return the next reply."""
        deadline = time.monotonic() + deadline_s
        try:
            self._send(data, deadline)
            return self._receive(deadline)
        except BaseException:
            # Whatever interrupted us: a late reply must not become the next response's.
            self.kill()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BrokenPipeError:
                raise EOFError(self._cause_of_death()) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            self._wait(self._stdout, select.POLLIN, deadline)
            chunk = os.read(self._stdout.fileno(), 65536)
            if not chunk:
                raise EOFError(self._cause_of_death())
            self._unread += chunk
            if len(self._unread) > MOST_BYTES:
                self.kill()
                raise EOFError(f"after more than {MOST_BYTES >> 20} MiB without an end of line")
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _cause_of_death(self) -> str:
        # Its pipes close a moment before its status is there; killed now, it would say SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self.kill()
        status = self._process.returncode
        return f"exit status {status}" if status >= 0 else f"signal {signal.strsignal(-status)}"

    def _wait(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Waits until `pipe` is ready or closed at the other end; TimeoutError at the deadline. A
        wait that ends by itself is progress: whoever is in one does not hang."""
        poller = select.poll()  # select.select() refuses file descriptors above 1023
        poller.register(pipe, event)
        while not poller.poll(min(WAIT_S, max(0.0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError
            advance()


def _processes_with(mark: bytes) -> Iterator[int]:
    """Processes that are not over and whose environment has a variable."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # It may end meanwhile, or be somebody else's. That of one that is over is empty.
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)
