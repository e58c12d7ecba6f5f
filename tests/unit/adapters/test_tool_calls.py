"""Parsing of tool calls that a policy writes as text."""

from __future__ import annotations

import pytest

from grpo_trainable.adapters.tool_calls import (
    ToolCall,
    answered,
    parse_call,
    public_methods,
    tool_lines,
)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None: ...

    def add(self, step: int = 1, name: str = "a") -> int:
        """Add to the counter.

        Args:
             step: how much to add.
             name: not used.
        """
        self.count += step
        return self.count

    async def later(self) -> str:
        return "now"

    def _hidden(self) -> None: ...

    attribute = 3


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("add(step=2)\n", ToolCall("add", (), {"step": 2})),
        ("add(-2, name='é')", ToolCall("add", (-2,), {"name": "é"})),
        ("add([1, {'a': None}])", ToolCall("add", ([1, {"a": None}],), {})),
        ('{"name": "add", "arguments": {"step": 2}}', ToolCall("add", (), {"step": 2})),
        ('{"name": "add"}', ToolCall("add", (), {})),
        (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
            ToolCall("add", (), {}),
        ),
        (
            "I think <tool_call>add()</tool_call><tool_call>no()</tool_call>",
            ToolCall("add", (), {}),
        ),
    ],
)
def test_a_call_is_read(text, call):
    assert parse_call(text) == call


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "the answer is add(1)",
        "add(1) and more",
        "add(step=other)",
        "add(__import__('os').system('true'))",
        "counter.add(1)",
        "add(*[1])",
        "add(**{'step': 1})",
        "add(step=1, step=2)",
        '{"name": "add", "arguments": [1]}',
        '{"name": 3}',
        '{"name": "add"',
        '["add"]',
        "add(\0)",
        "add(" + "(" * 5000,
        "add(" + "1," * 20_000 + ")",
        "<tool_call></tool_call>",
    ],
)
def test_what_is_no_call_is_none_and_runs_nothing(text):
    assert parse_call(text) is None


def test_tools_are_the_public_methods():
    tools = public_methods(Counter(), without=("reset",))
    assert list(tools) == ["add", "later"]
    assert tool_lines(tools.values()) == (
        "add(step: int = 1, name: str = 'a') -> int: Add to the counter.\nlater() -> str: \n"
    )


def test_a_tool_answers_or_says_what_went_wrong():
    tools = public_methods(Counter())
    assert answered(tools, ToolCall("add", (2,), {})) == ("2", False)
    assert answered(tools, ToolCall("add", (), {"step": 3})) == ("5", False)
    assert answered(tools, ToolCall("later", (), {})) == ("now", False)
    assert answered(tools, ToolCall("take", (), {})) == ("{'error': 'Tool take not found.'}", True)
    said, failed = answered(tools, ToolCall("add", (), {"much": 1}))
    assert failed
    assert said.startswith("{'error': ")
    assert "unexpected keyword argument" in said
