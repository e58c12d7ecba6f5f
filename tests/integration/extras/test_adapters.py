"""Unmodified environments of other packages: played by hand, checked, and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import written_by_the_page

from grpo_trainable.adapters.gymnasium_text import gymnasium_environment
from grpo_trainable.adapters.tasks import HELD_OUT, seeded_task
from grpo_trainable.environments import Turn
from launch import check_env

pytest.importorskip("gymnasium")

WAY = ("left", "down", "right", "up")
LAKE = """
from grpo_trainable.adapters.gymnasium_text import gymnasium_environment
from grpo_trainable.adapters.tasks import seeded_task

Lake = gymnasium_environment("FrozenLake-v1", actions=("left", "down", "right", "up"))
Lakes = seeded_task(Lake)
"""


def lake(**options: Any) -> Any:
    return gymnasium_environment("FrozenLake-v1", is_slippery=False, **options)()


def test_the_shortest_way_over_the_ice_earns_one() -> None:
    """Squares are numbered row by row, from 0. 5, 7, 11 and 12 are holes, and 15 is the goal."""
    env = lake(actions=WAY)
    assert env.reset({"seed": 0}) == "0\n"
    heard = [env.step(f"{word}\n") for word in ("down", "down", "right", "right", "down", "right")]
    assert [turn.text for turn in heard] == ["4\n", "8\n", "9\n", "10\n", "14\n", "15\n"]
    assert [turn.reward for turn in heard] == [0, 0, 0, 0, 0, 1]
    assert [turn.done for turn in heard] == [False] * 5 + [True]
    env.close()


def test_what_is_no_action_changes_nothing() -> None:
    env = lake()
    env.reset({"seed": 0})
    assert env.step("down\n") == Turn("not an action\n", info={"illegal": 1})
    # FrozenLake reports the probability of the transition as `prob`.
    assert env.step("1\n") == Turn("4\n", info={"prob": 1.0, "illegal": 0})


def test_observations_may_be_described() -> None:
    assert lake(describe=lambda field: f"field {field}?").reset({"seed": 0}) == "field 0?\n"


def test_actions_of_many_numbers_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^Pendulum-v1: the action space Box.*neither discrete nor"
    ):
        gymnasium_environment("Pendulum-v1")()


def test_seeds_that_are_held_out_are_none_that_are_trained_on() -> None:
    task = seeded_task(lambda: lake(describe=str))(7)
    assert task.train_example(3).ground_truth == {"seed": 3}
    assert [e.ground_truth for e in task.eval_examples(2)] == [
        {"seed": HELD_OUT},
        {"seed": HELD_OUT + 1},
    ]


def test_a_slippery_lake_is_sound_and_trained_on(
    tmp_path: Path, trainable: Any, capsys: Any
) -> None:
    """Each environment slips at random, with its own generator. The specification sets the seed."""
    path = tmp_path / "lake.py"
    path.write_text(LAKE)
    words = [word for action in WAY for word in ("--action", action)]
    assert check_env.main([f"{path}:Lake", "--task", f"{path}:Lakes", *words]) == 0
    assert "found nothing" in capsys.readouterr().out
    rows = two_rounds(trainable, f"{path}:Lakes", f"{path}:Lake", 40)
    assert all(row["response/turns_mean"] >= 1 for row in rows)


def test_what_was_written_for_trl_is_sound_and_trained_on(
    tmp_path: Path, trainable: Any, capsys: Any
) -> None:
    """`Counting` is from docs/howto/env.md. The unit tests check its calls and rewards."""
    path = written_by_the_page("env.md", "counter.py", tmp_path)
    actions = ("add(step=1)", "add(step=3)", "add('a')", "done")
    words = [word for action in actions for word in ("--action", action)]
    assert check_env.main([f"{path}:Counting", "--task", f"{path}:Counts", *words]) == 0
    assert "found nothing" in capsys.readouterr().out
    two_rounds(trainable, f"{path}:Counts", f"{path}:Counting", 40, preset="tiny")


def two_rounds(
    trainable: Any, task: str, environment: str, tokens: int, preset: str = "games"
) -> list[dict[str, Any]]:
    """Run a trial of two rounds in which all groups are trained on, and return its rows."""
    running = trainable(
        {
            "task": {"name": task},
            "env": {"name": environment},
            "model": {"preset": preset},
            "rollout": {"prompts": 2, "group_size": 2, "max_new_tokens": tokens},
            "eval": {"prompts": 2, "samples": 1},
            "rounds": 2,
        }
    )
    rows = [running.step() for _ in range(2)]
    assert [row["count/trained"] for row in rows] == [2, 4]
    assert [row["count/dropped_reward"] for row in rows] == [0, 0]
    return rows
