"""Code that a policy wrote, run by a Python of its own that can do little.

It has no network, no standard input, no environment variables and no packages, an empty directory
that is removed afterwards, a second of CPU time, 256 MiB of memory and files of at most 1 MiB; it
can start neither processes nor threads. As root it also becomes a user of its own. It is not kept
from reading files that anybody may read, nor from what a hole in the kernel would let it do: for
code of strangers use a container or a virtual machine.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_S = 1
WALL_S = 3.0
MEMORY_BYTES = 256 << 20
FILE_BYTES = 1 << 20
MOST_CHARACTERS = 2000  # length of what it printed
FIRST_USER = 70_000  # above the users that systems have

OTHER_INTERPRETERS = ("/usr/local/bin/python3", "/usr/bin/python3")

_NEW_USER, _NEW_NETWORK = 0x1000_0000, 0x4000_0000  # flags of unshare(2)
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38  # options of prctl(2)


class SandboxError(RuntimeError):
    """This machine does not let the code be shut in; the message says why."""


def run_python(code: str) -> str:
    """What the code printed, errors included, cut in the middle; or that it took too long.

    Raises:
        SandboxError: it cannot be cut off from the network here.
    """
    directory = tempfile.mkdtemp(prefix="sandbox-")
    user = FIRST_USER + os.getpid() % 100_000 if os.geteuid() == 0 else None
    try:
        if user is not None:
            os.chown(directory, user, user)
        return _run(code, directory, user)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(code: str, directory: str, user: int | None) -> str:
    interpreter = _interpreter(user)
    libc = ctypes.CDLL(None, use_errno=True)

    def shut_in() -> None:
        """Runs in the new process, before the interpreter."""
        namespaces = _NEW_NETWORK if user is not None else _NEW_USER | _NEW_NETWORK
        if libc.unshare(namespaces) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        for limit, most in (
            (resource.RLIMIT_CPU, CPU_S),
            (resource.RLIMIT_AS, MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, 0),
        ):
            resource.setrlimit(limit, (most, most))

    # A file, not a pipe: what prints without end meets the limit of a file.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [interpreter, "-I", "-S", "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={},
                start_new_session=True,
                preexec_fn=shut_in,
            )
        except subprocess.SubprocessError:
            raise SandboxError(
                "code cannot be cut off from the network here: it takes root, or user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1)"
            ) from None
        except OSError as error:
            raise SandboxError(f"{interpreter} cannot be run: {error.strerror}") from None
        try:
            process.wait(WALL_S)
            late = process.returncode == -signal.SIGXCPU or process.returncode == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            late = True
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        printed = output.read(FILE_BYTES).decode("utf-8", "replace")
    return _cut(printed + "(took too long)" if late else printed)


def _interpreter(user: int | None) -> str:
    """A Python without the packages of a virtual environment, which that user can run."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    if user is None:
        return base
    for candidate in (base, *OTHER_INTERPRETERS):
        path = Path(candidate).resolve()
        if path.is_file() and all(part.stat().st_mode & 0o001 for part in (path, *path.parents)):
            return candidate
    raise SandboxError(
        f"code cannot be run by a user of its own here: {base} is in a directory that only root "
        "may enter; install a Python for all users, such as /usr/bin/python3"
    )


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[…]\n{text[-half:]}"
