"""Code that a policy wrote, in real processes. The code runs inside bubblewrap or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from grpo_trainable.config import EnvSettings, GRPOConfig
from grpo_trainable.environments import sandbox
from grpo_trainable.environments.python_tool import PythonTool
from grpo_trainable.environments.sandbox import (
    NOBODY,
    SandboxError,
    check_containment,
    run_python,
    run_uncontained,
)
from grpo_trainable.generator import env_processes
from grpo_trainable.generator.env_processes import check_environment
from launch import check_env, tune
from tuning.checks import check_scoring, checks_of


@pytest.fixture
def contained() -> None:
    try:
        check_containment()
    except SandboxError as error:
        pytest.skip(f"code cannot be contained here: {error}")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the only directory on the PATH. It is empty, and all users can read it."""
    for cached in (
        check_containment,
        sandbox._contained_python,
        env_processes._warn_of_unsafe_code,
    ):
        cached.cache_clear()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        monkeypatch.setenv("PATH", directory)
        yield Path(directory)
    for cached in (check_containment, sandbox._contained_python):
        cached.cache_clear()


# ---- Abilities of contained code --------------------------------------------------------------


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", "42"),
        ("import math, decimal, hashlib, json, datetime, zlib; print('é')", "é"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (
            "import os; print(os.listdir('.'), {*os.environ} - {'LC_CTYPE'})",
            "[] {'PYTHONHASHSEED'}",
        ),
        ("open('a', 'w').write('kept'); print(open('a').read())", "kept"),
        ("input()", "EOFError"),
        ("print(1)\0", "null bytes" if sys.version_info >= (3, 12) else "1"),
        ("import torch", "No module named 'torch'"),
        ("import socket; socket.create_connection(('192.0.2.1', 1))", "Network is unreachable"),
        ("import os; os.fork()", "Resource temporarily unavailable"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('a', 'wb').write(bytes(1 << 22))", "File too large"),
        ("for i in range(17): open(str(i), 'wb').write(bytes(1 << 20))", "No space left on device"),
        ("while True: pass", "(took too long)"),
        ("import time; time.sleep(60)", "(took too long)"),
    ],
)
def test_what_code_can_do(code: str, expected: str) -> None:
    assert expected in run_python(code)


@pytest.mark.usefixtures("contained")
def test_endless_output_is_cut() -> None:
    printed = run_python("while True: print('x' * 1000)")
    assert 1000 < len(printed) < 2100
    assert "[…]" in printed


@pytest.mark.usefixtures("contained")
def test_code_sees_an_interpreter_and_an_empty_scratch_alone() -> None:
    others = run_python(
        "import os, sys\n"
        "library = os.path.dirname(os.__file__)\n"
        "for place, _, files in os.walk('/'):\n"
        "    if not place.startswith(library) or place.endswith('-packages'):\n"
        "        paths = {os.path.join(place, name) for name in files if '.so' not in name}\n"
        "        print(*paths - {sys.executable}, sep='\\n', end='')\n"
        "print('no more')\n"
    )
    assert others == "no more"


@pytest.mark.usefixtures("contained")
def test_code_that_is_ended_leaves_no_process() -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_python, "import time; time.sleep(1000)")
        started = wait_for(contained_processes, 60.0)
        assert "(took too long)" in running.result()
    wait_for(lambda: all(map(is_over, started)), 60.0)


def contained_processes() -> list[psutil.Process]:
    """Return the bubblewrap processes that descend from this process, without Ray's processes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "bwrap":
                found += [process, *process.children(recursive=True)]
    return found


def is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.usefixtures("contained")
def test_a_slow_machine_does_not_end_code_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LOOK_S", 0.3)
    code = "import time\nwhile time.process_time() < 0.8: pass\nprint('done')"
    assert run_python(code) == "done"


# A trainer with files, sockets, memory and a key. The code that the trainer runs attacks all of
# them.
TRAINER = """
import ctypes, os, socket, sys
from sandbox import run_python

home, (keyctl, add_key) = sys.argv[1], {"x86_64": (250, 248), "aarch64": (219, 217)}[os.uname()[4]]
libc = ctypes.CDLL(None)
key = libc.syscall(add_key, b"user", b"trainer", b"a secret", 8, -3)
memory = libc.shmget(0x7e57, 4096, 0o1600)
tcp, path, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(1), socket.socket(1)
path.bind(home + "/socket")
path.listen()
abstract.bind("\\0" + home)
abstract.listen()
code = f'''
import ctypes, os, socket

def attempt(name, act, *arguments):
    try:
        act(*arguments)
    except OSError as error:
        print(name, "failed")
    else:
        print(name, "SUCCEEDED")

def must(call, *arguments):
    if call(*arguments) < 0:
        raise OSError

libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(99)
home, pid = {home!r}, {os.getpid()}
attempt("list", os.listdir, home)
attempt("read", open, home + "/secret.txt")
attempt("overwrite", open, home + "/secret.txt", "w")
attempt("append", open, home + "/secret.txt", "a")
attempt("create", open, home + "/new.txt", "x")
attempt("delete", os.remove, home + "/checkpoint.bin")
attempt("rename", os.rename, home + "/checkpoint.bin", home + "/other.bin")
attempt("environ", open, f"/proc/{{pid}}/environ")
attempt("signal", os.kill, pid, 0)
attempt("signal parent", os.kill, os.getppid() if os.getppid() != 1 else pid, 0)
attempt("priority", os.setpriority, os.PRIO_PROCESS, pid, 19)
attempt("tcp", socket.create_connection, ("127.0.0.1", {tcp.getsockname()[1]}))
attempt("socket", socket.socket(socket.AF_UNIX).connect, home + "/socket")
attempt("abstract socket", socket.socket(socket.AF_UNIX).connect, chr(0) + home)
attempt("shared memory", must, libc.shmget, 0x7e57, 4096, 0o600)
attempt("read key", must, libc.syscall, {keyctl}, 11, {key}, buffer, 99)
attempt("revoke key", must, libc.syscall, {keyctl}, 3, {key})
attempt("user namespace", must, libc.unshare, 0x10000000)
'''
try:
    print(run_python(code))
