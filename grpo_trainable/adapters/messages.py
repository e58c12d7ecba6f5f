"""The text of a conversation, for environments whose prompts and answers are messages."""

from __future__ import annotations

from typing import Any


def text_of(said: Any) -> str:
    """A text as it is, none as an empty one, or the contents of a list of messages, each on lines
    of its own; without the line break at the end. Roles are the business of a chat template."""
    if said is None or isinstance(said, str):
        return (said or "").rstrip("\n")
    return "\n".join(text_of(message["content"]) for message in said)
