"""Answers that need no library to be compared: texts, numbers with units, and their lists."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_trainable.tasks.equality import LONGEST_ANSWER, decide_exactly, equal, plain
from grpo_trainable.tasks.quantities import Quantity, quantity
from grpo_trainable.tasks.votes import canonical


def asked(answer: str, truth: str) -> list[tuple[str, str]]:
    """What is left to a library."""
    questions: list[tuple[str, str]] = []
    equal(answer, truth, lambda *pair: questions.append(pair) is None and False)
    return questions


# ---- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("-7", Fraction(-7)),
        ("+ 3", Fraction(3)),
        ("007", Fraction(7)),
        ("18.00", Fraction(18)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("3/4", Fraction(3, 4)),
        ("- 3 / 4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac34", Fraction(-3, 4)),
        (r"\frac{1,000}{3}", Fraction(1000, 3)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        ("$18", Fraction(18)),
        (r"\$18.50", Fraction(37, 2)),
    ],
)
def test_a_number_in_any_spelling(text, value):
    assert quantity(text) == Quantity(value, percent=False, unit="")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30%", Quantity(Fraction(30), percent=True, unit="")),
        (r"30\%", Quantity(Fraction(30), percent=True, unit="")),
        ("30 percent", Quantity(Fraction(30), percent=True, unit="")),
        (r"5\text{ cm}", Quantity(Fraction(5), percent=False, unit="cm")),
        (r"5\text{ cm}^2", Quantity(Fraction(5), percent=False, unit="cm2")),
        (r"5 \text{m}^{3}", Quantity(Fraction(5), percent=False, unit="m3")),
        ("12 apples", Quantity(Fraction(12), percent=False, unit="apples")),
        ("60 miles per hour", Quantity(Fraction(60), percent=False, unit="milesperhour")),
        (r"45^\circ", Quantity(Fraction(45), percent=False, unit="degrees")),
        ("45°", Quantity(Fraction(45), percent=False, unit="degrees")),
        (r"45^{\circ}", Quantity(Fraction(45), percent=False, unit="degrees")),
    ],
)
def test_what_follows_a_number_is_kept(text, expected):
    assert quantity(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "5x", "2ab", "1/0", "1,23", "5 or 6", "5 million", "3 pi", "half", "1e9", "2^3"),
        *(r"\frac{1}{x}", r"\sqrt{2}", "1/2/3", "--5", "5 cm 6", "∞", "٣x", "9" * 101),
    ],
)
def test_what_is_no_plain_number_is_none(text):
    assert quantity(text) is None


@pytest.mark.slow
@given(st.integers(min_value=-(10**30), max_value=10**30))
def test_an_integer_is_the_same_in_groups_of_three(number):
    assert quantity(f"{number:,}") == quantity(str(number)) == Quantity(Fraction(number), False, "")


@pytest.mark.slow
@given(st.fractions(max_denominator=10**6))
def test_a_fraction_equals_its_multiples(value):
    over, under = value.numerator, value.denominator
    assert equal(rf"\frac{{{over}}}{{{under}}}", f"{3 * over}/{3 * under}", decide_exactly)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_texts_are_compared_and_any_text_equals_itself(one, other):
    assert equal(one, other, decide_exactly) in (True, False)
    assert equal(one, one, decide_exactly) is bool(plain(one))


# ---- Verdicts, by hand -------------------------------------------------------------------------

EQUAL = [
    ("42", "The answer is 42."),
    ("42", "Answer: $42$"),
    ("42", r"\(42\)"),
    ("42", "**42**"),
    (r"\frac{1}{2}", "0.5"),
    ("1000", r"1{,}000"),
    ("1000", r"1\,000"),
    ("5 cm", "5"),
    (r"5\text{ inches}", "5 inch"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    (r"50\%", "0.5"),
    ("3", "x = 3"),
    ("x=3", "x=3.0"),
    (r"\text{east}", "East"),
    ("Monday", r"\textbf{monday}"),
    ("C", r"\text{(C)}"),
    (r"\dfrac{x}{2}", r"\frac{x}{2}"),
    (r"\left(1,\ 2\right)", "(1,2)"),
    (r"(\frac12, 3)", "(0.5,3)"),
    (r"\{1,2,3\}", r"\left\{ 3, 1, 2 \right\}"),
    ("1,-2", r"-2 \text{ and } 1"),
    ("1, -2", r"\{-2, 1\}"),
    ("2, 3", "3 or 2"),
    ("[2,5)", r"2\le x<5"),
    ("(2,5]", r"5 \geq t > 2"),
    (r"[2,\infty)", r"x \ge 2"),
    (r"(-\infty,3)", "3 > x"),
    (r"(-\infty,3)\cup(5,\infty)", r"(5,\infty) \cup (-\infty,3)"),
    (r"(2,5]", r"x\in(2,5]"),
    ("(1,2),(3,4)", "(3,4), (1,2)"),
    ("(-3, ∞)", r"(-3,\infty)"),
]

DIFFERENT = [
    ("7", "-7"),
    (r"\frac{1}{3}", "0.33"),
    ("12", "1 2"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"50\%", r"5\%"),
    ("0.5", "50"),
    ("x=3", "y=3"),
    ("east", "west"),
    ("x", "X"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[2,5)", "(2,5)"),
    ("[2,5)", r"2<x\le 5"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\{1,1,2\}", r"\{1,2,2\}"),
    ("6", "5 or 6"),
    ("1", r"\{1,2\}"),
    ("1", "(1,2)"),
    ("5", ""),
    ("5", "   "),
    ("5", "$$"),
]


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_equal_without_a_library(truth, answer):
    assert equal(answer, truth, decide_exactly)
    assert asked(answer, truth) == []


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_different_without_a_library(truth, answer):
    assert not equal(answer, truth, lambda *_: True) or asked(answer, truth)
    assert not equal(answer, truth, decide_exactly)


@pytest.mark.parametrize(
    ("truth", "answer", "left"),
    [
        (r"2\sqrt{2}", r"$\sqrt{8}$", [(r"\sqrt{8}", r"2\sqrt{2}")]),
        ("3", "x=1+2", [("1+2", "3")]),
        (r"(\sqrt{4},1)", "(2,1)", [("2", r"\sqrt{4}")]),
        (r"\{\pi,1\}", r"\{1,x\}", [("x", r"\pi")]),
        (r"[0,\sqrt{2})", r"0\le x<\sqrt2", [(r"\sqrt2", r"\sqrt{2}")]),
    ],
)
def test_a_formula_is_left_to_the_library_part_by_part(truth, answer, left):
    assert asked(answer, truth) == left


def test_matrices_keep_their_row_breaks():
    matrix = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
    assert plain(f"${matrix}$") == matrix


def test_a_long_answer_is_refused_before_it_is_looked_at():
    assert asked("x" * (LONGEST_ANSWER + 1), "x") == []
    assert equal("y" * 2000, "y" * 2000, decide_exactly)  # the truth is as long


@given(st.text(alphabet="01x,(){}[]=%\\ ∪", max_size=12))
@example("")
def test_any_text_stands_for_a_text_when_votes_are_counted(answer):
    assert isinstance(canonical(answer), str)
