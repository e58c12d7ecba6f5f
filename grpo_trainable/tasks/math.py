"""The task `math`: problems whose answers can be verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.tasks.answers import answer_form, boxed_answer, form_note
from grpo_trainable.tasks.math_reward import MathReward
from grpo_trainable.tasks.messages import as_text, is_text
from grpo_trainable.tasks.order import Rows, SplitTask
from grpo_trainable.tasks.prompt_files import (
    note_on_shared,
    sources_in_files,
    split_files,
    true_answer,
)
from grpo_trainable.tasks.row_files import rows_in
from grpo_trainable.tasks.task import Example, JSONValue, Score
from grpo_trainable.tasks.templates import prompt_of, template_text

# The shipped problems are arithmetic word problems. Their answers are whole numbers.
ARITHMETIC = Path(__file__).parents[1] / "assets" / "arithmetic"
SHIPPED_PROBLEMS = {
    "train_file": str(ARITHMETIC / "train.jsonl"),
    "eval_file": str(ARITHMETIC / "heldout.jsonl"),
}


MARK = "####"  # precedes the final answer in a GSM8K solution


def problem_files(settings: TaskSettings) -> dict[str, str]:
    """Return the files to read, keyed by setting.

    A shipped file replaces a missing `train_file`. If `eval_file` is missing too, a shipped file
    also replaces `eval_file`.
    """
    given = {"train_file": settings.train_file, "eval_file": settings.eval_file}
    files = {key: path for key, path in given.items() if path is not None}
    return files if "train_file" in files else SHIPPED_PROBLEMS | files


def parse_problem(row: Mapping[str, Any], *, own_reward: bool = False) -> Example:
    r"""Return the question and the true answer of a row in the layout of MATH or GSM8K.

    The question is in `problem` or `question`. The true answer is in `answer`, or else in
    `solution`: after the last `####` or in the last \boxed{}. An `answer` without either mark is
    itself the true answer.

    Args:
        row: The row.
        own_reward: True if a user's reward function scores responses. The true answer may then be
            any JSON value, or missing (see `true_answer`).

    Raises:
        ValueError: If the question or the true answer is missing.
    """
    question = row.get("problem", row.get("question"))
    if not is_text(question):
        raise ValueError("the field `problem` or `question` must be non-empty text")
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    worked = row.get("solution") if answer is None else answer
    columns = row if own_reward else {}
    if own_reward and not is_text(worked):
        return Example(question.strip(), true_answer(row), columns)
    if not is_text(worked):
        raise ValueError("the field `answer` or `solution` must be non-empty text")
    truth = _final_answer(worked)
    if truth is None and (answer is not None or own_reward):
        truth = worked.strip()
    if not truth:
        raise ValueError(r"`solution` must have its answer in \boxed{} or after ####")
    return Example(question.strip(), truth, columns)


def unmarked_answers(key: str, path: str) -> str | None:
    """Return a note if most rows of a file mark their answers with ####, but some do not.

    The whole solution of an unmarked row becomes its true answer.

    Args:
        key: Setting that names the file, without the prefix `task.`.
        path: The file.

    Raises:
        ValueError: If the file cannot be read.
    """
    marked, unmarked = 0, []
    for place, row in rows_in(key, path):
        try:
            answer = row().get("answer")
        except ValueError:  # `read_examples` reports malformed rows
            continue
        if not isinstance(answer, str):
            continue
        if MARK in answer:
            marked += 1
        elif boxed_answer(answer) is None:
            unmarked.append(place)
    if not unmarked or marked <= len(unmarked):
        return None
    return (
        f"note: task.{key}={path}: {unmarked[0]} has no {MARK} before its answer, so its whole "
        f"text becomes the true answer ({marked:,} rows have the mark, {len(unmarked):,} do not)"
    )


def _final_answer(worked: str) -> str | None:
    _, marked, after = worked.rpartition(MARK)
    return after.strip() if marked else boxed_answer(worked)


class MathTask(SplitTask[Rows]):
    """Problems from data files, or the shipped problems.

    All problems in `eval_file` are held out. Without `eval_file`, a hash of each question decides
    which problems in `train_file` are held out.

    Raises:
        ValueError: If a file is missing, empty or malformed, or if math-verify is needed but not
            installed. The message is one line.
    """

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        self._seed = seed
        self._template = template_text(settings.template)
        self._reward = MathReward(settings)
        self.stop = answer_form(settings).stop
        self._form_note = form_note(settings)
        self._files = files = problem_files(settings)
        self._train, self._heldout = split_files(
            files["train_file"],
            files.get("eval_file"),
            partial(parse_problem, own_reward=settings.reward is not None),
            strict=settings.strict,
        )
        self.sources = sources_in_files(
            settings.train_file, settings.eval_file, "from the shipped problems"
        )

    def notes(self) -> list[str]:
        """Return one line for each likely mistake.

        The mistakes are: a template that does not request the answer in the expected form, whole
        solutions instead of answers, and problems that are both trained on and held out.
        """
        found = [unmarked_answers(key, path) for key, path in self._files.items()]
        found.insert(0, self._form_note)
        files = self._files["train_file"], self._files.get("eval_file")
        found.append(note_on_shared(self._train, self._heldout, *files))
        return [note for note in found if note is not None]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Reward 1 if the answer in the response equals the true answer, else 0."""
        return self._reward.reward(response, ground_truth)

    def _asked(self, example: Example) -> Example:
        return replace(example, prompt=prompt_of(self._template, as_text(example.prompt)))
