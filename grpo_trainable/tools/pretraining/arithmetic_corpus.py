"""The arithmetic corpus: word problems with worked solutions, and problems for GRPO.

A document is a question and its solution, `<think>` calculation `</think> <answer>` N `</answer>`.
The first documents are all correct and teach the policy to calculate. Only some of the later
documents have a right calculation. In the others, one step is wrong by 1 or by 10. Only some of the
later documents mark the answer as the reward requires. The recipe sets both shares
(`careful_share` and `format_share`). These shares determine the policy that GRPO starts from: the
policy can calculate, but does not always do so. All documents have about the same length, so
neither longer nor shorter responses earn more reward. No training document and no training prompt
contains a problem for evaluations or the calculation of such a problem.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import SamplingLimits
from grpo_trainable.tasks.math_reward import MathReward
from grpo_trainable.tasks.templates import SHORT, prompt_of
from grpo_trainable.tools.pretraining.corpus import Corpus, Document, Measurements, encode
from grpo_trainable.tools.pretraining.measuring import (
    Response,
    described,
    first_samples,
    lengths,
    mean_length,
    mean_loss,
    sample,
)
from grpo_trainable.tools.pretraining.problems import Problem, ProblemWriter, Step, written
from grpo_trainable.tools.pretraining.recipe import ArithmeticRecipe

TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 768
HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 5000  # enough documents to contain every word of the grammar many times

SLIPS = (-10, -1, 1, 10)  # possible errors in a wrong step
CLOSING = " </think> <answer>{answer}</answer>"
OTHER_CLOSINGS = (
    " </think> {answer}",
    " </think> The answer is {answer}.",
    " The answer is {answer}.",
    " <answer>{answer}</answer>",
    " </think> <answer>{answer}",
)


def arithmetic_corpus(recipe: ArithmeticRecipe) -> Corpus:
    """Generate the arithmetic corpus."""
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
    """Generate the problems that GRPO trains on."""
    return _distinct(recipe, "train problems", TRAIN_PROBLEMS, held_out=False)


def held_out_problems(recipe: ArithmeticRecipe) -> list[Problem]:
    """Generate the problems for evaluations."""
    return _distinct(recipe, "held-out problems", HELD_OUT_PROBLEMS, held_out=True)


def as_jsonl(problems: Iterable[Problem]) -> str:
    """Format problems as JSON lines for the task `math`."""
    rows = ({"question": p.question, "answer": p.answer} for p in problems)
    return "".join(json.dumps(row) + "\n" for row in rows)


def solution(problem: Problem, rng: Random, careful_share: float, format_share: float) -> str:
    """Write the response of a document.

    Args:
        problem: The problem to solve.
        rng: Source of random draws.
        careful_share: Probability of a right calculation.
        format_share: Probability that the answer is marked as the reward requires.
    """
    steps = problem.steps if rng.random() < careful_share else careless(problem.steps, rng)
    closing = CLOSING if rng.random() < format_share else rng.choice(OTHER_CLOSINGS)
    return f" {written(steps)}{closing.format(answer=steps[-1].result)}"


def careless(steps: Sequence[Step], rng: Random) -> tuple[Step, ...]:
    """Make one step of a calculation wrong. The later steps continue from the wrong result."""
    slips = [(place, by) for place in range(len(steps)) for by in SLIPS]
    rng.shuffle(slips)
    wrong = (_slipped(steps, place, by) for place, by in slips)
    return next(calculation for calculation in wrong if calculation is not None)


def _slipped(steps: Sequence[Step], place: int, by: int) -> tuple[Step, ...] | None:
    """Change the result of the step at `place` by `by`, and compute the later steps from it.

    Returns:
        The calculation, or None if it would contain a fraction or a number below 1.
    """
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
    """Yield an endless stream of documents. The first `front` documents are entirely correct."""
    rng = Random(f"solutions {stream} {recipe.seed}")
    for number, problem in enumerate(_writer(recipe, stream).problems(held_out=held_out)):
        shares = (1.0, 1.0) if number < front else (recipe.careful_share, recipe.format_share)
        yield Document(prompt_of(SHORT, problem.question), solution(problem, rng, *shares))


def _distinct(
    recipe: ArithmeticRecipe, stream: str, count: int, *, held_out: bool
) -> list[Problem]:
    """Draw `count` problems with distinct questions."""
    found: dict[str, Problem] = {}
    for problem in _writer(recipe, stream).problems(held_out=held_out):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


# ---- Measurements of a policy: loss, right answers, format, lengths ------------------------------


SAMPLED_PROBLEMS = 256
RESPONSES_PER_PROBLEM = 8
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=64, temperature=1.0, end_ids=())
UNITS = {"tokens": lambda response: response.tokens}
LENGTHS = {"all": "all", "right": "right", "wrong": "wrong", "corpus": "corpus"}
HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per response token (end-of-text included, prompt excluded) "
        "over {held_out_documents} documents of held-out problems"
    ),
    "right_share": (
        "share of {responses} responses with the right answer in the right format: {each} "
        "responses to each of the first {problems} problems of heldout.jsonl, {sampling}"
    ),
    "format_share": "share of those responses in the right format, with any answer",
    "right_of_format": "right answers among those in the right format",
    "right_share_by_operations": "right_share by the number of operations in a problem",
    "solved_share": "share of those problems with at least one right response among its {each}",
    "mixed_share": (
        "share of those problems whose {each} responses are neither all right nor all wrong: GRPO "
        "learns from these"
    ),
    "mean_length": (
        "mean number of tokens, end-of-text included, over those responses and over the "
        "{held_out_documents} documents"
    ),
    "finished_share": "share of those responses that end within the token limit",
}


def measure_arithmetic(
    held_out: Sequence[Document],
    problems: Sequence[Problem],
    model: TransformerLM,
    tokenizer: Tokenizer,
    seed: int,
) -> Measurements:
    """Measure a policy for its model card, and collect sample responses."""
    rows = [encode(tokenizer, document, model.config.context_length) for document in held_out]
    corpus = [
        Response(document.response, len(row.ids) - row.prompt_length, True)
        for document, row in zip(held_out, rows, strict=True)
    ]
    facts: dict[str, Any] = {
        "held_out_loss_nats": mean_loss(model, rows, tokenizer.pad_id),
        "held_out_documents": len(rows),
        **_on_problems(problems[:SAMPLED_PROBLEMS], model, tokenizer, seed),
    }
    facts["mean_length"]["corpus"] = mean_length(corpus, UNITS)
    words = {"each": RESPONSES_PER_PROBLEM, "sampling": described(LIMITS)}
    return Measurements(
        facts=facts,
        how={name: how.format(**facts, **words) for name, how in HOW.items()},
        rows=_rows(facts),
        sampling=described(LIMITS),
        headline=f"held-out loss {facts['held_out_loss_nats']:.3f} nats/token, held-out problems "
        f"solved in {facts['right_share']:.3f} of {facts['responses']} responses, right format in "
        f"{facts['format_share']:.3f} of them",
    )


def _on_problems(
    problems: Sequence[Problem], model: TransformerLM, tokenizer: Tokenizer, seed: int
) -> dict[str, Any]:
    """Measure how often the policy solves problems, and how long its responses are."""
    prompts = [prompt_of(SHORT, p.question) for p in problems]
    groups = sample(model, tokenizer, prompts, RESPONSES_PER_PROBLEM, LIMITS, seed)
    settings = TaskSettings(name="math", template="short", equality="exact")
    reward = MathReward(settings).reward
    scores = [
        [reward(response.text, problem.answer) for response in group]
        for problem, group in zip(problems, groups, strict=True)
    ]
    right_of = [statistics.mean(score.answer_reward for score in group) for group in scores]
    by_operations = {
        str(number): statistics.mean(
            share for share, p in zip(right_of, problems, strict=True) if len(p.steps) == number
        )
        for number in sorted({len(problem.steps) for problem in problems})
    }
    responses = [response for group in groups for response in group]
    flat = [score for group in scores for score in group]
    right = [r for r, score in zip(responses, flat, strict=True) if score.answer_reward]
    wrong = [r for r, score in zip(responses, flat, strict=True) if not score.answer_reward]
    in_format = sum(score.all_parts["format"] for score in flat)
    documents = [
        Document(prompt, problem.answer) for prompt, problem in zip(prompts, problems, strict=True)
    ]
    return {
        "problems": len(problems),
        "responses": len(responses),
        "right_share": len(right) / len(responses),
        "format_share": in_format / len(responses),
        "right_of_format": len(right) / max(1.0, in_format),
        "right_share_by_operations": by_operations,
        "solved_share": statistics.mean(share > 0 for share in right_of),
        "mixed_share": statistics.mean(0 < share < 1 for share in right_of),
        "mean_length": {
            "all": mean_length(responses, UNITS),
            "right": mean_length(right, UNITS),
            "wrong": mean_length(wrong, UNITS),
        },
        "finished_share": statistics.mean(response.finished for response in responses),
        "samples": first_samples(documents, [group[0] for group in groups]),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    by_operations = facts["right_share_by_operations"]
    return [
        ("held-out loss", f"{facts['held_out_loss_nats']:.3f} nats/token", "held_out_loss_nats"),
        *(
            (what, f"{facts[name]:.3f}", name)
            for what, name in (
                ("right answers", "right_share"),
                ("right format", "format_share"),
                ("right answers, given the format", "right_of_format"),
                ("problems solved at least once", "solved_share"),
                ("problems with mixed rewards", "mixed_share"),
            )
        ),
        (
            f"right answers by number of operations: {', '.join(by_operations)}",
            ", ".join(f"{share:.3f}" for share in by_operations.values()),
            "right_share_by_operations",
        ),
        (
            f"tokens per response: {', '.join(LENGTHS)}",
            lengths(facts["mean_length"], list(LENGTHS.values()), "tokens"),
            "mean_length",
        ),
        ("responses that finish", f"{facts['finished_share']:.3f}", "finished_share"),
    ]
