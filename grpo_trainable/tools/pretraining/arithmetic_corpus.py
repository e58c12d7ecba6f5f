"""The arithmetic corpus: word problems with worked solutions, and the problems that GRPO asks.

A document is a question and its solution, `<think>` calculation `</think> <answer>` N `</answer>`.
The first documents are all right, and teach calculating. Of the later ones only a share is
calculated with care, in the others one step is off by 1 or by 10; and only a share marks its answer
as the reward wants it. These shares set what GRPO starts from: a policy that can calculate and does
not always do so. All are about as long, so that length earns nothing. The problems of evaluations
are in no document and in no training prompt, nor are their calculations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random

from grpo_trainable.tasks.templates import SHORT, prompt_of
from grpo_trainable.tools.pretraining.arithmetic_measures import measure_arithmetic
from grpo_trainable.tools.pretraining.corpus import Corpus, Document
from grpo_trainable.tools.pretraining.problems import Problem, ProblemWriter, Step, written
from grpo_trainable.tools.pretraining.recipe import ArithmeticRecipe

TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 768
HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 5000  # they hold every word of the grammar many times

SLIPS = (-10, -1, 1, 10)  # a careless step is off by one of these
CLOSING = " </think> <answer>{answer}</answer>"
OTHER_CLOSINGS = (
    " </think> {answer}",
    " </think> The answer is {answer}.",
    " The answer is {answer}.",
    " <answer>{answer}</answer>",
    " </think> <answer>{answer}",
)


def arithmetic_corpus(recipe: ArithmeticRecipe) -> Corpus:
    count = recipe.steps * recipe.batch_size
    front = round(count * recipe.front_share)
    documents = list(islice(arithmetic_documents(recipe, "corpus", front, held_out=False), count))
    unseen = list(
        islice(arithmetic_documents(recipe, "held-out", 0, held_out=True), HELD_OUT_DOCUMENTS)
    )
    asked = held_out_problems(recipe)
    texts = [d.prompt + d.response for d in documents[-TOKENIZER_DOCUMENTS:]]
    return Corpus(
        documents=documents,
        held_out=unseen,
        tokenizer_texts=texts,
        digits_alone=True,
        files={
            "train.jsonl": as_jsonl(train_problems(recipe)),
            "heldout.jsonl": as_jsonl(asked),
        },
        settings={
            "task.name": "math",
            "task.train_file": "{out}/train.jsonl",
            "task.eval_file": "{out}/heldout.jsonl",
            "task.equality": "exact",
        },
        measure=partial(measure_arithmetic, unseen, asked),
    )


def train_problems(recipe: ArithmeticRecipe) -> list[Problem]:
    """The problems that GRPO trains on."""
    return _distinct(recipe, "train problems", TRAIN_PROBLEMS, held_out=False)


def held_out_problems(recipe: ArithmeticRecipe) -> list[Problem]:
    """The problems that a policy is evaluated on."""
    return _distinct(recipe, "held-out problems", HELD_OUT_PROBLEMS, held_out=True)


def as_jsonl(problems: Iterable[Problem]) -> str:
    """The problems as the math task reads them."""
    rows = ({"question": p.question, "answer": p.answer} for p in problems)
    return "".join(json.dumps(row) + "\n" for row in rows)


def solution(problem: Problem, rng: Random, careful_share: float, format_share: float) -> str:
    """The response of a document: calculated right, and marked as the reward wants it, with these
    probabilities."""
    steps = problem.steps if rng.random() < careful_share else careless(problem.steps, rng)
    closing = CLOSING if rng.random() < format_share else rng.choice(OTHER_CLOSINGS)
    return f" {written(steps)}{closing.format(answer=steps[-1].result)}"


def careless(steps: Sequence[Step], rng: Random) -> tuple[Step, ...]:
    """The calculation with one step that is off, from which the later ones go on."""
    slips = [(place, by) for place in range(len(steps)) for by in SLIPS]
    rng.shuffle(slips)
    wrong = (_slipped(steps, place, by) for place, by in slips)
    return next(calculation for calculation in wrong if calculation is not None)


def _slipped(steps: Sequence[Step], place: int, by: int) -> tuple[Step, ...] | None:
    """The calculation with the step at `place` off; None where a number would not be a whole one,
    from 1 on."""
    off = replace(steps[place], result=steps[place].result + by)
    calculation = [*steps[:place], off]
    for step in steps[place + 1 :]:
        left = calculation[-1].result
        if step.sign == "/" and left % step.right:
            return None
        calculation.append(Step.of(left, step.sign, step.right))
    return tuple(calculation) if all(step.result >= 1 for step in calculation) else None


def _writer(recipe: ArithmeticRecipe, stream: str) -> ProblemWriter:
    rng = Random(f"arithmetic {stream} {recipe.seed}")
    return ProblemWriter(rng, largest=recipe.largest, most_operations=recipe.operations)


def arithmetic_documents(
    recipe: ArithmeticRecipe, stream: str, front: int, *, held_out: bool
) -> Iterator[Document]:
    """An endless stream of documents, the first `front` of which are all right."""
    rng = Random(f"solutions {stream} {recipe.seed}")
    for number, problem in enumerate(_writer(recipe, stream).problems(held_out=held_out)):
        shares = (1.0, 1.0) if number < front else (recipe.careful_share, recipe.format_share)
        yield Document(prompt_of(SHORT, problem.question), solution(problem, rng, *shares))


def _distinct(
    recipe: ArithmeticRecipe, stream: str, count: int, *, held_out: bool
) -> list[Problem]:
    """Draws so many problems, no two with the same question."""
    found: dict[str, Problem] = {}
    for problem in _writer(recipe, stream).problems(held_out=held_out):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())
