"""Prompts as conversations."""

from __future__ import annotations

import pytest

from grpo_trainable.tasks.messages import as_messages, as_text, mistake_in_prompt

USER = {"role": "user", "content": "What is 7 + 5?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "12"}


def test_a_text_is_one_message_of_the_users_without_the_newline_at_its_end():
    assert as_messages("a\nb\n") == [{"role": "user", "content": "a\nb"}]


def test_the_system_message_comes_first_unless_the_prompt_has_its_own():
    assert as_messages("a", "Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
    ]
    assert as_messages([SYSTEM, USER], "Be kind.") == [SYSTEM, USER]


def test_a_conversation_is_shown_with_a_line_for_each_message():
    assert as_text([SYSTEM, USER]) == "system: Be brief.\nuser: What is 7 + 5?\n"
    assert as_text("a\n") == "a\n"


@pytest.mark.parametrize("prompt", ["a", [USER], (SYSTEM, USER, ASSISTANT, USER)])
def test_a_prompt_that_is_right_has_no_mistake(prompt):
    assert mistake_in_prompt(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "mistake"),
    [
        (" \n", "must be non-empty text or a list of messages"),
        ("\ud800", "must be non-empty text or a list of messages"),
        ([], "must be non-empty text or a list of messages"),
        (3, "must be non-empty text or a list of messages"),
        (["a"], "must have exactly the keys role and content in message 1"),
        ([USER | {"name": "Tom"}], "must have exactly the keys role and content in message 1"),
        ([{"role": "tool", "content": "a"}], "has the role 'tool' in message 1; valid: system, us"),
        ([USER, SYSTEM], "has a system message as message 2; the system message must come first"),
        ([USER | {"content": ["a"]}], "has no text in the content of message 1"),
        ([USER, ASSISTANT], "must end with a message whose role is user"),
    ],
)
def test_a_mistake_is_named(prompt, mistake):
    assert (mistake_in_prompt(prompt) or "").startswith(mistake)
