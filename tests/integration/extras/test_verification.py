r"""Answers of every kind. Separate processes, which can be killed, verify each answer or give up.

The expected verdicts are written by hand.
"""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.scorer import ProcessScorer, make_scorer
from grpo_trainable.tasks import RewardError, Score, ScoreRequest
from grpo_trainable.tasks.math_reward import verified_equal
from grpo_trainable.tasks.prompts import build_task

RIGHT, WRONG = Score(1.0, 1.0, 1.0), Score(0.0, 1.0, 0.0)
REFUSED = Score(0.0, 1.0, 0.0, verified=False)
NO_ANSWER = Score(0.0, 0.0, 0.0)

PMATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"

# (truth, answer, True if they are equal)
ANSWERS: list[tuple[str, str, bool]] = [
    # fractions
    (r"\frac{1}{2}", "1/2", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac12", r"\frac{2}{4}", True),
    (r"\frac{1}{3}", "0.33", False),
    ("1.5", r"1\frac{1}{2}", True),
    (r"-\frac{3}{4}", r"\frac{-3}{4}", True),
    (r"\dfrac{7}{3}", "7/3", True),
    (r"\frac{x}{2}", r"\frac{1}{2}x", True),
    # integers
    ("42", "The answer is 42.", True),
    ("1000", "1,000", True),
    ("18", r"\$18", True),
    ("18", "18.00", True),
    ("7", "-7", False),
    ("6", "I think 5 or 6", False),
    ("1024", "2^{10}", False),
    ("300000", r"3\times 10^{5}", True),
    # units and percent
    ("18", r"18\text{ dollars}", True),
    (r"5\text{ cm}", "5", True),
    (r"5\text{ cm}", r"5\text{ m}", False),
    (r"30\text{ cm}^2", r"30\text{ cm}^3", False),
    (r"45^\circ", "45", True),
    (r"10\%", "10", True),
    ("0.1", r"10\%", True),
    (r"50\%", r"5\%", False),
    # LaTeX
    (r"2\sqrt{2}", r"$\sqrt{8}$", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x-1)^2", False),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
    (r"\pi r^2", r"r^2\pi", True),
    (r"\frac{\pi}{4}", "0.785", False),
    ("3", "x=3", True),
    ("x=3", "y=3", False),
    ("2+3i", "3i+2", True),
    ("3", r"\log_2 8", False),
    ("y=2x+1", "2x+1", True),
    # sets and lists
    (r"\{1,2,3\}", r"\{3,1,2\}", True),
    (r"\{1,2,3\}", r"\{1,2\}", False),
    ("1,-2", r"-2 \text{ and } 1", True),
    (r"\{\sqrt{2},1\}", r"\left\{1,2^{1/2}\right\}", True),
    (r"\{1,2\}", "1", False),
    # tuples and intervals
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    (r"(\frac{1}{2},\sqrt{9})", "(0.5,3)", True),
    ("[2,5)", r"2\le x<5", True),
    ("[2,5)", "(2,5)", False),
    (r"(-\infty,3)\cup(5,\infty)", r"(5,\infty)\cup(-\infty,3)", True),
    (r"x \ge \frac{1}{2}", r"[0.5,\infty)", True),
    ("(2,5]", r"x\in(2,5]", True),
    # matrices
    (PMATRIX, r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
    (PMATRIX, r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    # words
    (r"\text{east}", "East", True),
    (r"\text{east}", "west", False),
    ("C", "(C)", True),
    ("red", "red car", False),
    (r"\text{red}", r"\text{red} \text{ car}", False),
    # restated questions
    ("444", "12*37", False),
    (r"\frac{3}{4}", r"\frac{1}{2}+\frac{1}{4}", False),
    ("5050", r"\sum_{k=1}^{100} k", False),
    (r"\frac13", r"\int_0^1 x^2 dx", False),
    ("6", r"\gcd(12,18)", False),
    ("3,-3", r"\pm\sqrt{9}", False),
    ("3,-3", "x^2=9", False),
    (r"9\pi", r"4\pi+5\pi", False),
    (r"\frac{\pi}{6}", r"\arcsin\frac{1}{2}", False),
    # closed forms, equations and units of formulas
    (r"9\pi", "9*pi", True),
    (r"2\sqrt{3}", "2√3", True),
    (r"2\sqrt{3}", "2sqrt3", True),
    (r"1\pm\sqrt{2}", r"\{1+2^{1/2}, 1-\sqrt{2}\}", True),
    (r"\binom{10}{3}", "120", True),
    (r"\binom{10}{3}", r"\frac{10!}{3!7!}", True),
    ("2^{100}", r"2\cdot 2^{99}", True),
    ("2^{n+1}", r"2\cdot 2^n", True),
    (r"\arctan 2", r"\tan^{-1} 2", True),
    ("x+2y=3", "3 = 2y+x", True),
    ("x+2y=3", "x+2y=4", False),
    ("y=2x+3", "3+2x=y", True),
    (r"\mathbb{R}", r"(-\infty,\infty)", True),
    (r"9\pi\text{ cm}^2", "9 pi", True),
    (r"9\pi", "9 pi square units", True),
    (r"5\sqrt{2}", r"\sqrt{50}\text{ m}", True),
    ("2ab", "2", False),
    ("5h", "5", False),
    (PMATRIX, r"\frac{1}{2}\begin{pmatrix}2&4\\6&8\end{pmatrix}", True),
    (PMATRIX, r"\begin{pmatrix}1&1\\3&2\end{pmatrix}\begin{pmatrix}1&0\\0&2\end{pmatrix}", False),
    # nonsense
    ("5", "", False),
    ("5", r"asdf \frac{ {{ } $", False),
    ("5", "\N{CRAB}\N{CRAB}", False),
    ("5", r"\frac{1}{" * 30 + "x" + "}" * 30, False),
    ("5", "9" * 10_000, False),
    ("5", r"\sqrt{" * 2_500, False),
    ("5", "5 " * 5_000, False),
]

# Each of these would keep sympy busy for ever or exhaust the memory. They reach math-verify, which
# uses sympy, only if the true answer is a sum too.
SUM = r"\sum_{k=1}^{3} k"
BOMBS = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "1000000000!",
    r"\binom{1000000000}{500000000}",
    r"\sum_{n=1}^{1000000000} n^n",
]


def asked(truth: str, answer: str) -> ScoreRequest:
    return ScoreRequest(f"So it is this. </think> <answer>{answer}</answer>", truth)


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("math") / "problems.jsonl"
    rows = [{"problem": f"p{i}", "solution": rf"\boxed{{{i}}}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def scorer_of(problems: str, **task) -> ProcessScorer:
    own = {"name": "math", "train_file": problems, **task}
    config = GRPOConfig.from_dict({"task": own, "resources": {"reward_workers": 2}})
    scorer = make_scorer(config, build_task(config))
    assert isinstance(scorer, ProcessScorer)
    return scorer


@pytest.fixture(scope="module")
def scorer(problems):
    """Yield a scorer with a deadline that only the `BOMBS` exceed, even on a slow machine."""
    with contextlib.closing(scorer_of(problems, reward_deadline_s=60.0)) as scorer:
        yield scorer


def workers(scorer) -> set[int]:
    return {worker._process.pid for worker in scorer._processes}


def verdicts(scorer: Any, requests: list[ScoreRequest]) -> list[Any]:
    """Return the scores without the extracted answers, which test_math_task.py checks."""
    scores = scorer.score(requests)
    return [replace(s, answer=None) if isinstance(s, Score) else s for s in scores]


def test_answers_get_the_verdicts_that_were_written_by_hand(scorer):
    before = workers(scorer)
    scores = verdicts(scorer, [asked(truth, answer) for truth, answer, _ in ANSWERS])
    expected = [RIGHT if equal else WRONG for _, _, equal in ANSWERS]
    differing = [
        (*pair, score)
        for pair, score, wanted in zip(ANSWERS, scores, expected, strict=True)
        if score != wanted
    ]
    assert differing == []
    assert workers(scorer) == before  # no process had to be replaced


def test_a_bomb_is_a_wrong_answer_and_the_next_ones_are_verified(problems):
    requests = [request for bomb in BOMBS for request in (asked(SUM, bomb), asked("x+1", "1+x"))]
    with contextlib.closing(scorer_of(problems, reward_deadline_s=2.0)) as scorer:
        before = workers(scorer)
        scores = verdicts(scorer, requests)
        ended = before - workers(scorer)
    assert scores[1::2] == [RIGHT] * len(BOMBS)
    assert all(score in (WRONG, REFUSED) for score in scores[::2])
    assert scores[2 * BOMBS.index("1000000000!")] == REFUSED
    assert ended


def test_a_bomb_for_a_number_is_wrong_and_never_reaches_the_library(scorer):
    before = workers(scorer)
    assert verdicts(scorer, [asked("5", bomb) for bomb in BOMBS]) == [WRONG] * len(BOMBS)
    assert workers(scorer) == before


def test_a_response_without_an_answer_earns_nothing(scorer):
    assert scorer.score([ScoreRequest("5", "5")]) == [NO_ANSWER]


def test_formulas_are_verified_off_the_main_thread(scorer):
    """SIGALRM works only in the main thread, so a time-out that used it would fail elsewhere."""
    requests = [asked(truth, answer) for truth, answer, equal in ANSWERS if equal]
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(verdicts(scorer, requests)))
    thread.start()
    thread.join()
    assert scores == [RIGHT] * len(requests)


def test_the_library_itself_needs_no_main_thread():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(verified_equal, r"\sqrt{18}", r"3\sqrt{2}").result()
        assert not thread.submit(verified_equal, r"\sqrt{18}", r"2\sqrt{3}").result()


def test_bombs_alone_become_errors_after_the_tenth(problems):
    """If everything times out, verification itself is at fault and the trial must end."""
    with contextlib.closing(scorer_of(problems, reward_deadline_s=0.02)) as scorer:
        scores = verdicts(scorer, [asked(SUM, "1000000000!")] * 14)
    refused = scores.count(REFUSED)
    left_out = [score for score in scores if isinstance(score, RewardError)]
    # When the tenth answer timed out, the other worker may still have been judging an answer. That
    # answer is still awaited.
    assert refused in (10, 11)
    assert len(left_out) == 14 - refused
    assert all("other responses of the same chunk" in error.message for error in left_out)
