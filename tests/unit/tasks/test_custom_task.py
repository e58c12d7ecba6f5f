"""A user's task: its settings, its examples, and a one-line error for each mistake."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import fields
from typing import Any

import pytest

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.config.task import CommonTaskSettings
from grpo_trainable.generator.scorer import ProcessScorer, check_reward, make_scorer, reward_apart
from grpo_trainable.plugins import PluginError
from grpo_trainable.tasks import Example, RewardError, Score, ScoreRequest
from grpo_trainable.tasks.custom import keys_with, with_task_settings
from grpo_trainable.tasks.prompts import build_task

SUMS = """
import random
from dataclasses import dataclass

from grpo_trainable.config import choice, integer, path
from grpo_trainable.tasks import Example, Score


class Sums:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        largest: int = integer(9, "The largest number in a sum.", minimum=1)
        sign: str = choice(("+", "-"), "Whether numbers are added or subtracted.")
        words: str | None = path(None, "A file that is not read.")

    def __init__(self, settings, seed):
        self.largest = settings.largest
        self.sign = settings.sign
        self.seed = seed

    def train_example(self, prompt_index):
        return self._sum(random.Random(f"{self.seed} {prompt_index}"))

    def eval_examples(self, count):
        draws = random.Random("eval")
        return [self._sum(draws) for _ in range(count)]

    def reward(self, response, ground_truth):
        if response == "raise":
            raise KeyError("two\\nlines")
        return Score(2.0, 0.5, 1.5) if response == "score" else float(response == ground_truth)

    def _sum(self, draws):
        a, b = (draws.randint(0, self.largest) for _ in range(2))
        return Example(f"{a} {self.sign} {b} =", str(a + b))
