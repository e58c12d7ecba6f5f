"""Word problems: each reads as English, its calculation is right, and none crosses the split."""

from __future__ import annotations

import functools
import re
from collections import Counter
from itertools import islice
from random import Random

import pytest

from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.pretraining import problems
from grpo_trainable.pretraining.arithmetic_corpus import (
    CLOSINGS,
    held_out_problems,
    solution,
    train_problems,
)
from grpo_trainable.pretraining.arithmetic_measures import LIMITS
from grpo_trainable.pretraining.problems import (
    HELD_OUT_SHARE,
    SCENES,
    Problem,
    ProblemWriter,
    read_scenes,
)
from grpo_trainable.pretraining.recipe import ArithmeticRecipe
from grpo_trainable.pretraining.stories import BOYS, GIRLS
from grpo_trainable.tasks import r1_zero_reward_fn
from grpo_trainable.tasks.templates import SHORT, prompt_of

LARGEST = 60
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")


def writer(seed: int = 0, largest: int = LARGEST, operations: int = 3) -> ProblemWriter:
    return ProblemWriter(Random(seed), largest=largest, most_operations=operations)


@functools.cache
def written(*, held_out: bool, count: int = 3000) -> list[Problem]:
    return list(islice(writer().problems(held_out=held_out), count))


def test_the_same_seed_writes_the_same_problems():
    again = list(islice(writer().problems(held_out=False), 100))
    assert again == written(held_out=False)[:100]
    assert again != list(islice(writer(1).problems(held_out=False), 100))


def test_a_scene_is_told_with_its_calculation(monkeypatch: pytest.MonkeyPatch):
    """12 apples, which is 3 bags of 4, and so on: by hand, from a scene with one way to be told."""
    text = "fruit: pears\n=* {Name} has {m} bags of {n} {fruit}.\n- {He} eats {n}.\n? How many?"
    monkeypatch.setattr(problems, "SCENES", read_scenes(text))
    for operations in (1, 2):
        problem = next(writer(largest=12, operations=operations).problems(held_out=False))
        name, m, n, pronoun, eaten = re.fullmatch(
            r"(\w+) has (\d) bags of (\d) pears\.(?: (He|She) eats (\d+)\.)? How many\?",
            problem.question,
        ).groups()  # type: ignore[union-attr]
        held = int(m) * int(n)
        steps = [f"{m} * {n} = {held}."]
        if problem.operations == 2:
            assert pronoun == ("She" if name in GIRLS else "He")
            steps.append(f"{held} - {eaten} = {held - int(eaten)}.")
        assert problem.calculation == " ".join(steps)
        assert problem.answer == steps[-1].split()[-1][:-1]


def test_every_step_is_right_and_goes_on_from_the_one_before():
    compute = {
        "+": int.__add__,
        "-": int.__sub__,
        "*": int.__mul__,
        "/": lambda a, b: a // b if a % b == 0 else -1,
    }
    for problem in written(held_out=False):
        steps = STEP.findall(problem.calculation)
        assert " ".join(f"{a} {s} {b} = {c}." for a, s, b, c in steps) == problem.calculation
        assert len(steps) == problem.operations
        for a, sign, b, c in steps:
            assert compute[sign](int(a), int(b)) == int(c), problem
            assert 1 <= int(c) <= LARGEST
        for before, after in zip(steps, steps[1:], strict=False):
            assert before[3] == after[0]
        assert problem.answer == steps[-1][3]


def test_the_question_gives_the_numbers_in_the_order_of_the_calculation():
    for problem in written(held_out=False):
        steps = STEP.findall(problem.calculation)
        used = [steps[0][0], *(b for _, _, b, _ in steps)]
        assert re.findall(r"\d+", problem.question) == used, problem


def test_questions_are_sentences():
    for problem in written(held_out=False):
        text = problem.question
        assert re.fullmatch(r"([A-Z][a-z0-9', A-Z]+[.?] ?)+", text), text
        assert text.endswith("?")
        assert text.count("?") == 1
        assert "  " not in text


