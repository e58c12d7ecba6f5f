"""Notes about the prompts of a trial, for the user to read before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.tasks.task import Task, eval_size, notes_of, train_size

if TYPE_CHECKING:
    from grpo_trainable.tasks.mix import MixTask
    from grpo_trainable.tasks.prompts import Prompts

NUMBERS = "prompts"  # first word of a line that only states how many prompts there are
OPEN_REASONING = "<think>"  # end of a prompt that has already begun the response


def about_prompts(trial: GRPOConfig, task: Task | MixTask, prompts: Prompts) -> Iterator[str]:
    """Yield lines with the numbers of prompts, and notes about possible mistakes."""
    parts: Mapping[str | None, Task] = getattr(task, "parts", {None: task})
    asked = Counter(prompts.label("eval", index) for index in range(trial.eval.prompts))
    for label, part in parts.items():
        of = "" if label is None else f" of {label}"
        drawn = prompts.train_count if label is None else 0  # of a mix, the parts are not known
        yield from _sizes(part, drawn, asked[label], trial.eval.prompts, of)
        yield from notes_of(part)
    if trial.model.chat_template != "off" and prompts.said("train", 0).endswith(OPEN_REASONING):
        yield (
            f"note: prompts already begin the response, with {OPEN_REASONING}, but "
            f"model.chat_template={shown(trial.model.chat_template)} turns prompts into messages, "
            "so each prompt ends up inside another prompt; choose another task.template, or "
            "model.chat_template=off (docs/howto/math.md)"
        )


def _sizes(task: Task, drawn: int, asked: int, total: int, of: str) -> Iterator[str]:
    """Yield the numbers of prompts that a task states, and a note if an evaluation repeats some.

    Args:
        task: The task.
        drawn: Largest number of training prompts that the trial draws; 0 if unknown.
        asked: Number of held-out prompts that an evaluation requests from this task.
        total: Number of held-out prompts that an evaluation requests from all tasks.
        of: Phrase that names the task in a mix, else "".
    """
    to_train_on = train_size(task)
    if to_train_on is None:  # the task generates its prompts, and counting them may take long
        return
    held_out = eval_size(task)
    known = "" if held_out is None else f", {held_out:,} held out"
    passes = " in several passes" if drawn > to_train_on else ""
    yield f"{NUMBERS}{of}: {to_train_on:,} to train on{passes}{known}"
    if held_out is not None and asked > held_out:
        yield (
            f"note: eval.prompts={total} requests {asked:,} held-out prompts{of}, but there are "
            f"only {held_out:,}, so some are used several times"
        )
