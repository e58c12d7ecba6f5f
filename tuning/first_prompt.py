"""The first prompt of a trial, as its model reads it: what `--dry-run` shows of a task."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_trainable.config import GRPOConfig

MOST_CHARACTERS = 1200  # of a prompt; a longer one loses its middle
INDENT = "    "


def first_prompt(trial: GRPOConfig) -> list[str]:
    """Lines with the prompt, chat template included, and the true answer where there is one.

    Raises:
        ValueError: the task or the tokenizer cannot be read, in one line.
    """
    from grpo_trainable.models.directory import check_policy
    from grpo_trainable.prompts import Prompts, build_task

    _, tokenizer = check_policy(trial.model)
    prompts = Prompts(trial, build_task(trial), tokenizer)
    tokens = len(prompts.request("train", 0).prompt_ids)
    truth = prompts.ground_truth("train", 0)
    told = [] if truth is None else [f"its true answer: {json.dumps(truth, ensure_ascii=False)}"]
    text = shortened(prompts.text("train", 0), MOST_CHARACTERS)
    return [
        f"the first prompt of arm {trial.arm}, as its model reads it ({tokens:,} tokens):",
        *(f"{INDENT}{line}".rstrip() for line in text.splitlines()),
        *told,
    ]


def shortened(text: str, most: int) -> str:
    """The text, without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
