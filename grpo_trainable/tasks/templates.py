"""Prompt templates, which turn a question into a prompt."""

from __future__ import annotations

from pathlib import Path

QUESTION = "{question}"

# DeepSeek-R1-Zero's prompt (arXiv 2501.12948). The prompt ends inside the reasoning, and the
# response continues there.
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\n"
    "User: {question}\n"
    "Assistant: <think>"
)
# Asks for the same form of response as R1_ZERO, but is short enough for a small policy.
SHORT = "User: {question}\nAssistant: <think>"
# The prompt of Qwen's mathematical models (arXiv 2409.12122).
BOXED = f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}."

TEMPLATES = {"short": SHORT, "r1_zero": R1_ZERO, "boxed": BOXED, "question_only": QUESTION}


def template_text(template: str) -> str:
    """Return the built-in template with this name, or read a template from a file.

    The line break at the end of a file is dropped.

    Args:
        template: Value of `task.template`.

    Raises:
        ValueError: If the file cannot be read, or has no place for the question. The message is one
            line.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    named = f"task.template={template}"
    try:
        text = Path(template).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise ValueError(f"{named}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{named}: is not UTF-8") from None
    if QUESTION not in text:
        raise ValueError(f"{named}: must contain {QUESTION} in place of the question")
    return text


def prompt_of(template: str, question: str) -> str:
    """Insert a question into the text of a template."""
    return template.replace(QUESTION, question)


def asks_for_tags(template: str) -> bool:
    """Return True if a template requests the answer between tags, not in a box."""
    return template.endswith("<think>") or "<answer>" in template
