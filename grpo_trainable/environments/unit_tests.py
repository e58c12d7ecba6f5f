"""Run a program's unit tests in the sandbox, and count the tests that the program passes."""

from __future__ import annotations

import ast
import inspect
import secrets
import tempfile
from dataclasses import dataclass

from grpo_trainable.environments import harness
from grpo_trainable.environments.sandbox import run_silently

HARNESS = inspect.getsource(harness)


@dataclass(frozen=True, slots=True)
class UnitTestResult:
    """Result of a program's unit tests."""

    compiled: bool  # False: the program is not valid Python
    passed: int  # number of tests that the program passed
    count: int  # number of tests

    @property
    def share(self) -> float:
        """Share of the tests that the program passed."""
        return self.passed / self.count


def count_tests(tests: str) -> int:
    """Return the number of tests in `tests`.

    Each `assert` statement is one test, except statements such as `assert True`.

    Raises:
        ValueError: If `tests` is not valid Python, or contains no test. The message is one line.
    """
    try:
        nodes = ast.walk(ast.parse(tests))
    except SyntaxError as error:
        raise ValueError(f"the tests are not valid Python: {error}") from None
    count = sum(map(harness.is_test, nodes))
    if count == 0:
        raise ValueError("the tests have no assert statement")
    return count


def run_tests(program: str, tests: str, *, cpu_s: int = 3) -> UnitTestResult:
    """Run a program, and then its tests, in the sandbox.

    A test is passed if its `assert` statement ran at least once and never failed. The tests may
    stop early, because they exceed a limit or because an error occurs outside the `assert`
    statements. In this case, the program fails the tests that have not run yet. If the program has
    passed all tests by then, one of the tests counts as failed. The output of the program is
    discarded.

    Args:
        program: Source of the program.
        tests: Source of the tests. They can use all global names of the program.
        cpu_s: Limit on CPU time, in seconds, for the program and its tests together.

    Raises:
        ValueError: If the tests are invalid. The message is one line.
        SandboxError: If this machine cannot run the sandbox.
    """
    count, token = count_tests(tests), secrets.token_hex(16)
    # The program must not be able to read the file, because the file contains the token. The file
    # has no name, so nothing remains if this process is killed.
    with (
        tempfile.TemporaryFile() as results,
        open(f"/proc/self/fd/{results.fileno()}", "wb") as writable,
    ):
        file = writable.fileno()
        call = f"main({program!r}, {tests!r}, {token!r}, {file})"
        run_silently(f"{HARNESS}\n{call}\n", cpu_s=cpu_s, inherit=[file])
        lines = results.read().decode("utf-8", "replace").split("\n")
    mark = f"{token} "
    events = {line.removeprefix(mark) for line in lines if line.startswith(mark)}
    passed = sum(f"passed {n}" in events and f"failed {n}" not in events for n in range(count))
    if "finished" not in events:
        passed = min(passed, count - 1)
    return UnitTestResult(compiled="compiled" in events, passed=passed, count=count)
