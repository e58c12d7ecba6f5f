"""Run a policy's code in an isolated Python interpreter.

bubblewrap (`bwrap`) puts the code into namespaces that contain only a read-only interpreter, its
standard library and an empty scratch directory. The code has no network and no packages, and none
of the trainer's environment variables. The elements of a set have the same order in every run. The
code sees no other process, and can start neither processes nor threads. The limits are one second
of CPU time (unless the caller sets another limit), 256 MiB of memory, 1 MiB per file and 16 MiB of
scratch space. If the trainer is root, the code runs as the user nobody. bubblewrap does not need
root, but ordinary users must be allowed to create user namespaces.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CPU_S = 1  # default limit on CPU time
LOOK_S = 3.0  # interval of checks; code that is asleep at a check is killed
MEMORY_BYTES = 256 << 20
FILE_BYTES = 1 << 20
SCRATCH_BYTES = 16 << 20
MOST_CHARACTERS = 2000  # maximum length of the output
NOBODY = 65534
INSTALL = "install bubblewrap 0.8 or later and let ordinary users create user namespaces"

OTHER_INTERPRETERS = ("/usr/local/bin/python3", "/usr/bin/python3")
ISOLATED = ("-I", "-S", "-u")  # no user directories, no packages, no buffering
# Only the scratch directory is writable, and the code cannot create namespaces.
WALLS = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--die-with-parent"),
    *("--size", str(SCRATCH_BYTES), "--tmpfs", "/scratch", "--chdir", "/scratch"),
)
READY = b"ready"

# This program runs inside the sandbox, before the code. First it leaves the session keyring, which
# is shared between namespaces. Then it sets the limits, reports that it is ready, and replaces
# itself with the interpreter that runs the code. The output of the code goes to another file, so
# the code cannot forge a failed start. If the kernel has no keyrings (ENOSYS) or a container
# forbids them (EPERM), there is no keyring to leave.
START = f"""
import ctypes, errno, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
keyctl, join_session_keyring = {{"x86_64": 250, "aarch64": 219}}[os.uname().machine], 1
if libc.syscall(keyctl, join_session_keyring, None) < 0:
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        raise OSError(ctypes.get_errno(), "no keyring")
for limit, most in (
    (resource.RLIMIT_CPU, int(sys.argv[2])),
    (resource.RLIMIT_AS, {MEMORY_BYTES}),
    (resource.RLIMIT_FSIZE, {FILE_BYTES}),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(limit, (most, most))
output = int(sys.argv[1])
os.write(1, {READY!r})
os.dup2(output, 1)
os.dup2(output, 2)
os.close(output)
# With -I, Python would ignore the hash seed.
python = [sys.executable, "-s", "-S", "-u", "-"]
os.execve(sys.executable, python, {{"PYTHONHASHSEED": "0"}})
"""


class SandboxError(RuntimeError):
    """This machine cannot run code as configured. The message states the reason in one line."""


def run_python(code: str) -> str:
    """Run code in the sandbox and return its output, including error messages.

    The middle of a long output is cut out.

    Raises:
        SandboxError: If this machine cannot run the sandbox.
    """
    with tempfile.TemporaryFile() as output:
        late = _run_contained(code, output)
        return _said(output, late)


def run_silently(code: str, *, cpu_s: int, inherit: Sequence[int]) -> None:
    """Run code in the sandbox and discard its output.

    Args:
        code: The code.
        cpu_s: Limit on CPU time, in seconds.
        inherit: File descriptors that the code gets, under the same numbers.

    Raises:
        SandboxError: If this machine cannot run the sandbox.
    """
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        _run_contained(code, nowhere, cpu_s=cpu_s, inherit=inherit)


def run_uncontained(code: str) -> str:
    """Run code without the sandbox and return its output.

    The limits are the same, but the code has all the rights of this process.

    Raises:
        SandboxError: If this machine cannot run the code.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as directory,
        tempfile.TemporaryFile() as output,
    ):
        late = _run(code, [_base_interpreter()], output, directory=directory, user=None)
        return _said(output, late)


@functools.cache
def check_containment() -> None:
    """Check that this machine can run the sandbox.

    Raises:
        SandboxError: If the sandbox cannot run.
    """
    printed = run_python("print(6 * 7)")
    if printed != "42":
        raise SandboxError(f"code that should print 42 in the sandbox printed {printed!r}")


