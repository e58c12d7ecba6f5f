"""An unmodified environment of SkyRL-Gym: played by hand, checked, and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounds import assert_trained

from grpo_trainable.adapters.skyrl_gym import skyrl_gym_environment
from grpo_trainable.environments import Turn

pytest.importorskip("skyrl_gym", reason="SkyRL-Gym is not installed: make test-adapters")

GAME = """
from grpo_trainable.adapters.tasks import listed_task
from grpo_trainable.adapters.skyrl_gym import skyrl_gym_environment

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{a} + 3 = ?"}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"ground_truth": str(a + 3)},
        "max_turns": 3,
    }
    for a in range(4)
]
Game = skyrl_gym_environment("gsm8k_multi_turn")
Games = listed_task(Game, ROWS, stop=("\\n", " ", "e"))
"""
ROW = {
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3 = ?\n"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"ground_truth": "5"},
    "max_turns": 3,
}


def test_a_wrong_answer_of_the_right_form_earns_its_share() -> None:
    """With three turns, a wrong answer in the right form earns 0.2 / 3. A right answer earns 1."""
    env = skyrl_gym_environment("gsm8k_multi_turn")()
    assert env.reset(ROW) == "Add.\n2 + 3 = ?\n"
    heard = [env.step(action) for action in ("It is #### 6\n", "perhaps 5\n", "#### 5\n")]
    assert [turn.reward for turn in heard] == [pytest.approx(0.2 / 3), 0, 1]
    assert [turn.done for turn in heard] == [False, False, True]
    assert heard[0].text.startswith("Please provide your step-by-step reasoning")
    assert heard[1].text.startswith("Now provide only the final numeric answer")
    assert heard[2].info == {"steps": 3}


def test_one_environment_after_the_other() -> None:
    env = skyrl_gym_environment("gsm8k_multi_turn")()
    env.reset(ROW)
    env.step("no\n")
    env.reset(ROW)
    assert env.step("#### 5\n") == Turn("\n", 1.0, True, {"steps": 1})
    assert env.reset({**ROW, "prompt": "2 + 3 = ?"}) == "2 + 3 = ?\n"
    env.close()


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^SkyRL-Gym has no environment gsm9k; valid: aime, gsm8k,"
    ):
        skyrl_gym_environment("gsm9k")


def test_an_environment_is_sound_and_trained_on(tmp_path: Path, is_sound, train) -> None:
    path = tmp_path / "game.py"
    path.write_text(GAME)
    assert is_sound(path, "#### 3", "#### 5", "three")
    assert_trained(train(path))
