"""A process that runs user code and exchanges JSON lines, with a deadline for each reply.

The process can be killed at any time, together with everything that it has started.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from grpo_trainable.plugins import PluginError
from grpo_trainable.telemetry.progress import advance

WAIT_S = 0.5  # a wait is split into parts of at most this length; each part counts as progress
# A user's module may import torch on a busy machine. A large reward model takes minutes to load.
START_DEADLINE_S = 600.0
# This environment variable marks every process that a worker has started, even one that has left
# the process group.
MARK = "GRPO_TRAINABLE_WORKER"
MOST_SWEEPS = 100
MOST_BYTES = 64 << 20  # maximum length of a reply


class WorkerProcess:
    """One process, and the exchange of messages with it."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m MODULE FIRST LIFELINE_FD REST…` in `directory`.

        Args:
            name: The setting that the error names if the process cannot start, such as
                `task.reward=my.py:score`.
            module: The module to run.
            arguments: FIRST and REST.
            directory: The working directory; None: the current one.
            environment: Environment variables to add to those of this process.
        """
        self._name = name
        first, *rest = arguments
        self._mark = uuid.uuid4().hex
        program = [sys.executable, "-m", module, first]
        # The worker ends when this process's end of the pipe closes, which happens even if this
        # process is killed.
        lifeline, our_end = os.pipe()
        self._lifeline = os.fdopen(our_end, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [*program, str(lifeline), *rest],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=directory,
                # A Ray worker has the driver's sys.path, but its children do not inherit it.
                env={
                    **os.environ,
                    **(environment or {}),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    MARK: self._mark,
                },
                pass_fds=[lifeline],
                # Because of the separate process group, `kill` also reaches the user's
                # subprocesses. Ctrl-C does not reach the group: only this process handles Ctrl-C.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = b""
        self._killed = False
        self.stopped = False  # True after `stop`

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the process is ready for requests, and return its first message.

        Raises:
            PluginError: The user's code cannot be used. The message is one line.
            ValueError: The process cannot start. The message names the setting and the reason.
        """
        try:
            reply = self._converse(b"", START_DEADLINE_S)
        except TimeoutError:
            reason = f"not imported within {START_DEADLINE_S:g} s"
        except EOFError as death:
            reason = f"importing it ended the process ({death})"
        else:
            if "error" not in reply:
                return reply
            self.kill()
            raise PluginError(reply["error"])
        raise ValueError(f"{self._name}: {reason}")

    def ask(self, message: Any, deadline_s: float) -> Any:
        """Send a message that JSON can store, and return the reply.

        Raises:
            TimeoutError: The reply did not come in time.
            EOFError: The process died; the message says how.
        """
        return self._converse(json.dumps(message).encode() + b"\n", deadline_s)

    def is_alive(self) -> bool:
        """Return True if the process accepts requests.

        After `stop`, the process accepts no requests, even if it has not ended yet.
        """
        return not self.stopped and self._process.poll() is None

    def stop(self) -> None:
        """Kill the process from a thread other than the one that talks to it.

        The thread that talks to the process gets EOFError and must still call `kill`.
        """
        self.stopped = True
        if self._process.poll() is None:
            self._signal_group()

    def started(self) -> list[int]:
        """Return the ids of running processes that the worker process has started."""
        mark = f"{MARK}={self._mark}".encode()
        return [pid for pid in _processes_with(mark) if pid != self._process.pid]

    def kill(self) -> None:
        """Kill the process and everything that it has started, and wait until it has ended.

        Repeated calls are harmless.
        """
        if not self._killed:
            self._killed = True
            self._signal_group()
            self._process.wait()
            self._kill_strays()
        for pipe in (self._stdin, self._stdout, self._lifeline):
            pipe.close()

    def _signal_group(self) -> None:
        # The process leads its group, so its id is also the id of the group. The id is not reused
        # while any process of the group exists.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Kill processes that have left the group, such as daemons.

        A process that hides its environment is not found.
        """
        mark = f"{MARK}={self._mark}".encode()
        for _ in range(MOST_SWEEPS):  # a stray process may start another one before it is killed
            strays = list(_processes_with(mark))
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _converse(self, data: bytes, deadline_s: float) -> Any:
        """Send `data` and return the next reply."""
        deadline = time.monotonic() + deadline_s
        try:
            self._send(data, deadline)
            return self._receive(deadline)
        except BaseException:
            # After any interruption, a late reply must not be taken for the reply to the next
            # message.
            self.kill()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BrokenPipeError:
                raise EOFError(self._cause_of_death()) from None

    def _receive(self, deadline: float) -> Any:
        while b"\n" not in self._unread:
            self._wait(self._stdout, select.POLLIN, deadline)
            chunk = os.read(self._stdout.fileno(), 65536)
            if not chunk:
                raise EOFError(self._cause_of_death())
            self._unread += chunk
            if len(self._unread) > MOST_BYTES:
                self.kill()
                raise EOFError(f"sent more than {MOST_BYTES >> 20} MiB without an end of line")
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _cause_of_death(self) -> str:
        # The pipes close a moment before the exit status is known. Killing the process now would
        # change the status to SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self.kill()
        status = self._process.returncode
        return f"exit status {status}" if status >= 0 else f"signal {signal.strsignal(-status)}"

    def _wait(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Wait until `pipe` is ready, or until its other end is closed.

        A wait that ends at a deadline is not a hang, so each part of the wait counts as progress.

        Raises:
            TimeoutError: The deadline has passed.
        """
        poller = select.poll()  # select.select() rejects file descriptors above 1023
        poller.register(pipe, event)
        while not poller.poll(min(WAIT_S, max(0.0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError
            advance()


def _processes_with(mark: bytes) -> Iterator[int]:
    """Yield the ids of running processes whose environment contains the entry `mark`."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # The process may have ended, or may belong to another user. An ended process has an empty
        # environment.
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)
