"""What a user may want to know about the prompts of a trial before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.tasks.task import Task, eval_size, notes_of, train_size

if TYPE_CHECKING:
    from grpo_trainable.tasks.mix import MixTask
    from grpo_trainable.tasks.prompts import Prompts

NUMBERS = "prompts"  # how a line begins that is only about their numbers
OPEN_REASONING = "<think>"  # ends a prompt with which the response goes on


def about_prompts(trial: GRPOConfig, task: Task | MixTask, prompts: Prompts) -> Iterator[str]:
    """Yields the numbers of prompts, and what of them may not be meant, a line each."""
    parts: Mapping[str | None, Task] = getattr(task, "parts", {None: task})
    asked = Counter(prompts.label("eval", index) for index in range(trial.eval.prompts))
    for label, part in parts.items():
        of = "" if label is None else f" of {label}"
        yield from _sizes(part, asked[label], trial.eval.prompts, of)
        yield from notes_of(part)
    if trial.model.chat_template != "off" and prompts.said("train", 0).endswith(OPEN_REASONING):
        yield (
            f"note: prompts end with {OPEN_REASONING}, within the response, and "
            f"model.chat_template={shown(trial.model.chat_template)} makes messages of them: a "
            "prompt inside a prompt; choose another task.template, or model.chat_template=off "
            "(docs/howto/math.md)"
        )


def _sizes(task: Task, asked: int, total: int, of: str) -> Iterator[str]:
    """Yields how many prompts a task has on either side, as far as it says, and whether an
    evaluation that asks for so many, of `total` prompts, repeats some."""
    to_train_on = train_size(task)
    if to_train_on is None:  # such a task makes its prompts, and may take long to count them
        return
    held_out = eval_size(task)
    known = "" if held_out is None else f", {held_out:,} held out"
    yield f"{NUMBERS}{of}: {to_train_on:,} to train on{known}"
    if held_out is not None and asked > held_out:
        yield (
            f"note: eval.prompts={total} asks for {asked:,} held-out prompts{of}, and there are "
            f"{held_out:,}: some are asked several times"
        )
