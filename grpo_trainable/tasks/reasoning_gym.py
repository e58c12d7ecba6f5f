"""The task `reasoning_gym`: a reasoning-gym data set makes the problems and scores the answers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.plugins import one_line
from grpo_trainable.tasks.answers import answer_form, form_note
from grpo_trainable.tasks.messages import as_text
from grpo_trainable.tasks.order import permutation
from grpo_trainable.tasks.prompt_files import is_held_out
from grpo_trainable.tasks.task import Example, JSONValue, Score
from grpo_trainable.tasks.templates import prompt_of, template_text

# A data set with seed s draws problem n with the seed s + n, so data sets with different seeds
# share problems. The seed is therefore fixed here, and only n distinguishes problems.
SEED = 0
DRAWS = 1000  # maximum number of random draws to find one training problem


class Problems:
    """The problems of a data set. The same number always stands for the same problem.

    Raises:
        ValueError: If reasoning-gym is not installed, rejects the data set or its options, or makes
            different problems each time. The message is one line.
    """

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.dataset is not None
        self.size = settings.size
        self._named = f"task.dataset={settings.dataset} task.size={settings.size}"
        self._dataset = _data_set(settings)
        self.entry = lru_cache(maxsize=1024)(self._made)
        again = _data_set(settings)
        if any(again[n]["question"] != self.question(n) for n in range(min(3, self.size))):
            raise self._not_repeated("each time the data set is created")

    def _made(self, number: int) -> Mapping[str, Any]:
        try:
            return self._dataset[number]
        except Exception as error:
            raise ValueError(f"{self._named}: problem {number}: {one_line(error)}") from error

    def question(self, number: int) -> str:
        """Return the question of a problem."""
        return self.entry(number)["question"]

    def example(self, number: int) -> Example:
        """Return a problem's question with a true answer that refers to the problem by number.

        The true answer cannot contain the whole problem, because JSON cannot store all of it.
        """
        entry = self.entry(number)
        answer = None if entry["answer"] is None else str(entry["answer"])
        columns = {"question": entry["question"], "answer": answer}
        return Example(entry["question"], {"number": number, **columns}, columns)

    def score(self, answer: str, truth: Mapping[str, Any]) -> float:
        """Return the data set's score for an answer to the problem that `truth` identifies."""
        return float(self._dataset.score_answer(answer, self.entry(truth["number"])))

    def refuse_another(self, truth: Mapping[str, Any]) -> None:
        """Check that this process makes the same problem as the process that wrote the prompt.

        Args:
            truth: True answer of the example, with the number and the question of the problem.

        Raises:
            ValueError: If the problem differs.
        """
        if self.question(truth["number"]) != truth["question"]:
            raise self._not_repeated("between processes")

    def to_train_on(self, key: str, prompt_index: int) -> int:
        """Return the number that identifies training problem `prompt_index` of the stream `key`.

        Each pass visits every problem once, in a different order. Each held-out problem is replaced
        by a training problem that is drawn at random.

        Raises:
            ValueError: If no training problem is found.
        """
        epoch, place = divmod(prompt_index, self.size)
        number = permutation(key, epoch, self.size)[place]
        draws = random.Random(f"{key} {prompt_index}")
        for _ in range(DRAWS):
            if not is_held_out(self.question(number)):
                return number
            number = draws.randrange(self.size)
        raise self._too_few("to train on")

    def held_out(self, count: int) -> list[int]:
        """Return the numbers that identify `count` held-out problems.

        If fewer than `count` problems are held out, the numbers repeat. The question alone decides
        the split, so no problem is both trained on and held out.

        Raises:
            ValueError: If no problem is held out.
        """
        found: list[int] = []
        for number in permutation("eval", 0, self.size):
            if len(found) == count:
                break
            if is_held_out(self.question(number)):
                found.append(number)
        if not found:
            raise self._too_few("to hold out")
        return [found[i % len(found)] for i in range(count)]

    def _too_few(self, what: str) -> ValueError:
        return ValueError(
            f"{self._named}: there are too few problems {what} among {self.size}; raise task.size"
        )

    def _not_repeated(self, when: str) -> ValueError:
        return ValueError(f"{self._named}: problems differ {when}; choose another data set")


def _data_set(settings: TaskSettings) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            "task.name=reasoning_gym: reasoning-gym is missing; install it with: "
            "pip install 'grpo-trainable[gym]'"
        )
    reasoning_gym = importlib.import_module("reasoning_gym")

    options = json.loads(settings.options)
    try:
        return reasoning_gym.create_dataset(
            settings.dataset, seed=SEED, size=settings.size, **options
        )
    except Exception as error:
        named = f"task.dataset={settings.dataset} task.options={settings.options}"
        raise ValueError(f"{named}: {one_line(error)}") from error


class ReasoningGymReward:
    """Scores responses to the problems of the task `reasoning_gym`.

    Raises:
        ValueError: If `Problems` raises a ValueError, or if the template cannot be read.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._form = answer_form(settings)
        self.problems = Problems(settings)

    def warm_up(self) -> None:
        """Do nothing. The slow part, the import, is already done."""

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Reward a response with the score that the data set gives its answer.

        The score is often between 0 and 1. It is 0 if the response has no answer in the right form,
        or if the data set cannot score the answer.

        Raises:
            ValueError: If the data set makes different problems in different processes.
        """
        assert isinstance(ground_truth, Mapping), ground_truth
        self.problems.refuse_another(ground_truth)
        truth = ground_truth["answer"]
        try:
            return self._form.judged(
                response,
                lambda answer: self.problems.score(answer, ground_truth),
                truth=truth if isinstance(truth, str) else None,
            )
        except Exception:  # the data set may raise any exception when it scores a policy's text
            return self._form.unverified(response)


class ReasoningGymTask:
    """Problems of one data set. About a fifth of the problems are held out.

    Raises:
        ValueError: If `Problems` raises a ValueError, or if the template cannot be read.
    """

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        self._seed = seed
        self._template = template_text(settings.template)
        self._reward = ReasoningGymReward(settings)
        self._problems = self._reward.problems
        self.stop = answer_form(settings).stop
        self._form_note = form_note(settings)

    def notes(self) -> list[str]:
        """Return one line if the template does not request an answer in the right form."""
        return [] if self._form_note is None else [self._form_note]

    def train_example(self, prompt_index: int) -> Example:
        """Return training problem `prompt_index`. Each pass has a different order."""
        return self._asked(self._problems.to_train_on(f"train {self._seed}", prompt_index))

    @property
    def eval_size(self) -> int:
        """Number of held-out problems before they repeat."""
        return len(set(self._problems.held_out(self._problems.size)))

    def eval_examples(self, count: int) -> list[Example]:
        """Return the same `count` held-out problems for every seed.

        A larger `count` only appends problems.
        """
        return [self._asked(number) for number in self._problems.held_out(count)]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score a response as `ReasoningGymReward.reward` does."""
        return self._reward.reward(response, ground_truth)

    def _asked(self, number: int) -> Example:
        problem = self._problems.example(number)
        return replace(problem, prompt=prompt_of(self._template, as_text(problem.prompt)))
