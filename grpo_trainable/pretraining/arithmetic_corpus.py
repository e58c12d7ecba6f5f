"""The arithmetic corpus: word problems with worked solutions, and the problems that GRPO asks.

A document is a question and its solution, `<think>` calculation `</think> <answer>` N `</answer>`.
A share of the documents marks its answer in another way, so that GRPO has a format to teach as well
as arithmetic; the calculation before it is right in all of them, and they are about as long. The
problems of evaluations are in no document and in no training prompt, nor are their calculations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from itertools import islice
from random import Random

from grpo_trainable.pretraining.arithmetic_measures import measure_arithmetic
from grpo_trainable.pretraining.corpus import Corpus, Document
from grpo_trainable.pretraining.problems import Problem, ProblemWriter
from grpo_trainable.pretraining.recipe import ArithmeticRecipe
from grpo_trainable.tasks.templates import SHORT, prompt_of

TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 768
HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 5000  # they hold every word of the grammar many times

CLOSINGS = (
    " </think> {answer}",
    " </think> The answer is {answer}.",
    " The answer is {answer}.",
    " <answer>{answer}</answer>",
    " </think> <answer>{answer}",
)
CLOSING = " </think> <answer>{answer}</answer>"


def arithmetic_corpus(recipe: ArithmeticRecipe) -> Corpus:
    count = recipe.steps * recipe.batch_size
    documents = list(islice(_documents(recipe, "corpus", held_out=False), count))
    unseen = list(islice(_documents(recipe, "held-out", held_out=True), HELD_OUT_DOCUMENTS))
    asked = held_out_problems(recipe)
    texts = [d.prompt + d.response for d in documents[:TOKENIZER_DOCUMENTS]]
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


def solution(problem: Problem, rng: Random, format_share: float) -> str:
    """The response of a document: marked as the reward wants it with that probability."""
    marked = rng.random() < format_share
    closing = CLOSING if marked else rng.choice(CLOSINGS)
    return f" {problem.calculation}{closing.format(answer=problem.answer)}"


def _writer(recipe: ArithmeticRecipe, stream: str) -> ProblemWriter:
    rng = Random(f"arithmetic {stream} {recipe.seed}")
    return ProblemWriter(rng, largest=recipe.largest, most_operations=recipe.operations)


def _documents(recipe: ArithmeticRecipe, stream: str, *, held_out: bool) -> Iterable[Document]:
    rng = Random(f"formats {stream} {recipe.seed}")
    for problem in _writer(recipe, stream).problems(held_out=held_out):
        prompt = prompt_of(SHORT, problem.question)
        yield Document(prompt, solution(problem, rng, recipe.format_share))


def _distinct(
    recipe: ArithmeticRecipe, stream: str, count: int, *, held_out: bool
) -> list[Problem]:
    """So many problems, no two with the same question."""
    found: dict[str, Problem] = {}
    for problem in _writer(recipe, stream).problems(held_out=held_out):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())