def _run_contained(
    code: str, output: IO[bytes], *, cpu_s: int = CPU_S, inherit: Sequence[int] = ()
) -> bool:
    user = NOBODY if os.geteuid() == 0 else None
    python = _contained_python()
    return _run(code, python, output, directory="/", user=user, cpu_s=cpu_s, inherit=inherit)


def _run(
    code: str,
    python: Sequence[str],
    output: IO[bytes],
    *,
    directory: str,
    user: int | None,
    cpu_s: int = CPU_S,
    inherit: Sequence[int] = (),
) -> bool:
    """Run code, and return True if it took too long.

    Args:
        code: The code.
        python: Command that starts Python.
        output: File for the output. The limit on file size stops endless output.
        directory: Working directory.
        user: User to run as, or None for the current user.
        cpu_s: Limit on CPU time, in seconds.
        inherit: File descriptors that the code gets, besides its output.
    """
    with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as start:
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        try:
            process = subprocess.Popen(
                [*python, *ISOLATED, "-c", START, str(output.fileno()), str(cpu_s)],
                stdin=program,
                stdout=start,
                stderr=subprocess.STDOUT,
                pass_fds=[output.fileno(), *inherit],
                cwd=directory,
                env={},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{python[0]} cannot be run: {error}") from None
        try:
            late = _took_too_long(process)
        finally:
            process.kill()
            process.wait()
        start.seek(0)
        said = start.read()
        if not said.endswith(READY):
            raise SandboxError(_last_line(said))
        return late


def _said(output: IO[bytes], late: bool) -> str:
    """Return the output of code that has ended. The middle of a long output is cut out."""
    output.seek(0)
    printed = output.read(FILE_BYTES).decode("utf-8", "replace")
    return _cut(printed + "(took too long)" if late else printed)


def _took_too_long(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the code ends or sleeps. Return True if the kernel killed it, or if it sleeps.

    The kernel limits only CPU time, so code that waits for a core on a busy machine is not killed.
    """
    while True:
        try:
            return process.wait(LOOK_S) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        except subprocess.TimeoutExpired:
            if _sleeps(process.pid):
                return True


def _sleeps(pid: int) -> bool:
    """Return True if a process and all its descendants sleep or are stopped."""
    process = Path("/proc", str(pid))
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        children = (process / "task" / str(pid) / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False  # the process has just ended
    return state in "ST" and all(_sleeps(int(child)) for child in children)


@functools.cache
def _contained_python() -> tuple[str, ...]:
    """Return the command that starts Python inside the sandbox."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed")
    python = _interpreter()
    library = Path(_output_of([python, *ISOLATED, "-c", "import os; print(os.__file__)"])).parent
    modules = ":".join(map(str, library.glob("lib-dynload/*.so")))
    # With these variables, the loader only lists the libraries that the interpreter and its modules
    # need. It runs nothing (ld.so(8)).
    needed = _output_of([python], LD_TRACE_LOADED_OBJECTS="1", LD_PRELOAD=modules)
    libraries = {os.path.normpath(path) for path in re.findall(r"(/\S+) \(0x", needed)}
    outside = sorted(path for path in libraries if not path.startswith(f"{library}/"))
    walls = [bwrap, *WALLS, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in (python, str(library), *outside):
        walls += ["--ro-bind", path, path]
    for packages in map(str, library.glob("*-packages")):
        walls += ["--tmpfs", packages, "--remount-ro", packages]
    return (*walls, "--remount-ro", "/", python)


def _interpreter() -> str:
    """Return a Python interpreter that does not belong to a virtual environment.

    If this process is root, return one that the user `nobody` can execute.
    """
    base = _base_interpreter()
    if os.geteuid() != 0:
        return base
    for path in (Path(base), *map(Path.resolve, map(Path, OTHER_INTERPRETERS))):
        if path.is_file() and all(part.stat().st_mode & 0o001 for part in (path, *path.parents)):
            return str(path)
    raise SandboxError(
        f"{base} is in a directory that only root may enter; install a Python for all users, such "
        "as /usr/bin/python3"
    )


def _base_interpreter() -> str:
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


def _output_of(command: Sequence[str], **environment: str) -> str:
    try:
        run = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{command[0]} cannot be run: {error}") from None
    return run.stdout.strip()


def _last_line(said: bytes) -> str:
    lines = said.decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no Python started")


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[…]\n{text[-half:]}"
