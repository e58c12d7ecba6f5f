r"""The rewards of mathematics: does a response have an answer, and does that equal the true one?"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

from grpo_trainable.config import TaskSettings
from grpo_trainable.tasks.answers import BOXED, TAGS, AnswerForm, answer_form
from grpo_trainable.tasks.equality import Decide, decide_exactly, equal
from grpo_trainable.tasks.quantities import without_unit
from grpo_trainable.tasks.task import JSONValue, Score
from grpo_trainable.tasks.votes import Spell

Truth: TypeAlias = str | int | float | Sequence[str | int | float]


def r1_zero_reward_fn(response: str, ground_truth: Truth) -> dict[str, float]:
    """`reward`, `format_reward` and `answer_reward` of a response that closes its reasoning by
    `</think> <answer>…</answer>`, each 0 or 1.

    The answer must equal `ground_truth`, or one of several, mathematically (math-verify, extra
    `math`); without the right form it earns nothing. Numbers and equal texts need no library. A
    formula may keep the library busy for any time, so a trial calls this in a process that it can
    end; whoever calls it elsewhere has no deadline.

    Raises:
        ValueError: math-verify is needed and not installed.
    """
    return _as_dict(_score(TAGS, response, ground_truth, verified_equal))


def question_only_reward_fn(response: str, ground_truth: Truth) -> dict[str, float]:
    r"""The same of a response whose answer is in \boxed{}."""
    return _as_dict(_score(BOXED, response, ground_truth, verified_equal))


def _as_dict(score: Score) -> dict[str, float]:
    return {
        "reward": score.reward,
        "format_reward": score.format_reward,
        "answer_reward": score.answer_reward,
    }


def _score(
    form: AnswerForm,
    response: str,
    ground_truth: Truth,
    decide: Decide,
    spell: Spell = lambda formula: None,
) -> Score:
    """`spell` is asked only for formulas that `decide` was asked for as well: a policy may write
    one that a parser never comes back from, and not every answer needs it."""
    given = [ground_truth] if isinstance(ground_truth, str | int | float) else ground_truth
    truths = [str(truth) for truth in given]
    asked: set[str] = set()

    def ask(answer: str, truth: str) -> bool:
        asked.add(answer)
        return decide(answer, truth)

    return form.judged(
        response,
        lambda answer: float(any(equal(answer, truth, ask) for truth in truths)),
        truth=truths[0] if truths else None,
        spell=lambda formula: spell(formula) if formula in asked else None,
    )


class MathReward:
    """The reward of the math task, without its prompts."""

    def __init__(self, settings: TaskSettings) -> None:
        """ValueError when math-verify is asked for and not installed, or a template cannot be
        read, in one line."""
        self._form = answer_form(settings)
        self._by_library = settings.equality == "math_verify"
        if self._by_library:
            require_math_verify()

    def warm_up(self) -> None:
        """Does what is slow the first time, by seconds."""
        if self._by_library:
            verified_equal(r"\frac{1}{2}x", r"x\cdot 2^{-1}")

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """1 where the answer of the response equals the true one, else 0."""
        assert isinstance(ground_truth, str), ground_truth
        if self._by_library:
            return _score(self._form, response, ground_truth, verified_equal, library_spelling)
        return _score(self._form, response, ground_truth, decide_exactly)


# ---- math-verify -------------------------------------------------------------------------------


def require_math_verify() -> None:
    """ValueError, in one line, when math-verify is not installed. It is not imported."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "task.equality=math_verify: math-verify is missing; install it by: "
            "pip install 'grpo-trainable[math]', or compare numbers only by task.equality=exact"
        )


def verified_equal(answer: str, truth: str) -> bool:
    """Whether math-verify says that an answer equals a truth, both in LaTeX.

    Its own time-outs are off: they rest on SIGALRM, which only the main thread of a process can
    use. Whoever needs a deadline ends the process.

    Raises:
        ValueError: math-verify is not installed.
    """
    require_math_verify()
    import math_verify

    true, given = _parsed(truth), _parsed(answer)
    return bool(true and given and math_verify.verify(true, given, timeout_seconds=None))


def library_spelling(formula: str) -> str | None:
    """What math-verify reads of a formula, as text; None where it cannot read it."""
    read = _parsed(formula)
    try:
        return str(read[0]) if read else None
    except RecursionError:
        return None


@lru_cache(maxsize=1024)
def _parsed(latex: str) -> list[Any]:
    """What math-verify reads of a formula; nothing where it cannot read it."""
    import math_verify

    # Says once in every process that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = without_unit(" ".join(latex.replace("\\$", "").replace("$", "").split()))
    config = math_verify.LatexExtractionConfig()
    # Its own units are any of "ab", "h" or "t": it would take 2ab for 2.
    normalization = replace(config.normalization_config, units=False)
    return math_verify.parse(
        f"${formula}$",
        extraction_config=[replace(config, normalization_config=normalization)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
