"""The shipped environments, and the validation of environments, on hand-made examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.environments import Turn, as_text, as_turn
from grpo_trainable.environments.calculator import Calculator, calculate
from grpo_trainable.environments.environment import add_info, mean_info
from grpo_trainable.environments.guess import Guess
from grpo_trainable.tasks.prompts import build_task


def test_a_guess_is_told_whether_the_number_is_larger():
    game = Guess()
    assert game.reset({"secret": 6}) == "Guess 0-9\n"
    assert game.step("3\n") == Turn("larger\n", info={"guesses": 1, "illegal": 0})
    assert game.step("8\n").text == "smaller\n"
    last = game.step("6\n")
    assert (last.reward, last.done) == (1.0, True)


# "²".isdigit() is True
@pytest.mark.parametrize("action", ["\n", "12\n", "six\n", "²\n"])
def test_what_is_no_guess_loses(action: str):
    game = Guess()
    game.reset({"secret": 6})
    turn = game.step(action)
    assert (turn.reward, turn.done, turn.info["illegal"]) == (0.0, True, 1)


def test_the_third_guess_is_the_last():
    game = Guess()
    game.reset({"secret": 6})
    assert [game.step(f"{guess}\n").done for guess in (1, 2, 3)] == [False, False, True]


def test_who_halves_what_is_left_wins_seven_of_ten():
    """Three guesses with hints can find at most 1 + 2 + 4 = 7 of ten numbers."""
    won = 0
    for secret in range(10):
        game, low, high = Guess(), 0, 9
        game.reset({"secret": secret})
        while True:
            guess = (low + high) // 2
            turn = game.step(f"{guess}\n")
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.text == "larger\n" else (low, guess - 1)
        won += int(turn.reward)
    assert won == 7


def test_the_calculator_is_called_and_its_result_written_down():
    question = Calculator()
    assert question.reset({"question": "7*8", "answer": 56}) == "7*8=?\n"
    assert question.step("calc 7*8\n") == Turn("=56\n", info={"calls": 1})
    assert question.step("56\n") == Turn(reward=1.0, done=True, info={"calls": 0})
    question.reset({"question": "7*8", "answer": 56})
    assert question.step("55\n") == Turn(reward=0.0, done=True, info={"calls": 0})


def test_calls_without_end_lose():
    question = Calculator()
    question.reset({"question": "7*8", "answer": 56})
    assert [question.step("calc 1\n").done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("expression", "value"), [("7*8", 56), ("-(2 + 3) * 4", -20), ("17 // 5 % 2", 1)]
)
def test_arithmetic(expression: str, value: int):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 ** 9",
        "__import__('os')",
        "1 / 2",
        "1.5 + 1",
        "1 // 0",
        "True + 1",
        "1" * 41,
        "(" * 40,
    ],
)
def test_what_is_no_arithmetic(expression: str):
    with pytest.raises(ValueError, match=r"not arithmetic|too long"):
        calculate(expression)


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("text", "must return a Turn, got str"),
        (Turn(None), "an observation must be text, got NoneType"),  # type: ignore[arg-type]
        (Turn("x" * 1_000_001), "an observation has 1,000,001 characters"),
        (Turn(reward="1"), "reward must be a number, got str"),  # type: ignore[arg-type]
        (Turn(reward=float("inf")), "reward must be a finite float32, got inf"),
        (Turn(reward=1e39), r"reward must be a finite float32, got 1e\+39"),
        (Turn(done=1), "done must be True or False, got int"),  # type: ignore[arg-type]
        (Turn(info=[]), "info must be a dict, got list"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_turn(turn: object, text: str):
    with pytest.raises((TypeError, ValueError), match=text):
        as_turn(turn)


def test_numbers_and_booleans_of_info_are_kept_and_other_values_are_ignored():
    info: dict[Any, Any] = {
        **{"calls": 2, "solved": True, "score": 0.5, 3: 1, "half \ud800": 4},
        **{"numpy": np.float32(0.25), "flag": np.bool_(False), "torch": torch.tensor(6)},
        **{"text": "1", "none": None, "list": [1.0], "nested": {"a": 1.0}, "array": np.ones(1)},
        **{"nan": math.nan, "infinite": math.inf, "large": 10**400, "complex": 1j},
        **{"word": np.str_("1"), "object": object()},
    }
    found = as_turn(Turn(info=info)).info
    assert found == {
        **{"calls": 2.0, "solved": 1.0, "score": 0.5, "3": 1.0, "half ?": 4.0},
        **{"numpy": 0.25, "flag": 0.0, "torch": 6.0},
    }
    assert {type(number) for number in found.values()} == {float}


def test_numbers_of_info_are_summed_over_turns_and_averaged_over_episodes():
    first: dict[str, float] = {}
    for turn in ({"calls": 1.0}, {"calls": 1.0, "solved": 1.0}, {}):
        add_info(first, turn)
    assert first == {"calls": 2.0, "solved": 1.0}
    assert mean_info([first, {"calls": 4.0}, {}, {}]) == {"calls": 1.5, "solved": 0.25}
    assert mean_info([{}, {}]) == {}


def test_half_a_character_becomes_a_question_mark():
    assert as_text("a\ud800b") == "a?b"


@pytest.mark.parametrize(("name", "specs"), [("guess", 10), ("calculator", 64)])
def test_a_pass_over_a_game_takes_every_specification_once(name: str, specs: int):
    config = GRPOConfig.from_dict({"task": {"name": name}})
    assert (config.env.name, config.model.preset) == (name, "games")
    task = build_task(config)
    for epoch in range(2):
        drawn = [task.train_example(epoch * specs + i) for i in range(specs)]
        assert len({str(example.ground_truth) for example in drawn}) == specs
    assert task.eval_examples(3) == task.eval_examples(specs)[:3]
    right = task.eval_examples(1)[0].ground_truth
    assert isinstance(right, dict)
    assert task.reward(f"{right.get('secret', right.get('answer'))}\n", right).reward == 1.0
    assert task.reward("nothing\n", right).reward == 0.0
