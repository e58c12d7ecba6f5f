"""Tool calls as text: parse and execute a policy's call, and list the available tools."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 10_000  # maximum length of a call; longer text is not a call
_MARKED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """The name of a tool and the arguments of the call."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def parse_call(text: str) -> ToolCall | None:
    """Parse a tool call from text, or return None. Nothing is executed.

    A call is `name(1, key="text")` with Python literals, or JSON: {"name": …, "arguments": {…}}. If
    the text contains <tool_call>…</tool_call>, the call is the content of the first pair of tags.
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
    """Return an object's public methods, keyed by name. Leave out the names in `without`."""
    names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]
    return {
        name: getattr(thing, name)
        for name in names
        if name not in without and not name.startswith("_")
    }


def answered(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> tuple[str, bool]:
    """Call a tool. Return the tool's result as text, and True if the tool failed.

    If the tool failed, the text is the error in TRL's format.
    """
    try:
        if call.name not in tools:
            raise ValueError(f"Tool {call.name} not found.")
        return str(waited_for(tools[call.name](*call.positional, **call.named))), False
    except Exception as error:
        return str({"error": str(error)}), True


def waited_for(value: Any) -> Any:
    """Run a coroutine and return its result. Return any other value unchanged."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def tool_lines(tools: Iterable[Callable[..., Any]]) -> str:
    """Return one line per tool: its signature and the first line of its docstring."""
    return "".join(f"{_signature(tool)}: {_summary(tool)}\n" for tool in tools)


def _signature(tool: Callable[..., Any]) -> str:
    return f"{tool.__name__}{inspect.signature(tool, eval_str=True)}"


def _summary(tool: Callable[..., Any]) -> str:
    return next(iter((inspect.getdoc(tool) or "").splitlines()), "")
