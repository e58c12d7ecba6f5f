"""Unmodified environments of verifiers: played by hand, checked, and trained on.

The taskset `openenv`, which is part of verifiers, plays an environment on a server of OpenEnv.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rounds import assert_trained

from grpo_trainable.adapters.verifiers import verifiers_environment
from grpo_trainable.environments import Turn

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-adapters")

GAME = """
import openenv.core  # imported while the process starts, so that no answer waits for it

from grpo_trainable.adapters.tasks import listed_task
from grpo_trainable.adapters.verifiers import verifiers_environment

Game = verifiers_environment(
    taskset={{"id": "openenv", "base_url": "{url}", "resets": [{{"seed": 1}}, {{"seed": 2}}]}},
    player={{"max_turns": 3}},
)
Games = listed_task(Game, [{{"idx": 0}}, {{"idx": 1}}], stop=("\\n", " ", "e"))
"""


def test_a_single_reply_is_scored_by_its_task() -> None:
    env = verifiers_environment(taskset={"id": "sums_taskset"})()
    assert env.reset({"idx": 2}) == "Add.\n2 + 9 = ?\n"
    assert env.step("11\n") == Turn(reward=2.0, done=True, info={"half": 1.0})
    assert env.reset({"idx": 0}) == "Add.\n0 + 9 = ?\n"
    assert env.step("11\n") == Turn(reward=0.0, done=True, info={"half": 1.0})
    env.close()


@pytest.mark.parametrize("index", [3, -1])
def test_a_task_that_is_not_there_is_named(index: int) -> None:
    env = verifiers_environment(taskset={"id": "sums_taskset"})()
    env.reset({"idx": 2})
    with pytest.raises(ValueError, match=rf"^idx={index}: the taskset has 3 tasks$"):
        env.reset({"idx": index})


def test_what_only_a_harness_has_is_refused() -> None:
    env = verifiers_environment(taskset={"id": "stopping_taskset"})()
    with pytest.raises(
        ValueError, match=r"^StoppingTask uses features that are not .* here: @stop$"
    ):
        env.reset({"idx": 0})


def test_a_second_agent_is_refused() -> None:
    env = verifiers_environment(id="user-sim", taskset={"id": "sums_taskset"})()
    with pytest.raises(ValueError, match=r"^an episode must be a single conversation, in which "):
        env.reset({"idx": 0})


def test_the_rewards_of_all_turns_come_with_the_last(echo_server: str) -> None:
    """Each character of an action earns 0.1: 0.5 for `hello`, 0.2 for `hi`, 1 for `ten signs!`."""
    env = verifiers_environment(
        taskset={"id": "openenv", "base_url": echo_server, "resets": [{"seed": 1}]},
        player={"max_turns": 3},
    )()
    said = json.loads(env.reset({"idx": 0}))
    assert said["observation"]["echoed_message"] == "Echo Game environment ready!"
    assert said["action_schema"]["required"] == ["message"]
    heard = [env.step(text) for text in ('{"message": "hello"}\n', "hi\n", "ten signs!\n")]
    assert [turn.done for turn in heard] == [False, False, True]
    assert json.loads(heard[1].text)["observation"]["echoed_message"] == "hi"
    assert [turn.reward for turn in heard] == [0, 0, pytest.approx(1.7)]
    env.close()


def test_an_episode_may_be_left_in_its_middle(echo_server: str) -> None:
    env = verifiers_environment(
        taskset={"id": "openenv", "base_url": echo_server}, player={"max_turns": 3}
    )()
    first = env.reset({"idx": 0})
    env.step("hi\n")
    assert env.reset({"idx": 0}) == first
    env.close()


def test_an_environment_is_sound_and_trained_on(
    tmp_path: Path, echo_server: str, is_sound, train
) -> None:
    path = tmp_path / "game.py"
    path.write_text(GAME.format(url=echo_server))
    assert is_sound(path, "hello", '{"message": "hi"}')
    assert_trained(train(path))
