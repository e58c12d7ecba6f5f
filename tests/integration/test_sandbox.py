"""Code of a policy's, in a real process that can do little."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_trainable.environments.python_tool import PythonTool
from grpo_trainable.environments.sandbox import FIRST_USER, SandboxError, run_python


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    try:
        run_python("")
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", "42"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; print(sorted(os.listdir('.')), dict(os.environ) == {})", "[]"),
        ("input()", "EOFError"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Network is unreachable"),
        ("import os; os.fork()", "Resource temporarily unavailable"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('a', 'wb').write(bytes(1 << 22))", "File too large"),
        ("while True: pass", "(took too long)"),
        ("import time; time.sleep(60)", "(took too long)"),
    ],
)
def test_what_code_can_do(code: str, expected: str) -> None:
    assert expected in run_python(code)


def test_what_prints_without_end_is_cut() -> None:
    printed = run_python("while True: print('x' * 1000)")
    assert 1000 < len(printed) < 2100
    assert "[…]" in printed


def test_as_root_it_is_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root")
    assert int(run_python("import os; print(os.getuid())")) >= FIRST_USER
    own = Path("/root")
    assert "PermissionError" in run_python(f"import os; os.listdir({str(own)!r})")


def test_a_question_with_an_interpreter_at_hand() -> None:
    environment = PythonTool()
    assert environment.reset({"question": "17 * 23?\n", "answer": "391"}) == "17 * 23?\n"
    turn = environment.step("I compute. <python>print(17 * 23)</python>")
    assert (turn.text, turn.reward, turn.done) == ("<output>391</output>\n", 0.0, False)
    turn = environment.step("<answer> 391 </answer>")
    assert (turn.reward, turn.done) == (1.0, True)
    environment.reset({"question": "17 * 23?\n", "answer": "391"})
    assert environment.step("392\n").reward == 0.0
