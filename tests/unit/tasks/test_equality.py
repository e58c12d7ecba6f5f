"""Answers that can be compared without a library: texts, numbers with units, and lists of these."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_trainable.tasks.equality import LONGEST_ANSWER, decide_exactly, equal, plain
from grpo_trainable.tasks.quantities import Quantity, quantity
from grpo_trainable.tasks.votes import canonical


def asked(answer: str, truth: str) -> list[tuple[str, str]]:
    """Return the comparisons that `equal` leaves to a library."""
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
        ("1 234 567.5", Fraction(2469135, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("(-1)/2", Fraction(-1, 2)),
        ("1/(-2)", Fraction(-1, 2)),
        (r"\frac{-1}{-2}", Fraction(1, 2)),
        (r"-(\frac12)", Fraction(-1, 2)),
        ("(5)", Fraction(5)),
        (r"\{5\}", Fraction(5)),
        (r"\text{5}", Fraction(5)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"-1.3\overline{45}", Fraction(-74, 55)),
        ("3e5", Fraction(300_000)),
        ("2.5E-3", Fraction(1, 400)),
        ("10^{3}", Fraction(1000)),
        ("-10^3", Fraction(-1000)),
        (r"3\times 10^{-2}", Fraction(3, 100)),
        (r"1.5 \cdot 10^{6}", Fraction(1_500_000)),
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
        (r"45^\circ\text{C}", Quantity(Fraction(45), percent=False, unit="degreesc")),
        ("5cm", Quantity(Fraction(5), percent=False, unit="cm")),
        ("5 m", Quantity(Fraction(5), percent=False, unit="m")),
        (r"5\text{ m}/\text{s}", Quantity(Fraction(5), percent=False, unit="m/s")),
        (r"5\text{ m s}^{-1}", Quantity(Fraction(5), percent=False, unit="ms-1")),
        ("7th", Quantity(Fraction(7), percent=False, unit="th")),
        ("1011_2", Quantity(Fraction(1011), percent=False, unit="base2")),
        ("1011_{2}", Quantity(Fraction(1011), percent=False, unit="base2")),
    ],
)
def test_what_follows_a_number_is_kept(text, expected):
    assert quantity(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "5x", "5m", "2ab", "2 ab", "1/0", "1,23", "12 34", "5 or 6", "5 million"),
        *("3 pi", "half", "2^3", "10^x", "1e9999", "2(3)", "(1,234)", "1/2/3", "--5", "5 cm 6"),
        *(r"\frac{1}{x}", r"\sqrt{2}", "∞", "٣x", "9" * 101),
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


@pytest.mark.slow
@given(st.text(max_size=60), st.text(max_size=60))
@example("x=", "=x")
def test_any_two_texts_are_compared_and_any_text_equals_itself(one, other):
    assert equal(one, other, decide_exactly) in (True, False)
    assert equal(one, one, decide_exactly) is bool(plain(one))


MATRIX = r"\begin{pmatrix} \frac{1}{2} & 2 \\ 3 & 4 \end{pmatrix}"

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
    # Other spellings of a number.
    ("1000", "1 000"),
    ("1000", "1~000"),
    ("1 000 000", "1,000,000"),
    (r"11,\! 111,\! 100", "11111100"),
    ("12345.67", "12 345.67"),
    ("300000", "3 × 10^{5}"),
    ("1000", "10^{3}"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    ("-0.5", r"\frac{1}{-2}"),
    (r"\frac{1}{2}", r"\cfrac{2}{4}"),
    (r"\frac{10}{5}", "4/2"),
    ("5", "5m"),
    ("0.75", "3:4"),
    ("0.5", r"{1 \over 2}"),
    ("5", r"$\boxed{5}$"),
    ("1011", "1011_2"),
    ("1011_{2}", "1011"),
    ("5", r"\{5\}"),
    (r"\{5\}", "5"),
    # A number with a name, or at the end of a calculation.
    ("5", "AB = 5"),
    ("5", "5 = x"),
    ("5", "x_1=5"),
    ("5", "f(2)=5"),
    (r"\frac{1}{2}", r"P(X=2)=\frac{1}{2}"),
    ("30", r"\angle ABC = 30^\circ"),
    ("444", "12*37 = 444"),
    ("x=444", "x = 12*37 = 444"),
    ("5", r"x \approx 5"),
    (r"9\pi", r"A = 9\pi \approx 28.27"),
    ("18", "$18 per day"),
    ("18", "18 pieces of cake"),
    ("18", "18 cm²"),
    ("18", r"18\text{ m}/\text{s}"),
    ("125", r"125\textnormal{ miles}"),
    ("5", r"x\in\{5\}"),
    # Other spellings of a formula.
    (r"9\pi", "9 pi"),
    (r"9\pi", "9π"),
    (r"\frac{\pi}{2}", r"\frac{pi}{2}"),
    (r"2\sqrt{3}", "2 sqrt(3)"),
    (r"2\sqrt{3}", "2√(3)"),
    ("2ab", "2 ab"),
    ("y=2x+3", "2x+3=y"),
    ("2x+3=y", "y=2x+3"),
    ("2x+3", "2x+3=y"),
    ("y=x", "x=y"),
    ("y=2x+3", "f(x)=2x+3"),
    ("2x+3", "f^{-1}(x) = 2x+3"),
    (r"\mathbb{R}", r"\mathbb R"),
    (r"\emptyset", r"\varnothing"),
    # Several values.
    (r"\pm 3", "3, -3"),
    ("3,-3", r"x=\pm 3"),
    (r"1\pm\sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}"),
    (r"\pm 1, \pm 2", "2,1,-1,-2"),
    (r"(-\infty,-2)\cup(2,\infty)", r"x<-2 \text{ or } x>2"),
    (MATRIX, r"\begin{bmatrix}0.5&2\\3&4\end{bmatrix}"),
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
    ("5", "5x"),
    ("red", "red car"),
    (r"\text{red}", r"\text{red} \text{ car}"),
    ("5", "2(3)"),
    ("23", "2(3)"),
    ("1000", "10^{4}"),
    ("2:30", "4:60"),
    ("1234", "12 34"),
    ("1011_2", "1011_3"),
    ("x=5", "2x=5"),
    ("y=5", "5=x"),
    ("y=x", "y=z"),
    ("5", "a=2, b=5"),
    ("5", "x <= 5"),
    ("5", r"x \ne 5"),
    (r"\pm 3", "3"),
    ("3", r"\pm 3"),
    ("(1,234)", "1234"),
    (MATRIX, r"\begin{pmatrix}\frac12&3\\2&4\end{pmatrix}"),
    (MATRIX, r"\begin{pmatrix}\frac12\\2\\3\\4\end{pmatrix}"),
]

# A true answer, and an equal answer that leaves part of the calculation undone.
UNFINISHED = [
    # The true answer is a number.
    ("444", "12*37"),
    ("444", r"12\cdot 37"),
    ("444", "12 × 37"),
    ("444", "(12)(37)"),
    ("444", "x = 12*37"),
    ("444 apples", r"12\times 37\text{ apples}"),
    ("5", "2+3"),
    ("-5", "3-8"),
    ("4", "4=2^2"),
    (r"\frac{3}{4}", r"\frac{1}{2}+\frac{1}{4}"),
    (r"\frac{3}{4}", r"\frac{1}{2} \div \frac{2}{3}"),
    ("12", "144/12"),
    ("12", r"\frac{144}{12}"),
    ("12", "144:12"),
    (r"50\%", r"\frac{100}{2}\%"),
    ("12", r"144 \div 12"),
    ("5050", r"\sum_{k=1}^{100} k"),
    ("120", r"\prod_{k=1}^{5} k"),
    (r"\frac13", r"\int_0^1 x^2 dx"),
    ("1", r"\lim_{x\to 0}\frac{\sin x}{x}"),
    ("6", r"\gcd(12,18)"),
    ("6", "gcd(12, 18)"),
    ("36", r"\operatorname{lcm}(12,18)"),
    ("2", r"17 \bmod 5"),
    ("10", r"\binom{5}{2}"),
    ("120", "5!"),
    ("1024", "2^{10}"),
    ("1024", "2^10"),
    ("4", r"\sqrt{16}"),
    ("3", r"\sqrt[3]{27}"),
    ("3", r"\log_2 8"),
    ("0.5", r"\sin 30^\circ"),
    ("-1", "i^2"),
    ("5", "|-5|"),
    ("5", r"\lfloor 5.2 \rfloor"),
    ("5", r"\max(3,5)"),
    ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    # A part of the true answer is a number.
    ("3,-3", r"\sqrt{9},-\sqrt{9}"),
    ("3,-3", r"\pm\sqrt{9}"),
    ("3,-3", "x^2=9"),
    (r"\{1,2\}", r"\{1,1+1\}"),
    ("(2,3)", "(1+1,3)"),
    ("(2,3)", "(1,1)+(1,2)"),
    ("[0,2]", "[0,1+1]"),
    ("x > 2", "x > 1+1"),
    (r"(-\infty,-2)\cup(2,\infty)", "|x|>2"),
    (MATRIX, r"\begin{pmatrix} 0.5 & 1+1 \\ 3 & 4 \end{pmatrix}"),
    (MATRIX, r"\begin{pmatrix}0&1\\1&2\end{pmatrix}+\begin{pmatrix}0.5&1\\2&2\end{pmatrix}"),
    (MATRIX, r"\begin{pmatrix}0.5&1\\3&2\end{pmatrix}\begin{pmatrix}1&0\\0&2\end{pmatrix}"),
    # The true answer is a formula.
    (r"9\pi", r"4\pi+5\pi"),
    (r"9\pi", r"12\pi - 3\pi"),
    (r"9\pi", r"\pi\cdot 3^2"),
    (r"12\pi", r"3\cdot 4\pi"),
    (r"8\sqrt{2}", r"3\sqrt{2}+5\sqrt{2}"),
    (r"\sqrt{3}", r"\tan 60^\circ"),
    (r"\frac{\pi}{6}", r"\arcsin\frac{1}{2}"),
    (r"\frac{\pi^2}{6}", r"\sum_{n=1}^\infty \frac{1}{n^2}"),
    (r"\pi", r"\int_0^1 \frac{4}{1+x^2} dx"),
    (r"120\pi", r"\binom{10}{3}\pi"),
    (r"120\pi", r"5!\pi"),
    ("2^{10}", r"\sum_{k=0}^{10} \binom{10}{k}"),
    ("6x", "2x+4x"),
    ("6x", r"2\cdot 3x"),
    ("2x", r"\frac{d}{dx} x^2"),
    (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k"),
]


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_equal_without_a_library(truth, answer):
    assert equal(answer, truth, decide_exactly)
    assert asked(answer, truth) == []


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_different_without_a_library(truth, answer):
    assert not equal(answer, truth, lambda *_: True) or asked(answer, truth)
    assert not equal(answer, truth, decide_exactly)


@pytest.mark.parametrize(("truth", "answer"), UNFINISHED)
def test_an_answer_that_is_still_to_be_worked_out_is_wrong_whatever_a_library_says(truth, answer):
    assert equal(truth, truth, decide_exactly)
    assert not equal(answer, truth, lambda *_: True)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"9\pi", r"\frac{18\pi}{2}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"\sqrt{2}", "2^{1/2}"),
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"1-\sqrt{2}", r"\frac{-1}{1+\sqrt{2}}"),
        ("2^{100}", r"2\cdot 2^{99}"),
        (r"\binom{10}{3}", r"\frac{10!}{3!7!}"),
        ("10!", "3628800"),
        (r"\sin 75^\circ", r"\frac{\sqrt{6}+\sqrt{2}}{4}"),
        (r"\arctan 2", r"\tan^{-1} 2"),
        ("2^{n+1}", r"2\cdot 2^n"),
        ("x^{n+1}", r"x\cdot x^n"),
        ("-2x", r"x \cdot (-2)"),
        ("x^2+2x+1", "(x+1)^2"),
        ("x+2y=3", "x+2y-3=0"),
        (r"\frac{d}{2}", r"\frac{1}{2}d"),
        (r"0.5d", r"\frac{d}{2}"),
        (r"\mathbb{R}", r"(-\infty,\infty)"),
        (MATRIX, r"\frac{1}{2}\begin{pmatrix}1&4\\6&8\end{pmatrix}"),
    ],
)
def test_a_formula_that_leaves_no_more_to_do_than_the_truth_is_for_the_library(truth, answer):
    assert len(asked(answer, truth)) == 1


@pytest.mark.parametrize(
    ("truth", "answer", "left"),
    [
        (r"2\sqrt{2}", r"$\sqrt{8}$", [(r"\sqrt{8}", r"2\sqrt{2}")]),
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
    assert equal("y" * 2000, "y" * 2000, decide_exactly)  # the true answer has the same length


@pytest.mark.slow
@given(st.text(alphabet="01x,(){}[]=%\\ ∪", max_size=12))
@example("")
def test_any_text_stands_for_a_text_when_votes_are_counted(answer):
    assert isinstance(canonical(answer), str)
