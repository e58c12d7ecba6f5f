"""Run a program and its tests, and report each test. The text of this file runs in the sandbox.

A test is an `assert` statement. The other tests still run after a test has failed.
"""

from __future__ import annotations

import ast
import itertools
import os
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


def is_test(node: ast.AST) -> bool:
    """Return True for an `assert` statement, unless it asserts a constant (`assert True`)."""
    return isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)


class Watched(ast.NodeTransformer):
    """Puts each test into a `with` block, which calls a function with the number of the test."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._numbers = itertools.count()

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return the statement that replaces an `assert` statement."""
        if not is_test(node):
            return node
        number = ast.Constant(next(self._numbers))
        call = ast.Call(ast.Name(self._function, ast.Load()), [number], [])
        return ast.With([ast.withitem(call)], [node])


def main(program: str, tests: str, token: str, results: int) -> None:
    """Run a program and its tests, and write a line for each event.

    The events are `compiled`, `passed N` and `failed N` for test N, and `finished`. A test in a
    loop may cause both events, `passed` and `failed`. Each line begins with the token, which the
    program does not know.

    Args:
        program: Source of the program.
        tests: Source of the tests, which use the program's names.
        token: Random text.
        results: File descriptor to write to.
    """
    os.dup2(1, 0)  # hide standard input: it is this script, which contains the token
    reported: set[str] = set()

    def report(event: str) -> None:
        if event not in reported:
            reported.add(event)
            os.write(results, f"{token} {event}\n".encode())

    @contextmanager
    def watch(number: int) -> Iterator[None]:
        try:
            yield
        except BaseException:  # a program may raise anything, even SystemExit
            report(f"failed {number}")
        else:
            report(f"passed {number}")

    random.seed(0)  # so that a program has the same reward in every run
    code = compile(program, "<program>", "exec", dont_inherit=True)
    report("compiled")
    module = types.ModuleType("program")
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    name = f"watch_{token}"
    module.__dict__[name] = watch
    watched = ast.fix_missing_locations(Watched(name).visit(ast.parse(tests)))
    exec(compile(watched, "<tests>", "exec", dont_inherit=True), module.__dict__)
    report("finished")
