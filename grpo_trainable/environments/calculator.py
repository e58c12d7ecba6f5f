"""The environment `calculator`: a question, and a calculator that the policy may call.

The action `calc EXPRESSION` returns the value of the expression. Any other action is the answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from grpo_trainable.environments.environment import JSONValue, Turn, fields_of

CALL = "calc "
MOST_CHARACTERS = 40  # maximum length of an expression
MOST_CALLS = 2

_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> int:
    """Evaluate an expression made of integers, brackets and the operators + - * // %.

    Raises:
        ValueError: If the expression contains anything else, is too long, or divides by 0.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError("too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError("not arithmetic") from None


def _value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(operand))
    raise ValueError("not arithmetic")


class Calculator:
    """Environment with a calculator.

    An episode's specification is {"question": EXPRESSION, "answer": VALUE}.
    """

    def reset(self, spec: JSONValue) -> str:
        """Begin an episode and return the question."""
        question, answer = fields_of(spec, "question", "answer")
        self._answer, self._calls = str(answer), 0
        return f"{question}=?\n"

    def step(self, action: str) -> Turn:
        """Give reward 1 for the right answer. An answer, or too many calls, ends the episode."""
        line = action.strip()
        if not line.startswith(CALL):
            return Turn(reward=float(line == self._answer), done=True, info={"calls": 0})
        self._calls += 1
        if self._calls > MOST_CALLS:
            return Turn(done=True, info={"calls": 1})
        return Turn(f"={self._said(line.removeprefix(CALL))}\n", info={"calls": 1})

    def _said(self, expression: str) -> str:
        try:
            return str(calculate(expression))
        except ValueError as error:
            return str(error)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