finally:
    libc.shmctl(memory, 0, None)
"""


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("user", [None, NOBODY], ids=["as_is", "as_nobody"])
def test_code_reaches_nothing_of_the_trainers(user: int | None) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user; the other case is an ordinary user's")
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(sandbox.__file__, directory)
        home = Path(directory, "home")
        home.mkdir()
        (home / "secret.txt").write_text("a secret")
        (home / "checkpoint.bin").write_text("weights")
        for path in (directory, home, *home.iterdir()):
            os.chmod(path, 0o777)  # only the sandbox protects these files
        python = sys.executable if user is None else sandbox._interpreter()
        printed = subprocess.run(
            [python, "-c", TRAINER, str(home)],
            cwd=directory,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed.count(" failed\n") == TRAINER.count("\nattempt("), printed
        assert "SUCCEEDED" not in printed
        assert sorted(path.name for path in home.iterdir()) == [
            *("checkpoint.bin", "secret.txt", "socket"),
        ]
        assert (home / "secret.txt").read_text() == "a secret"


@pytest.mark.usefixtures("contained")
def test_as_root_code_runs_as_nobody() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root")
    assert run_python("import os; print(os.getuid(), os.getgid(), os.getgroups())") == (
        f"{NOBODY} {NOBODY} []"
    )


@pytest.mark.usefixtures("contained")
def test_a_question_with_an_interpreter_at_hand() -> None:
    environment = PythonTool()
    assert environment.reset({"question": "17 * 23?\n", "answer": "391"}) == "17 * 23?\n"
    turn = environment.step("I compute. <python>print(17 * 23)</python>")
    assert (turn.text, turn.reward, turn.done) == ("<output>391</output>\n", 0.0, False)
    turn = environment.step("<answer> 391 </answer>")
    assert (turn.reward, turn.done) == (1.0, True)
    environment.reset({"question": "17 * 23?\n", "answer": "391"})
    assert environment.step("392\n").reward == 0.0


# ---- Machines that cannot sandbox code --------------------------------------------------------

SUM = '{"question": "1 + 1?", "answer": "2"}'
ASKED = ["python", "--spec", SUM, "--action", "<python>print(1 + 1)</python>"]


def test_without_bubblewrap_no_code_runs(programs: Path) -> None:
    with pytest.raises(SandboxError, match=r"^bubblewrap is not installed$"):
        run_python("print(1)")
    with pytest.raises(ValueError, match=r"env\.name=python: cannot sandbox") as refusal:
        check_environment(EnvSettings(name="python"), {}, "")
    assert "install bubblewrap" in str(refusal.value)
    assert "env.allow_unsafe=true" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_where_bubblewrap_is_refused_no_code_runs(programs: Path) -> None:
    said = "bwrap: No permissions to create new namespace"
    (programs / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    with pytest.raises(SandboxError, match=f"^{said}$"):
        run_python("print(1)")
    with pytest.raises(ValueError, match=said):
        check_environment(EnvSettings(name="python"), {}, "")


def test_trials_of_other_environments_are_checked_one_by_one() -> None:
    trials = [
        GRPOConfig.from_dict({"env": {"name": "python", "allow_unsafe": unsafe}})
        for unsafe in (True, False)
    ]
    checked = [trial for check, trial in checks_of(trials, here=False) if check is check_scoring]
    assert checked == trials


def test_commands_refuse_it_in_one_line(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_env.main(ASKED) == 2
    error = capsys.readouterr().err
    assert "bubblewrap is not installed" in error
    assert error.count("\n") == 1
    task = tmp_path / "sums.py"
    task.write_text(
        "from grpo_trainable.tasks import Example\n"
        "EXAMPLE = Example('1 + 1?', {'question': '1 + 1?', 'answer': '2'})\n"
        "class Sums:\n"
        "    stop = ('</python>', '</answer>')\n"
        "    def __init__(self, seed): pass\n"
        "    def train_example(self, prompt_index): return EXAMPLE\n"
        "    def eval_examples(self, count): return [EXAMPLE] * count\n"
    )
    settings = [f"task.name={task}:Sums", "env.name=python", "arm=sync"]
    given = [part for setting in settings for part in ("--set", setting)]
    command = ["--space", "async_vs_sync", "--storage", str(tmp_path), "--dry-run", *given]
    assert tune.main(command) == 2
    error = capsys.readouterr().err
    assert "env.name=python: cannot sandbox the code that the policy writes" in error
    assert error.count("\n") == 1
    assert tune.main([*command, "--set", "env.allow_unsafe=true"]) == 0


@pytest.mark.usefixtures("programs")
def test_code_runs_uncontained_where_the_user_says_so_and_is_warned(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert check_env.main([*ASKED, "--set", "env.allow_unsafe=true"]) == 0
    assert "<output>2</output>" in capsys.readouterr().out
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("env.allow_unsafe=true: code that the policy writes can read")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "import os; print(os.listdir('.'), {*os.environ} - {'LC_CTYPE'})",
            "[] {'PYTHONHASHSEED'}",
        ),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("while True: pass", "(took too long)"),
        ("import time; time.sleep(60)", "(took too long)"),
    ],
)
def test_limits_hold_for_uncontained_code(code: str, expected: str) -> None:
    assert expected in run_uncontained(code)