def test_a_person_keeps_one_pronoun():
    for problem in written(held_out=False):
        words = set(re.findall(r"\w+", problem.question.lower()))
        assert not (words & {"he", "him", "his"} and words & {"she", "her"}), problem


def test_one_two_and_three_operations_are_equally_frequent():
    counts = Counter(problem.operations for problem in written(held_out=False))
    assert set(counts) == {1, 2, 3}
    assert all(count == pytest.approx(1000, abs=100) for count in counts.values())


def test_every_sentence_of_every_scene_is_told():
    told = " ".join(problem.question for problem in written(held_out=False))
    for scene in SCENES:
        for line in (*scene.starts, *scene.changes, *scene.questions):
            pattern = re.sub(r"\\{\w+\\}", r"\\w+", re.escape(line.text))
            assert re.search(pattern, told), line


def test_every_field_of_a_scene_has_words():
    people = {"name", "friend", "he", "him", "his", "m", "n"}
    for scene in SCENES:
        for line in (*scene.starts, *scene.changes, *scene.questions):
            for field in re.findall(r"\{(\w+)\}", line.text):
                assert field.lower() in people | set(scene.words), line
    assert {*GIRLS, *BOYS}.isdisjoint(word for s in SCENES for ws in s.words.values() for word in ws)


def test_no_calculation_is_on_both_sides():
    train, held_out = written(held_out=False), written(held_out=True)
    assert {p.calculation for p in train}.isdisjoint(p.calculation for p in held_out)
    assert {p.question for p in train}.isdisjoint(p.question for p in held_out)
    assert all(p.is_held_out for p in held_out)
    assert not any(p.is_held_out for p in train)


def test_a_tenth_of_the_calculations_is_held_out():
    drawn = {f"{a} + {b} = {a + b}." for a in range(2, 60) for b in range(2, 60)}
    share = sum(Problem("", text, "").is_held_out for text in drawn) / len(drawn)
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.02)


def test_which_side_a_calculation_is_on_never_changes():
    """The shipped policy was trained on one side of this very split."""
    sides = [Problem("", f"{n} + 5 = {n + 5}.", "").is_held_out for n in range(2, 60)]
    assert [n for n, held_out in zip(range(2, 60), sides, strict=True) if held_out] == HELD_OUT_SUMS


HELD_OUT_SUMS: list[int] = []  # n of n + 5


def test_the_problems_that_grpo_asks_are_distinct():
    recipe = ArithmeticRecipe(largest=LARGEST, operations=2)
    train, held_out = train_problems(recipe), held_out_problems(recipe)
    assert len({p.question for p in train}) == len(train) == 4096
    assert len({p.question for p in held_out}) == len(held_out) >= 512
    assert {p.calculation for p in train}.isdisjoint(p.calculation for p in held_out)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_format_share_is_the_share_of_solutions_that_are_rewarded(share: float):
    rng = Random(0)
    scores = [
        r1_zero_reward_fn(solution(problem, rng, share), problem.answer)
        for problem in written(held_out=False)
    ]
    for kind in ("format_reward", "answer_reward", "reward"):
        mean = sum(score[kind] for score in scores) / len(scores)
        assert mean == pytest.approx(share, abs=0.04 if share == 0.6 else 0)


def test_no_other_closing_is_in_the_right_format():
    for closing in CLOSINGS:
        score = r1_zero_reward_fn(" 3 + 4 = 7." + closing.format(answer="7"), "7")
        assert score["format_reward"] == 0.0, closing


def test_digits_are_tokens_and_a_solution_fits_the_limit():
    rng = Random(0)
    told = [(prompt_of(SHORT, p.question), p) for p in written(held_out=False)]
    texts = [prompt + solution(p, rng, 0.7) for prompt, p in told]
    tokenizer = Tokenizer.train(texts, 1024, digits_alone=True)
    for prompt, problem in told[:500]:
        for text in (prompt, solution(problem, rng, 0.7)):
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert "".join(pieces) == text
            assert not any(re.search(r"\d.|.\d", piece) for piece in pieces)
        longest = solution(problem, rng, 0.0)
        assert len(tokenizer.encode(longest)) < LIMITS.max_new_tokens
