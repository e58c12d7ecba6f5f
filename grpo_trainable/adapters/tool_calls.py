"""Tool calls as text: one that the policy wrote, and the tools that it may call."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 10_000  # length of a call; a longer text is none
_MARKED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """Which tool, and with what."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def parse_call(text: str) -> ToolCall | None:
    """The tool call that a text is; None where it is none. Nothing is executed.

    Either `name(1, key="text")` with literals of Python, or JSON, {"name": …, "arguments": {…}}.
    Where a text has <tool_call> and </tool_call>, the call is what is between the first two.
    """
    marked = _MARKED.search(text)
    call = (text if marked is None else marked[1]).strip()
    if len(call) > MOST_CHARACTERS:
        return None
    return _from_json(call) if call.startswith("{") else _from_python(call)


def _from_json(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, (), arguments)


def _from_python(text: str) -> ToolCall | None:
    try:
        match ast.parse(text, mode="eval").body:
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=named):
                values = tuple(map(ast.literal_eval, positional))
                pairs = {str(part.arg): ast.literal_eval(part.value) for part in named if part.arg}
                return ToolCall(name, values, pairs) if len(pairs) == len(named) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None


def public_methods(thing: object, without: Container[str] = ()) -> dict[str, Callable[..., Any]]:
    """The methods of an object by their names, but for those `without` and those that begin with
    an underscore."""
    names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]
    return {
        name: getattr(thing, name)
        for name in names
        if name not in without and not name.startswith("_")
    }


def answered(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> tuple[str, bool]:
    """What a tool returned, as text, and whether it failed: then the text is the error, as TRL
    would tell it to the policy."""
    try:
        if call.name not in tools:
            raise ValueError(f"Tool {call.name} not found.")
        return str(waited_for(tools[call.name](*call.positional, **call.named))), False
    except Exception as error:
        return str({"error": str(error)}), True


def waited_for(value: Any) -> Any:
    """The result of a coroutine; any other value as it is."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def tool_lines(tools: Iterable[Callable[..., Any]]) -> str:
    """A line for each tool: its name and arguments, and the first line of its docstring."""
    return "".join(f"{_signature(tool)}: {_summary(tool)}\n" for tool in tools)


def _signature(tool: Callable[..., Any]) -> str:
    return f"{tool.__name__}{inspect.signature(tool, eval_str=True)}"


def _summary(tool: Callable[..., Any]) -> str:
    return next(iter((inspect.getdoc(tool) or "").splitlines()), "")
