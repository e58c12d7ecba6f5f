"""A task may define defaults, which a config shows like any other value."""

from __future__ import annotations

import pytest

from grpo_trainable.config import CHECKS, ConfigError, GRPOConfig, flatten
from grpo_trainable.config.describe import page
from grpo_trainable.models.directory import ARITHMETIC_POLICY, policy_directory
from grpo_trainable.models.model_config import PRESETS

MATH = {"task": {"name": "math"}}
DECLARED = [(task, key) for key, check in CHECKS.items() for task in check.of_tasks]
OF_MATH = {key: check.of_tasks["math"] for key, check in CHECKS.items() if "math" in check.of_tasks}


def test_math_starts_from_the_policy_that_solves_word_problems():
    model = GRPOConfig.from_dict(MATH).model
    assert (model.preset, model.path) == ("arithmetic", None)
    assert policy_directory(model) == ARITHMETIC_POLICY


def test_what_math_changes_and_nothing_else():
    keyword, math = (flatten(GRPOConfig.from_dict(data).to_dict()) for data in ({}, MATH))
    changed = {key for key, value in math.items() if keyword.get(key, value) != value}
    assert changed == {"task.name", *OF_MATH}
    assert {key: math[key] for key in OF_MATH} == OF_MATH


def test_the_keyword_task_has_the_defaults_of_the_schema():
    assert "keyword" not in {task for task, _ in DECLARED}
    assert GRPOConfig.from_dict({"task": {"name": "keyword"}}) == GRPOConfig()


@pytest.mark.parametrize(("task", "key"), DECLARED)
def test_a_default_of_a_task_is_valid_and_differs_from_the_general_one(task: str, key: str):
    default = CHECKS[key].of_tasks[task]
    assert CHECKS[key].convert(default) == default != CHECKS[key].default


def test_a_given_value_goes_before_the_default_of_the_task():
    given = {**MATH, "optim": {"lr": 3e-5}, "model": {"preset": "small"}}
    config = GRPOConfig.from_dict(given)
    assert (config.optim.lr, config.model.preset) == (3e-5, "small")
    assert config.optim.weight_decay == 0.0
    assert config.rollout.temperature == 1.0


def test_a_directory_goes_before_the_preset_of_the_task(tmp_path):
    config = GRPOConfig.from_dict({**MATH, "model": {"path": str(tmp_path)}})
    assert policy_directory(config.model) == tmp_path
    with pytest.raises(ConfigError, match=r"model\.preset=small: has no effect with model.path=/p"):
        GRPOConfig.from_dict({**MATH, "model": {"path": "/p", "preset": "small"}})


def test_a_config_with_them_is_its_own_description():
    config = GRPOConfig.from_dict({**MATH, "optim": {"lr": 3e-5}})
    assert GRPOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({**MATH, "optim": 3}, "optim=3: must be a mapping"),
        ({**MATH, "rollout": {"tempreature": 1}}, "did you mean rollout.temperature"),
        ({"task": {"name": ["math"]}}, "task.name="),
        ({"task": "math"}, "task=math: must be a mapping"),
    ],
)
def test_mistakes_stay_one_line(data: dict, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        GRPOConfig.from_dict(data)
    assert "\n" not in str(error.value)


def test_the_reference_shows_them():
    (row,) = (line for line in page().splitlines() if line.startswith("| `optim.lr` |"))
    assert f"`0.0003`; math: `{OF_MATH['optim.lr']:g}`" in row


def test_every_shape_is_a_preset():
    assert set(CHECKS["model.preset"].choices) == set(PRESETS)
