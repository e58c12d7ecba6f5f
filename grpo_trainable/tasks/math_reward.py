r"""Rewards for mathematics: find the answer in a response and compare it with the true answer."""

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
    """Score a response that ends its reasoning with `</think> <answer>…</answer>`.

    The answer must be mathematically equal to the true answer. Numbers and identical texts are
    compared without a library. Other formulas are compared with math-verify (extra `math`). A
    response without an answer between these tags earns nothing.

    On some formulas, math-verify may never finish. A trial therefore scores responses in a process
    that it can kill. This function itself sets no deadline.

    Args:
        response: The text of the response.
        ground_truth: The true answer, or several true answers, each of which is accepted.

    Returns:
        `reward`, `format_reward` and `answer_reward`, each 0 or 1.

    Raises:
        ValueError: If math-verify is needed but not installed.
    """
    return _as_dict(_score(TAGS, response, ground_truth, verified_equal))


def question_only_reward_fn(response: str, ground_truth: Truth) -> dict[str, float]:
    r"""Score a response as `r1_zero_reward_fn` does, but look for the answer in \boxed{}."""
    return _as_dict(_score(BOXED, response, ground_truth, verified_equal))


def _as_dict(score: Score) -> dict[str, float]:
    parts = {f"{name}_reward": value for name, value in score.all_parts.items()}
    return {"reward": score.reward, **parts}


def _score(
    form: AnswerForm,
    response: str,
    ground_truth: Truth,
    decide: Decide,
    spell: Spell = lambda formula: None,
) -> Score:
    """Score a response by its answer.

    `spell` may use a parser, and the parser may hang on a formula that a policy wrote. `spell` is
    therefore called only for formulas that `decide` has already compared without hanging.
    """
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
    """Scores responses as the task `math` does, without loading any problems."""

    def __init__(self, settings: TaskSettings) -> None:
        """Read the form of answers from the settings.

        Raises:
            ValueError: If math-verify is configured but not installed, or if the template cannot
                be read. The message is one line.
        """
        self._form = answer_form(settings)
        self._by_library = settings.equality == "math_verify"
        if self._by_library:
            require_math_verify()

    def warm_up(self) -> None:
        """Load math-verify now, because the first call to the library takes seconds."""
        if self._by_library:
            verified_equal(r"\frac{1}{2}x", r"x\cdot 2^{-1}")

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Reward 1 if the answer in the response equals the true answer, else 0."""
        assert isinstance(ground_truth, str), ground_truth
        if self._by_library:
            return _score(self._form, response, ground_truth, verified_equal, library_spelling)
        return _score(self._form, response, ground_truth, decide_exactly)


# ---- math-verify -------------------------------------------------------------------------------


def require_math_verify() -> None:
    """Check that math-verify is installed, without importing it.

    Raises:
        ValueError: If math-verify is not installed. The message is one line.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "task.equality=math_verify: math-verify is missing; install it with: "
            "pip install 'grpo-trainable[math]', or set task.equality=exact to compare numbers only"
        )


def verified_equal(answer: str, truth: str) -> bool:
    """Return True if math-verify considers an answer equal to a true answer, both in LaTeX.

    The library's time-outs are off, because they rely on SIGALRM, which only the main thread of a
    process can use. To enforce a deadline, end the process.

    Raises:
        ValueError: If math-verify is not installed.
    """
    require_math_verify()
    import math_verify

    true, given = _parsed(truth), _parsed(answer)
    return bool(true and given and math_verify.verify(true, given, timeout_seconds=None))


def library_spelling(formula: str) -> str | None:
    """Return math-verify's canonical text of a formula, or None if it cannot parse the formula."""
    read = _parsed(formula)
    try:
        return str(read[0]) if read else None
    except RecursionError:
        return None


@lru_cache(maxsize=1024)
def _parsed(latex: str) -> list[Any]:
    """Return math-verify's result of parsing a formula: a list, empty if parsing fails."""
    import math_verify

    # Without this line, the library warns once in every process that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = without_unit(" ".join(latex.replace("\\$", "").replace("$", "").split()))
    config = math_verify.LatexExtractionConfig()
    # The library's units include "ab", "h" and "t", so the library would read 2ab as 2.
    normalization = replace(config.normalization_config, units=False)
    return math_verify.parse(
        f"${formula}$",
        extraction_config=[replace(config, normalization_config=normalization)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
