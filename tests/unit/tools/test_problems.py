"""Word problems: their English, their calculations, and the split."""

from __future__ import annotations

import functools
import re
from collections import Counter
from itertools import islice, pairwise
from random import Random

import pytest

from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.tasks import r1_zero_reward_fn
from grpo_trainable.tasks.templates import SHORT, prompt_of
from grpo_trainable.tools.pretraining import problems
from grpo_trainable.tools.pretraining.arithmetic_corpus import (
    LIMITS,
    OTHER_CLOSINGS,
    SLIPS,
    careless,
    held_out_problems,
    solution,
    train_problems,
)
from grpo_trainable.tools.pretraining.problems import (
    HELD_OUT_SHARE,
    SCENES,
    Problem,
    ProblemWriter,
    Step,
    read_scenes,
    written,
)
from grpo_trainable.tools.pretraining.recipe import ArithmeticRecipe
from grpo_trainable.tools.pretraining.stories import BOYS, GIRLS

LARGEST = 60


def writer(seed: int = 0, largest: int = LARGEST, operations: int = 3) -> ProblemWriter:
    return ProblemWriter(Random(seed), largest=largest, most_operations=operations)


@functools.cache
def drawn(*, held_out: bool, count: int = 3000) -> list[Problem]:
    return list(islice(writer().problems(held_out=held_out), count))


@pytest.mark.slow
def test_the_same_seed_writes_the_same_problems():
    again = list(islice(writer().problems(held_out=False), 100))
    assert again == drawn(held_out=False)[:100]
    assert again != list(islice(writer(1).problems(held_out=False), 100))


def test_a_scene_is_told_with_its_calculation(monkeypatch: pytest.MonkeyPatch):
    """Check a scene with a single wording by hand: 12 pears are 3 bags of 4, and so on."""
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
        if len(problem.steps) == 2:
            assert pronoun == ("She" if name in GIRLS else "He")
            steps.append(f"{held} - {eaten} = {held - int(eaten)}.")
        assert written(problem.steps) == " ".join(steps)
        assert problem.answer == steps[-1].split()[-1][:-1]


def is_true(step: Step) -> bool:
    right = {
        "+": step.left + step.right,
        "-": step.left - step.right,
        "*": step.left * step.right,
        "/": step.left / step.right,
    }
    return right[step.sign] == step.result


@pytest.mark.slow
def test_every_step_is_true_and_goes_on_from_the_one_before():
    for problem in drawn(held_out=False):
        assert all(map(is_true, problem.steps)), problem
        assert all(1 <= step.result <= LARGEST for step in problem.steps)
        assert all(one.result == next_.left for one, next_ in pairwise(problem.steps))
        assert problem.answer == str(problem.steps[-1].result)


def test_a_calculation_is_written_step_by_step():
    assert written([Step.of(12, "-", 5), Step.of(7, "*", 2)]) == "12 - 5 = 7. 7 * 2 = 14."


@pytest.mark.slow
def test_the_question_gives_the_numbers_in_the_order_of_the_calculation():
    for problem in drawn(held_out=False):
        used = [problem.steps[0].left, *(step.right for step in problem.steps)]
        assert re.findall(r"\d+", problem.question) == [str(n) for n in used], problem


def test_questions_are_sentences():
    for problem in drawn(held_out=False):
        text = problem.question
        assert re.fullmatch(r"([A-Z][a-z0-9', A-Z]+[.?] ?)+", text), text
        assert text.endswith("?")
        assert text.count("?") == 1
        assert "  " not in text


def test_a_person_keeps_one_pronoun():
    for problem in drawn(held_out=False):
        words = set(re.findall(r"\w+", problem.question.lower()))
        assert not (words & {"he", "him", "his"} and words & {"she", "her"}), problem


def test_one_two_and_three_operations_are_equally_frequent():
    counts = Counter(len(problem.steps) for problem in drawn(held_out=False))
    assert set(counts) == {1, 2, 3}
    assert all(count == pytest.approx(1000, abs=100) for count in counts.values())


def test_every_sentence_of_every_scene_is_told():
    told = " ".join(problem.question for problem in drawn(held_out=False))
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
    assert {*GIRLS, *BOYS}.isdisjoint(
        word for s in SCENES for ws in s.words.values() for word in ws
    )


