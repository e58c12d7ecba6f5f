"""Notes about settings that are valid and may not be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_trainable.config import GRPOConfig, flatten
from grpo_trainable.tasks import REWARDS
from grpo_trainable.tasks.answers import BOXED, answer_form
from grpo_trainable.tasks.templates import template_text
from grpo_trainable.tasks.truths import lines_without_mark, shared_questions


def task_notes(trial: GRPOConfig) -> Iterator[str]:
    """What may be wrong with a trial's questions, or with the files that they are from.

    Raises:
        ValueError: a file cannot be read.
    """
    if trial.task.name not in REWARDS:
        return
    yield from _template_notes(trial)
    if trial.task.name == "math":
        yield from _file_notes(trial)


def _template_notes(trial: GRPOConfig) -> Iterator[str]:
    text, named = template_text(trial.task.template), f"task.template={trial.task.template}"
    if answer_form(trial.task) is BOXED and "boxed" not in f"{text} {trial.model.system or ''}":
        yield (
            rf"note: {named} does not ask for the answer in \boxed{{}}, where alone it counts; "
            "task.template=boxed does"
        )
    if trial.model.chat_template != "off" and text.endswith("<think>"):
        yield (
            f"note: {named} spells out a conversation, which model.chat_template puts into a "
            "message of another; an instruct model is asked by task.template=boxed"
        )


def _file_notes(trial: GRPOConfig) -> Iterator[str]:
    train, heldout = trial.task.train_file, trial.task.eval_file
    for key, path in (("train_file", train), ("eval_file", heldout)):
        if path is not None and (numbers := lines_without_mark(key, path)):
            yield (
                f"note: task.{key}={Path(path).name}: line {numbers[0]} has no #### before its "
                f"answer, as other lines have ({len(numbers)} such): all of it is taken for the "
                "answer"
            )
    if train is not None and heldout is not None and (both := shared_questions(train, heldout)):
        yield (
            f"note: of the held-out problems, {both:,} stand in the file to train on as well: what "
            "an evaluation finds may be learnt by heart"
        )


def preset_notes(wants: Mapping[str, str], trial: GRPOConfig) -> Iterator[str]:
    """`wants`: the keys that a preset leaves to its user, and what for."""
    settings = flatten(trial.to_dict())
    for key, meant in wants.items():
        if settings.get(key) is None:
            yield f"note: the preset is for {meant}: --set {key}=FILE names it"
