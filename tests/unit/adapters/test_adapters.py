"""Adapters for environments of other libraries, tested without these libraries."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable import adapters
from grpo_trainable.adapters.dialogue import Dialogue
from grpo_trainable.adapters.optional_library import library
from grpo_trainable.adapters.tasks import listed_task
from grpo_trainable.adapters.textarena import OwnRandomness
from grpo_trainable.adapters.trl_factory import TOOLS, trl_environment
from grpo_trainable.environments import Turn
from grpo_trainable.tasks.messages import text_of

FACTORIES = ("gymnasium_text", "trl_factory", "textarena", "skyrl_gym", "verifiers", "openenv")
ADD = "add(step: int) -> int: Add to the counter.\n"


class Counter:
    """An environment class for TRL's `environment_factory` that uses nothing from this package."""

    def reset(self, goal: int, **_: Any) -> str:
        self._count, self._goal = 0, goal
        return f"The counter is {self._count}."

    def add(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: How much to add.

        Returns:
            The new count.
        """
        if step < 0:
            raise ValueError("only upwards")
        self._count += step
        return self._count

    def get_reward(self) -> float:
        return float(self._count == self._goal)


@pytest.mark.parametrize("name", FACTORIES)
def test_an_adapter_is_short(name):
    (folder,) = adapters.__path__
    assert len((Path(folder) / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80


def test_a_missing_library_is_named_with_the_line_that_installs_it():
    with pytest.raises(
        ValueError, match=r"^the library no_such is not installed; run: pip install -e"
    ):
        library("no_such.part", extra="none")


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "trl_factory"])
def test_the_extra_that_an_adapter_names_exists(name):
    (folder,) = adapters.__path__
    source = (Path(folder) / f"{name}.py").read_text(encoding="utf-8")
    (extra,) = re.findall(r'library\("[\w.]+", extra="([\w-]+)"\)', source)
    project = (Path(folder).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\n{extra} = [" in project


# ---- TRL's shape -----------------------------------------------------------------------------


def test_tools_are_shown_called_and_rewarded():
    env = trl_environment(Counter)()
    row = {"prompt": [{"role": "user", "content": "Make it 3."}], "goal": 3}
    assert env.reset(row) == f"{TOOLS}{ADD}\nMake it 3.\nThe counter is 0.\n"
    assert env.step("add(step=2)\n") == Turn("2\n", info={"calls": 1, "failed": 0})
    said = "{'error': 'only upwards'}\n"
    assert env.step("add(step=-1)\n") == Turn(said, info={"calls": 1, "failed": 1})
    assert env.step('{"name": "add", "arguments": {"step": 1}}\n').text == "3\n"
    end = env.step("It is 3.\n")
    assert (end.reward, end.done, end.info) == (1.0, True, {"calls": 0, "failed": 0})
    assert env.reset({"prompt": "Make it 2.\n", "goal": 2}).endswith(
        "\nMake it 2.\nThe counter is 0.\n"
    )
    assert env.step("no\n").reward == 0.0
    assert env.reset({"goal": 2}) == f"{TOOLS}{ADD}\nThe counter is 0.\n"


def test_the_last_call_ends_an_episode_and_is_rewarded():
    env = trl_environment(Counter, calls=2)()
    env.reset({"prompt": "", "goal": 2})
    assert not env.step("add(1)").done
    assert env.step("add(1)") == Turn("2\n", 1.0, True, {"calls": 1, "failed": 0})


def test_a_reward_function_takes_the_environment():
    env = trl_environment(Counter, reward=lambda counter: counter._count / 10)()
    env.reset({"prompt": "", "goal": 2})
    env.step("add(4)")
    assert env.step("done").reward == 0.4


def test_a_reward_may_be_a_coroutine():
    class Judged(Counter):
        async def get_reward(self) -> float:
            return 0.5

    env = trl_environment(Judged)()
    env.reset({"goal": 1})
    assert env.step("done").reward == 0.5


def test_an_environment_without_a_reward_is_refused():
    class Plain:
        def reset(self) -> None: ...

    with pytest.raises(ValueError, match=r"^the environment has no get_reward\(\): pass reward="):
        trl_environment(Plain)()


# ---- Tasks -----------------------------------------------------------------------------------


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Make it {goal}.", "goal": goal} for goal in range(count)]


def test_each_pass_over_a_list_has_every_specification_in_another_order():
    task = listed_task(trl_environment(Counter), rows(6), rows(2))
    first = [task(1).train_example(i).ground_truth["goal"] for i in range(12)]
    assert sorted(first[:6]) == sorted(first[6:]) == list(range(6))
    assert first[:6] != first[6:]
    assert first != [task(2).train_example(i).ground_truth["goal"] for i in range(12)]
    assert (task.train_size, task.eval_size, task.stop) == (6, 2, ("\n",))
    example = task(1).train_example(0)
    assert f"Make it {example.ground_truth['goal']}.\n" in example.prompt


def test_held_out_specifications_are_the_same_for_every_seed():
    task = listed_task(trl_environment(Counter), rows(6), rows(2))
    held_out = [[e.ground_truth["goal"] for e in task(s).eval_examples(3)] for s in (1, 2)]
    assert held_out[0] == held_out[1]
    assert sorted(held_out[0][:2]) == [0, 1]
    everything = listed_task(trl_environment(Counter), rows(3))(1).eval_examples(3)
    assert sorted(e.ground_truth["goal"] for e in everything) == [0, 1, 2]


def test_a_list_without_specifications_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        listed_task(trl_environment(Counter), [])


# ---- Shared parts of adapters ----------------------------------------------------------------


def test_the_text_of_messages_is_their_contents():
    assert (
        text_of([{"role": "system", "content": "a\n"}, {"role": "user", "content": "b"}]) == "a\nb"
    )
    assert text_of("a\n") == text_of([{"role": "user", "content": "a"}]) == "a"
    assert text_of(None) == text_of([]) == ""


def test_each_has_its_own_randomness():
    def drawn(one: OwnRandomness) -> float:
        with one.in_use():
            return random.random()

    def seed(one: OwnRandomness) -> None:
        with one.in_use():
            random.seed(7)

    alone = random.Random(7)
    expected = [alone.random() for _ in range(3)]
    outside = random.getstate()
    one, two = OwnRandomness(), OwnRandomness()
    seed(one)
    seed(two)
    assert [drawn(one), drawn(two), drawn(two), drawn(one), drawn(two), drawn(one)] == [
        *(expected[0], expected[0], expected[1], expected[1], expected[2], expected[2]),
    ]
    assert random.getstate() == outside


def test_randomness_is_put_back_after_an_error():
    outside = random.getstate()
    with pytest.raises(KeyError), OwnRandomness().in_use():
        {}[random.random()]
    assert random.getstate() == outside


def test_a_dialogue_hears_replies_in_turn():
    async def lead(ask: Any) -> int:
        return int(await ask("one?")) + int(await ask("two?"))

    dialogue = Dialogue(lead)
    assert (dialogue.listen(), dialogue.reply("3"), dialogue.reply("4")) == ("one?", "two?", None)
    assert dialogue.result() == 7
    dialogue.close()


def test_what_a_dialogue_raises_is_raised():
    async def lead(ask: Any) -> None:
        await ask("one?")
        raise KeyError("no")

    dialogue = Dialogue(lead)
    dialogue.listen()
    with pytest.raises(KeyError, match="no"):
        dialogue.reply("1")
    dialogue.close()


def test_a_dialogue_can_be_ended_anywhere():
    left = []

    async def lead(ask: Any) -> None:
        try:
            await ask("one?")
            await asyncio.sleep(1e6)
        finally:
            left.append(True)

    dialogue = Dialogue(lead)
    dialogue.listen()
    dialogue.close()
    assert left == [True]
    dialogue.close()  # closing twice has no effect
    assert left == [True]


def test_what_has_ended_can_be_closed():
    async def lead(ask: Any) -> str:
        return "done"

    dialogue = Dialogue(lead)
    assert dialogue.listen() is None
    dialogue.close()


@pytest.mark.slow
def test_a_dialogue_that_is_left_open_ends_with_its_process():
    program = """
from grpo_trainable.adapters.dialogue import Dialogue

async def lead(ask):
    try:
        await ask("one?")
    finally:
        print("left")

dialogue = Dialogue(lead)
print(dialogue.listen())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("one?\nleft\n", "", 0)
