"""The environment that `openenv init` writes, on a server: played, checked and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rounds import assert_trained

from grpo_trainable.adapters.openenv import NO_ACTION, openenv_environment
from grpo_trainable.environments import Turn

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-adapters")

GAME = """
from grpo_trainable.adapters.openenv import openenv_environment
from grpo_trainable.adapters.tasks import seeded_task

Game = openenv_environment(
    "{url}",
    act=lambda text: {{"message": text.strip()}},
    describe=lambda fields: fields["echoed_message"],
)
Games = seeded_task(Game, stop=("\\n", " ", "e"))
"""


def test_the_echo_earns_a_tenth_for_each_character(echo_server: str) -> None:
    env = openenv_environment(
        echo_server,
        act=lambda text: {"message": text.strip()},
        describe=lambda fields: fields["echoed_message"],
    )()
    assert env.reset({"seed": 1}) == "Echo Game environment ready!\n"
    assert env.step("hello\n") == Turn("hello\n", 0.5, False, {"illegal": 0})
    assert env.step("ten signs!\n") == Turn("ten signs!\n", 1.0, False, {"illegal": 0})
    env.close()


def test_without_functions_both_sides_are_json(echo_server: str) -> None:
    env = openenv_environment(echo_server)()
    assert json.loads(env.reset({}))["message_length"] == 0
    turn = env.step('{"message": "hello"}\n')
    heard = json.loads(turn.text)
    assert (heard["echoed_message"], heard["message_length"], turn.reward) == ("hello", 5, 0.5)
    for action in ("hello", "[1]", "3", '{"massage": "hello"}', '{"message": 3}'):
        assert env.step(f"{action}\n") == NO_ACTION
    assert json.loads(env.step('{"message": "x"}\n').text)["metadata"]["step"] == 2
    env.close()


def test_two_environments_are_two_sessions(echo_server: str) -> None:
    envs = [openenv_environment(echo_server)() for _ in range(2)]
    for env in envs:
        env.reset({})
    envs[0].step('{"message": "x"}')
    steps = [json.loads(env.step('{"message": "x"}').text)["metadata"]["step"] for env in envs]
    assert steps == [2, 1]
    for env in envs:
        env.close()


def test_an_environment_is_sound_and_trained_on(
    tmp_path: Path, echo_server: str, is_sound, train
) -> None:
    path = tmp_path / "game.py"
    path.write_text(GAME.format(url=echo_server))
    assert is_sound(path)
    assert_trained(train(path))