@pytest.mark.slow
def test_no_calculation_is_on_both_sides():
    train, held_out = drawn(held_out=False), drawn(held_out=True)
    assert {p.steps for p in train}.isdisjoint(p.steps for p in held_out)
    assert {p.question for p in train}.isdisjoint(p.question for p in held_out)
    assert all(p.is_held_out for p in held_out)
    assert not any(p.is_held_out for p in train)


def sums(right: int) -> list[Problem]:
    return [Problem("", (Step.of(left, "+", right),)) for left in range(2, 60)]


def test_a_tenth_of_the_calculations_is_held_out():
    problems = [problem for right in range(2, 60) for problem in sums(right)]
    share = sum(problem.is_held_out for problem in problems) / len(problems)
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.02)


def test_which_side_a_calculation_is_on_never_changes():
    """The shipped policy was trained on one side of this split."""
    assert [p.steps[0].left for p in sums(5) if p.is_held_out] == HELD_OUT_SUMS


HELD_OUT_SUMS = [9, 15, 23, 37, 53]  # n of the held-out sums n + 5


@pytest.mark.slow
def test_the_problems_that_grpo_asks_are_distinct():
    recipe = ArithmeticRecipe(largest=LARGEST, operations=2)
    train, held_out = train_problems(recipe), held_out_problems(recipe)
    assert len({p.question for p in train}) == len(train) == 4096
    assert len({p.question for p in held_out}) == len(held_out) >= 512
    assert {p.steps for p in train}.isdisjoint(p.steps for p in held_out)


def rewards(careful_share: float, format_share: float) -> dict[str, float]:
    """Return the mean rewards of many solutions."""
    rng = Random(0)
    scores = [
        r1_zero_reward_fn(solution(problem, rng, careful_share, format_share), problem.answer)
        for problem in drawn(held_out=False)
    ]
    return {kind: sum(score[kind] for score in scores) / len(scores) for kind in scores[0]}


@pytest.mark.slow
def test_the_front_of_the_corpus_earns_every_reward():
    assert rewards(1.0, 1.0) == {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}


@pytest.mark.slow
def test_shares_are_those_of_solutions_that_are_rewarded():
    mean = rewards(0.6, 0.7)
    assert mean["format_reward"] == pytest.approx(0.7, abs=0.03)
    assert mean["reward"] == mean["answer_reward"] == pytest.approx(0.6 * 0.7, abs=0.03)
    assert rewards(0.0, 1.0) == {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
    assert rewards(1.0, 0.0) == {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


def test_no_other_closing_is_in_the_right_format():
    for closing in OTHER_CLOSINGS:
        score = r1_zero_reward_fn(" 3 + 4 = 7." + closing.format(answer="7"), "7")
        assert score["format_reward"] == 0.0, closing


def test_a_careless_calculation_has_one_step_that_is_off():
    rng = Random(0)
    for problem in drawn(held_out=False):
        steps = careless(problem.steps, rng)
        (slip,) = (step for step in steps if not is_true(step))
        assert slip.result - Step.of(slip.left, slip.sign, slip.right).result in SLIPS
        assert [(s.sign, s.right) for s in steps] == [(s.sign, s.right) for s in problem.steps]
        assert all(one.result == next_.left for one, next_ in pairwise(steps))
        assert min(step.result for step in steps) >= 1


def test_length_tells_neither_carelessness_nor_format():
    """Mean numbers of characters in a solution agree within 5 %."""

    def length(careful_share: float, format_share: float) -> float:
        rng = Random(0)
        texts = [solution(p, rng, careful_share, format_share) for p in drawn(held_out=False)]
        return sum(map(len, texts)) / len(texts)

    assert length(0.0, 1.0) == pytest.approx(length(1.0, 1.0), rel=0.05)


@pytest.mark.slow
def test_digits_are_tokens_and_a_solution_fits_the_limit():
    rng = Random(0)
    told = [
        (prompt_of(SHORT, p.question), solution(p, rng, 0.5, 0.5)) for p in drawn(held_out=False)
    ]
    tokenizer = Tokenizer.train([prompt + text for prompt, text in told], 1024, digits_alone=True)
    for prompt, response in told[:500]:
        for text in (prompt, response):
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert "".join(pieces) == text
            assert not any(re.search(r"\d.|.\d", piece) for piece in pieces)
        assert len(tokenizer.encode(response)) < LIMITS.max_new_tokens
