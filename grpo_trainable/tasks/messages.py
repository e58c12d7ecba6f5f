"""Prompts as conversations, which a chat template renders as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

Message: TypeAlias = Mapping[str, str]  # `role` and `content`
Prompt: TypeAlias = str | Sequence[Message]

ROLES = ("system", "user", "assistant")
TOOL = "tool"  # the role of messages that contain results of tools
NO_PROMPT = "must be non-empty text or a list of messages"


def mistake_in_prompt(prompt: Any, *, tools: bool = False) -> str | None:
    """Return the mistake in a prompt, or None if the prompt is valid text or a valid conversation.

    The result completes a sentence that begins with "the prompt".

    Args:
        prompt: The prompt.
        tools: Accept messages from tools. The prompt may then end with a tool's message.
    """
    if isinstance(prompt, str):
        return None if is_text(prompt) else NO_PROMPT
    if not isinstance(prompt, list | tuple) or not prompt:
        return NO_PROMPT
    mistake = mistake_in_messages(prompt, tools=tools)
    if mistake is not None:
        return mistake
    last = ("user", TOOL) if tools else ("user",)
    ends = prompt[-1]["role"] in last
    return None if ends else f"must end with a message whose role is {' or '.join(last)}"


def mistake_in_messages(messages: Sequence[Any], *, tools: bool = False) -> str | None:
    """Return the mistake in the messages of a conversation, or None if each message is valid.

    The result completes a sentence that begins with the name of the conversation. Messages from
    tools are valid only with `tools`.
    """
    roles = (*ROLES, TOOL) if tools else ROLES
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            return f"must have exactly the keys role and content in message {number}"
        if message["role"] not in roles:
            return (
                f"has the role {message['role']!r} in message {number}; valid: {', '.join(roles)}"
            )
        if message["role"] == "system" and number > 1:
            return f"has a system message as message {number}; the system message must come first"
        if not is_text(message["content"]):
            return f"has no text in the content of message {number}"
    return None


def is_text(value: object) -> TypeGuard[str]:
    """Return True if `value` is a string that is not blank and can be encoded."""
    # JSON can contain half a surrogate pair, which no later step can encode.
    return (
        isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)
    )


def as_messages(prompt: Prompt, system: str | None = None) -> list[dict[str, str]]:
    """Return a prompt as a conversation.

    A string becomes one message with the role `user`. A newline at its end is dropped.

    Args:
        prompt: A string or a conversation.
        system: Text of a system message to put first, unless the prompt already has one.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt.removesuffix("\n")}]
    else:
        messages = [dict(message) for message in prompt]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def as_text(prompt: Prompt) -> str:
    """Return a prompt as readable text, with a line `role: content` for each message."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt)


def last_text(prompt: Prompt) -> str:
    """Return the prompt itself if it is text, else the text of the conversation's last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def text_of(said: Any) -> str:
    """Return the text of one message or of a list of messages, without roles.

    Each message starts on a new line and loses the line breaks at its end. None becomes empty text.
    """
    if said is None or isinstance(said, str):
        return (said or "").rstrip("\n")
    return "\n".join(text_of(message["content"]) for message in said)
