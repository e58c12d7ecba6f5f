"""How a question becomes a prompt."""

from __future__ import annotations

from pathlib import Path

QUESTION = "{question}"

# DeepSeek-R1-Zero's prompt (arXiv 2501.12948). It ends inside the reasoning, with which the
# response goes on.
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\n"
    "User: {question}\n"
    "Assistant: <think>"
)
# The same form of response, asked for in as few words as a small policy can be taught.
SHORT = "User: {question}\nAssistant: <think>"
# What Qwen's mathematical models are asked (arXiv 2409.12122).
BOXED = f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}."

TEMPLATES = {"short": SHORT, "r1_zero": R1_ZERO, "boxed": BOXED, "question_only": QUESTION}


def template_text(template: str) -> str:
    """The text of a template that `task.template` names, or of a file.

    The line break at the end of a file is not part of it.

    Raises:
        ValueError: the file cannot be read, or has no place for the question, in one line.
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
        raise ValueError(f"{named}: must have {QUESTION} where the question goes")
    return text


def prompt_of(template: str, question: str) -> str:
    """The prompt that the text of a template makes of a question."""
    return template.replace(QUESTION, question)


def asks_for_tags(template: str) -> bool:
    """Whether the text of a template has the response close its reasoning and give its answer
    between tags; else the answer is expected in a box."""
    return template.endswith("<think>") or "<answer>" in template
