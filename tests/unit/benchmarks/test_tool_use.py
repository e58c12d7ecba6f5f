"""The benchmark of tool use, without a model: its problems, transcripts and figures."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from grade_school import Problem
from tool_problems import ProblemCalculator, ToolProblems, different, problem, transcript
from tool_use import measured

from grpo_trainable.environments.calculator import MOST_CHARACTERS, calculate


def test_the_calculation_of_a_problem_gives_its_answer():
    for own in (problem(str(i), held_out=False) for i in range(300)):
        assert own.answer == calculate(own.calculation) > 0
        assert len(own.calculation) <= MOST_CHARACTERS


def test_no_calculation_is_both_trained_on_and_held_out():
    trained = {problem(str(i), held_out=False).calculation for i in range(2000)}
    asked = list(islice(different("eval", held_out=True), 256))
    assert not trained & {own.calculation for own in asked}
    assert len({own.question for own in asked}) == 256


def test_other_seeds_train_on_other_problems_and_evaluate_on_the_same():
    one, other = ToolProblems(0), ToolProblems(1)
    assert one.train_example(3) == ToolProblems(0).train_example(3) != other.train_example(3)
    assert one.eval_examples(5) == other.eval_examples(9)[:5]


def test_a_transcript_is_an_episode_that_earns_the_reward():
    own = Problem("Tom has 12 boxes with 30 books in each. Tom sells 5.", "12*30-5", 355)
    *_, asked, call, result, answer = transcript(own)
    assert [message["content"] for message in (asked, call, result, answer)] == [
        *(own.question, "calc 12*30-5", "=355", "355")
    ]
    environment = ProblemCalculator()
    assert environment.reset({"question": own.question, "answer": own.answer}) == own.question
    assert environment.step(call["content"]).text == f"{result['content']}\n"
    last = environment.step(answer["content"])
    assert (last.reward, last.done) == (1.0, True)


def played(*turns: tuple[str, float | None, str], reward: float, finished: bool = True):
    names = ("action", "reward", "observation")
    told = [dict(zip(names, turn, strict=True)) for turn in turns]
    return {"turns": json.dumps(told), "reward": reward, "finished": finished}


def test_an_evaluation_is_counted_by_hand():
    right = played(("calc 1+1", 0.0, "\nuser\n=2\nassistant\n"), ("2", 1.0, ""), reward=1.0)
    refused = played(
        *[("calc x", 0.0, "\nuser\n=not arithmetic\nassistant\n")] * 2, ("3", 0.0, ""), reward=0.0
    )
    guess = played(("3", 0.0, ""), reward=0.0)
    cut = played(("calc 1+", None, ""), reward=0.0, finished=False)
    found = measured([right, refused, guess, cut])
    assert found == {
        "episodes": 4,
        "success": 0.25,
        "standard_error": pytest.approx(0.25),
        "calls": 0.75,
        "no_call": 0.5,
        "refused_calls": 0.5,
        "cut_off": 0.25,
    }
