"""An unmodified game of TextArena: played by hand, checked, and trained on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rounds import assert_trained

from grpo_trainable.adapters.textarena import textarena_environment

pytest.importorskip("textarena", reason="TextArena is not installed: make test-adapters")

GAME = """
from grpo_trainable.adapters.tasks import seeded_task
from grpo_trainable.adapters.textarena import textarena_environment

Game = textarena_environment("GuessTheNumber-v0")
Games = seeded_task(Game, stop=("\\n", " ", "e"))
"""


def test_the_hints_lead_to_the_number() -> None:
    """With seed 7, the game draws the number 11 from the numbers 1 to 20."""
    assert random.Random(7).randint(1, 20) == 11
    game = textarena_environment("GuessTheNumber-v0")()
    prompt = game.reset({"seed": 7})
    assert "guess the number between 1 and 20 within 10 turns" in prompt
    assert prompt.endswith("Enter your guess.\n")
    guesses = ("[15]\n", "[3]\n", "it is [11]\n")
    heard = [game.step(guess) for guess in guesses]
    hints = ["The target number is lower.\n", "The target number is higher.\n", ""]
    assert [turn.text for turn in heard] == hints
    assert [turn.reward for turn in heard] == [0, 0, 1]
    assert [turn.done for turn in heard] == [False, False, True]


def test_two_invalid_moves_lose_and_count() -> None:
    """The last valid guess, 15, is 4 away from 11. The reward divides this distance by 20 - 1."""
    game = textarena_environment("GuessTheNumber-v0")()
    game.reset({"seed": 7})
    game.step("[15]\n")
    assert game.step("eleven\n").text.startswith("You attempted an invalid move.")
    end = game.step("[21]\n")
    assert end.done
    assert end.reward == pytest.approx(1 - 4 / 19)
    assert end.info == {"invalid": 1}


def test_games_that_are_played_in_turn_do_not_disturb_each_other() -> None:
    """During a game, Blackjack draws cards from Python's global random generator."""
    hands = [textarena_environment("Blackjack-v0")() for _ in range(3)]
    first = [hand.reset({"seed": 3}) for hand in hands]
    assert len(set(first)) == 1
    for _ in range(4):
        assert len({hand.step("[hit]\n").text for hand in hands}) == 1


def test_an_unknown_game_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^TextArena has no game Chess-v9$"):
        textarena_environment("Chess-v9")


def test_a_game_is_sound_and_trained_on(tmp_path: Path, is_sound, train) -> None:
    path = tmp_path / "game.py"
    path.write_text(GAME)
    assert is_sound(path, "[3]", "[10]", "[15]", "ten")
    assert_trained(train(path))
