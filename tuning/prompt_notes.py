"""Notes about the prompts of a trial, for the user to read before the trial starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.tasks.task import Task, eval_size, notes_of, sources_of, train_size

if TYPE_CHECKING:
    from grpo_trainable.tasks.mix import MixTask
    from grpo_trainable.tasks.prompts import Prompts

NUMBERS = "prompts"  # first word of a line that only states how many prompts there are
OPEN_REASONING = "<think>"  # end of a prompt that has already begun the response


def about_prompts(trial: GRPOConfig, task: Task | MixTask, prompts: Prompts) -> Iterator[str]:
    """Yield lines with the numbers of prompts, and notes about possible mistakes."""
    asked = _asked(trial, task)
    for label, part in _parts(task).items():
        # For a mix, the number of prompts drawn from each task is not known.
        drawn = prompts.train_count if label is None else 0
        yield from _numbers(part, asked[label], _of(label), drawn)
        yield from _repeats(part, asked[label], trial.eval.prompts, _of(label))
        yield from notes_of(part)
    if trial.model.chat_template != "off" and prompts.said("train", 0).endswith(OPEN_REASONING):
        yield (
            f"note: prompts end with {OPEN_REASONING}, which already begins the response, but "
            f"model.chat_template={shown(trial.model.chat_template)} turns prompts into messages, "
            "so each prompt ends up inside another prompt; choose another task.template, or "
            "model.chat_template=off (docs/howto/math.md)"
        )


def numbers_held_out(trial: GRPOConfig, task: Task | MixTask) -> Iterator[str]:
    """For each task that states its numbers, yield a line with its number of held-out prompts.

    If only a share of a file is held out, the line also says how many prompts the file has.
    """
    asked = _asked(trial, task)
    for label, part in _parts(task).items():
        if (train := train_size(part)) is None:  # see `_numbers`
            continue
        files = (trial if label is None else trial.parts[label]).task
        is_split = files.train_file is not None and files.eval_file is None
        held_out = _held_out(part, asked[label], train if is_split else 0)
        if held_out:
            yield f"{NUMBERS}{_of(label)}: {held_out}"


def _parts(task: Task | MixTask) -> Mapping[str | None, Task]:
    """Return the tasks of a mix by label, or a single task under None."""
    return getattr(task, "parts", {None: task})


def _asked(trial: GRPOConfig, task: Task | MixTask) -> Mapping[str | None, int]:
    """Return, by label, how many held-out prompts an evaluation requests from each task."""
    label_of = getattr(task, "label", lambda stream, index: None)
    return Counter(label_of("eval", index) for index in range(trial.eval.prompts))


def _of(label: str | None) -> str:
    """Return a phrase that names a task of a mix, or "" for a single task."""
    return "" if label is None else f" of {label}"


def _numbers(task: Task, asked: int, of: str, drawn: int) -> Iterator[str]:
    """Yield the numbers of prompts that a task states.

    Args:
        task: The task.
        asked: Number of held-out prompts that an evaluation requests from this task.
        of: Phrase that names the task in a mix, else "".
        drawn: Largest number of training prompts that the trial draws; 0 if unknown.
    """
    to_train_on = train_size(task)
    if to_train_on is None:  # the task generates its prompts, and counting them may take long
        return
    sources = sources_of(task)
    source = "" if sources is None else f" ({sources[0]})"
    passes = " in several passes" if drawn > to_train_on else ""
    numbers = [f"{to_train_on:,} to train on{passes}{source}", _held_out(task, asked)]
    yield f"{NUMBERS}{of}: {', '.join(filter(None, numbers))}"


def _held_out(task: Task, asked: int, others: int = 0) -> str:
    """Return the number of held-out prompts as a phrase, or "" if the task does not state it.

    Args:
        task: The task.
        asked: Number of held-out prompts that an evaluation requests from this task.
        others: Number of other prompts in the same file. If it is not 0, the phrase also says how
            many prompts the file has.
    """
    held_out, sources = eval_size(task), sources_of(task)
    if held_out is None:
        return ""
    total = f" of {held_out + others:,}" if others else ""
    source = "" if sources is None else f" ({sources[1]})"
    used = f"; an evaluation uses {asked:,} of them" if sources and asked < held_out else ""
    return f"{held_out:,}{total} held out{source}{used}"


def _repeats(task: Task, asked: int, total: int, of: str) -> Iterator[str]:
    """Yield a note if an evaluation uses some held-out prompts of a task several times.

    Args:
        task: The task.
        asked: Number of held-out prompts that an evaluation requests from this task.
        total: Number of held-out prompts that an evaluation requests from all tasks.
        of: Phrase that names the task in a mix, else "".
    """
    if train_size(task) is None or (held_out := eval_size(task)) is None or asked <= held_out:
        return
    once = "" if of else f"; eval.prompts={held_out} uses each once"
    yield (
        f"note: eval.prompts={total} requests {asked:,} held-out prompts{of}, but there are only "
        f"{held_out:,}, so some are used several times{once}"
    )