"""


@pytest.fixture
def sums(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    return f"{tmp_path}/sums.py:Sums"


def config(name: str, seed: int = 0, **own) -> GRPOConfig:
    return GRPOConfig.from_dict({"seed": seed, "task": {"name": name, **own}})


def bad_task(tmp_path, body: str) -> str:
    """Write a class that has no mistakes except in the given body."""
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_trainable.config import integer\n"
        "from grpo_trainable.tasks import Example\n"
        "class Base:\n"
        "    def __init__(self, seed): pass\n"
        "    def train_example(self, prompt_index): return Example('p', 1)\n"
        "    def eval_examples(self, count): return [Example('p', 1)] * count\n"
        "    def reward(self, response, ground_truth): return 1.0\n"
        "class Bad(Base):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
    )
    return f"{tmp_path}/bad.py:Bad"


def test_a_task_gets_its_own_settings_and_the_seed(sums):
    task = build_task(config(sums, seed=3, largest=1, sign="-"))
    again = build_task(config(sums, seed=3, largest=1, sign="-"))
    prompts = [task.train_example(i).prompt for i in range(50)]
    assert set(prompts) == {f"{a} - {b} =" for a in (0, 1) for b in (0, 1)}
    assert [again.train_example(i).prompt for i in range(50)] == prompts
    other = build_task(config(sums, seed=4, largest=1, sign="-"))
    assert [other.train_example(i).prompt for i in range(50)] != prompts
    assert task.eval_examples(5) == other.eval_examples(5)


def test_every_setting_of_a_trial_is_written_out_with_its_paths_absolute(sums, tmp_path):
    complete = with_task_settings(config(sums, sign="-", words="words.txt"), "/base")
    assert complete.to_dict()["task"] == {
        **config(sums).to_dict()["task"],
        "largest": 9,
        "sign": "-",
        "words": "/base/words.txt",
    }
    assert with_task_settings(GRPOConfig(), "/base") == GRPOConfig()


COMMON = ", ".join(f"task.{field.name}" for field in fields(CommonTaskSettings))


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"largest": 0}, "task.largest=0: must be an integer >= 1"),
        ({"sign": "*"}, 'task.sign="*": must be one of +, -'),
        ({"larges": 3}, "task.larges: unknown key; did you mean task.largest?"),
        (
            {"zzz": 3},
            f"task.zzz: unknown key; valid: {COMMON}, task.largest, task.sign, task.words",
        ),
        ({"match": "word"}, None),
    ],
)
def test_a_wrong_setting_is_refused_by_name(sums, own, line):
    for attempt in (build_task, lambda trial: with_task_settings(trial, "/base")):
        with pytest.raises(ConfigError) as caught:
            attempt(config(sums, **own))
        assert str(caught.value) == line or (
            line is None and str(caught.value).startswith("task.match: unknown key; ")
        )


def test_keys_of_a_trial_with_a_custom_task_are_its_own_and_not_the_keyword_tasks(sums):
    keys = keys_with(sums)
    assert {"task.largest", "task.strict", "optim.lr"} <= keys.keys()
    assert "task.keywords_file" not in keys
    assert keys["task.largest"].meaning == "The largest number in a sum."
    assert config(sums, largest=5).reads("task.largest")


def test_a_task_without_settings_is_made_from_the_seed_alone(tmp_path):
    name = bad_task(tmp_path, "pass")
    assert build_task(config(name)).train_example(5) == Example("p", 1)
    with pytest.raises(ConfigError, match=r"^task\.size: unknown key; "):
        build_task(config(name, size=3))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def __init__(self, seed): 1 / 0", "cannot be created: ZeroDivisionError: division"),
        ("def __init__(self): pass", "cannot be created: TypeError: "),
        ("Settings = 3", "Settings must be a dataclass"),
        (
            "@dataclass\nclass Settings:\n    size: int = 3",
            "the setting size must declare the values it accepts, for example size: int = integer(",
        ),
        (
            "@dataclass\nclass Settings:\n    strict: int = integer(3, minimum=1)",
            "every task has a setting strict; rename yours",
        ),
        ("reward = None", "has no method reward"),
        ("stop = [3]", "stop is [3]; it must be a list of strings"),
        (
            "def train_example(self, i): return 'a prompt'",
            "train_example(0) gave a value of type str; it must be Example(prompt, ground_truth)",
        ),
        (
            "def train_example(self, i): return Example(3, 1)",
            "train_example(0) gave an example whose prompt must be non-empty text or a list of "
            "messages",
        ),
        (
            "def train_example(self, i): return Example('p', {1, 2})",
            "train_example(0) gave a ground_truth that is not JSON: TypeError: ",
        ),
        (
            "def train_example(self, i): return Example('p', 1, {'a': {1, 2}})",
            "train_example(0) gave columns that are not a dict of JSON values: TypeError: ",
        ),
        (
            "calls = []\ndef train_example(self, i):\n"
            "    self.calls.append(i)\n    return Example(f'call {len(self.calls)}', 1)",
            "two calls of train_example(0) gave different examples: an example must depend only on "
            "the seed",
        ),
        ("def train_example(self, i): exit(2)", "train_example(0): SystemExit: 2"),
        ("def eval_examples(self, n): return []", "eval_examples(7) gave 0 examples"),
        (
            "def eval_examples(self, n): return ['p'] * n",
            "eval_examples(7) gave a value of type st",
        ),
        ("def eval_examples(self, n): return None", "eval_examples(7): TypeError: "),
    ],
)
def test_a_mistake_in_a_task_is_one_line_that_names_its_class(tmp_path, body, reason):
    name = bad_task(tmp_path, body)
    with pytest.raises(PluginError) as caught:
        build_task(config(name)).eval_examples(7)
    line = str(caught.value)
    assert line.startswith(f"task.name={name}: ")
    assert reason in line
    assert "\n" not in line


# ---- Rewards ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_responses_are_scored_by_the_task_in_a_process_of_its_own(sums):
    trial = config(sums, sign="-")
    with contextlib.closing(make_scorer(trial, build_task(trial))) as scorer:
        assert isinstance(scorer, ProcessScorer)
        answers = scorer.score(
            [ScoreRequest("7", "7"), ScoreRequest("8", "7"), ScoreRequest("score", "7")]
        )
        failed = scorer.score([ScoreRequest("raise", "7")])
    assert answers == [Score(1.0, None, 1.0), Score(0.0, None, 0.0), Score(2.0, 0.5, 1.5)]
    assert failed == [RewardError("KeyError: 'two\\nlines' (sums.py, line 30)", repeats=True)]


@pytest.mark.slow
def test_a_function_of_the_users_takes_the_place_of_the_tasks_reward(sums, tmp_path):
    (tmp_path / "r.py").write_text("def seven(response, ground_truth): return 7\n")
    trial = config(sums, reward=f"{tmp_path}/r.py:seven")
    with contextlib.closing(make_scorer(trial, build_task(trial))) as scorer:
        assert scorer.score([ScoreRequest("", "")]) == [Score(7.0, None, 7.0)]


@pytest.mark.slow
def test_a_task_that_a_reward_process_cannot_make_is_one_line(tmp_path):
    name = bad_task(
        tmp_path,
        "def __init__(self, seed):\n    import sys\n    assert 'torch' in sys.modules, 'no torch'",
    )
    with pytest.raises(
        ValueError, match=r"^task\.name=.*cannot be created: AssertionError: no torch$"
    ):
        check_reward(*reward_apart(config(name)))


@pytest.mark.parametrize(("stop", "strings"), [("", ()), ("stop = ['</answer>']", ("</answer>",))])
def test_a_task_says_which_strings_end_a_response(tmp_path, stop, strings):
    (tmp_path / "sums.py").write_text(f"{SUMS}\n    {stop}\n")
    task: Any = build_task(config(f"{tmp_path}/sums.py:Sums"))
    assert task.stop == strings
