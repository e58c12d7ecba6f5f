"""The reasoning_gym task: problems that a data set of reasoning-gym makes, and whose answers it
scores by a function of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from collections.abc import Mapping
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

# A data set makes its problem number n of its seed plus n, so those of two seeds share problems.
# Here there is one seed, and only the number tells problems apart.
SEED = 0
DRAWS = 1000  # draws after which no problem to train on is looked for any more


class Problems:
    """The problems of a data set: number n is always the same.

    Raises:
        ValueError: reasoning-gym is missing, refuses the data set or its options, or makes other
            problems each time; in one line.
    """

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.dataset is not None
        self.size = settings.size
        self._named = f"task.dataset={settings.dataset} task.size={settings.size}"
        self._dataset = _data_set(settings)
        self.entry = lru_cache(maxsize=1024)(self._made)
        again = _data_set(settings)
        if any(again[n]["question"] != self.question(n) for n in range(min(3, self.size))):
            raise self._not_repeated("each time")

    def _made(self, number: int) -> Mapping[str, Any]:
        try:
            return self._dataset[number]
        except Exception as error:
            raise ValueError(f"{self._named}: problem {number}: {one_line(error)}") from error

    def question(self, number: int) -> str:
        return self.entry(number)["question"]

    def example(self, number: int) -> Example:
        """The question, and a truth that names the problem: not all that it holds survives JSON."""
        entry = self.entry(number)
        answer = None if entry["answer"] is None else str(entry["answer"])
        return Example(
            entry["question"], {"number": number, "question": entry["question"], "answer": answer}
        )

    def score(self, answer: str, truth: Mapping[str, Any]) -> float:
        """What the data set says of an answer to the problem that `truth` names."""
        return float(self._dataset.score_answer(answer, self.entry(truth["number"])))

    def refuse_another(self, truth: Mapping[str, Any]) -> None:
        """ValueError when the problem that `truth` names was another where it was asked."""
        if self.question(truth["number"]) != truth["question"]:
            raise self._not_repeated("in each process")

    def to_train_on(self, key: str, prompt_index: int) -> int:
        """The number of a training problem. A pass takes every number once, in an order of its own;
        in place of one that is held out it takes another one by chance."""
        epoch, place = divmod(prompt_index, self.size)
        number = permutation(key, epoch, self.size)[place]
        draws = random.Random(f"{key} {prompt_index}")
        for _ in range(DRAWS):
            if not is_held_out(self.question(number)):
                return number
            number = draws.randrange(self.size)
        raise self._too_few("to train on")

    def held_out(self, count: int) -> list[int]:
        """The numbers of `count` held-out problems, which come round again where they are fewer.

        The side follows from the question alone, so that none is both trained on and held out.
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
        return ValueError(f"{self._named}: too few problems {what} among {self.size}")

    def _not_repeated(self, when: str) -> ValueError:
        return ValueError(f"{self._named}: makes other problems {when}; choose another data set")


def _data_set(settings: TaskSettings) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            "task.name=reasoning_gym: reasoning-gym is missing; install it by: "
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
    """The reward of the reasoning_gym task, without its prompts. ValueError as for its problems."""

    def __init__(self, settings: TaskSettings) -> None:
        self._form = answer_form(settings)
        self.problems = Problems(settings)

    def warm_up(self) -> None:
        """Does nothing: what is slow, the import, is done."""

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """What the data set says of the answer, often between 0 and 1; 0 without an answer in the
        right form, and where the data set's function cannot cope with the answer."""
        assert isinstance(ground_truth, Mapping), ground_truth
        self.problems.refuse_another(ground_truth)
        truth = ground_truth["answer"]
        try:
            return self._form.judged(
                response,
                lambda answer: self.problems.score(answer, ground_truth),
                truth=truth if isinstance(truth, str) else None,
            )
        except Exception:  # whatever a policy writes, and whatever it makes of it
            return self._form.unverified(response)


class ReasoningGymTask:
    """Problems of one data set, of which a fifth is held out.

    Raises:
        ValueError: as for `Problems`, or a template cannot be read.
    """

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        self._seed = seed
        self._template = template_text(settings.template)
        self._reward = ReasoningGymReward(settings)
        self._problems = self._reward.problems
        self.stop = answer_form(settings).stop
        self._form_note = form_note(settings)

    def notes(self) -> list[str]:
        """What may not be meant: a template that does not ask for an answer."""
        return [] if self._form_note is None else [self._form_note]

    def train_example(self, prompt_index: int) -> Example:
        """Training problem `prompt_index`; each pass over the data set has its own order."""
        return self._asked(self._problems.to_train_on(f"train {self._seed}", prompt_index))

    @property
    def eval_size(self) -> int:
        """How many held-out problems there are before they come round again."""
        return len(set(self._problems.held_out(self._problems.size)))

    def eval_examples(self, count: int) -> list[Example]:
        """`count` held-out problems, the same for every seed; fewer are the first of more."""
        return [self._asked(number) for number in self._problems.held_out(count)]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """What the data set says of the answer of the response."""
        return self._reward.reward(response, ground_truth)

    def _asked(self, number: int) -> Example:
        problem = self._problems.example(number)
        return Example(prompt_of(self._template, as_text(problem.prompt)), problem.ground_truth)
