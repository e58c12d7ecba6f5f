"""Published algorithms by name: valid settings, one round of each, and the page that lists them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import write_quick_policy

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess
from search_spaces.find import find_preset
from search_spaces.presets import ALGORITHMS, PRESETS, Preset

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"


def trial_of(preset: Preset, fixed: dict[str, Any]) -> GRPOConfig:
    """Return the only trial of `--preset NAME --set …`."""
    (trial,) = preset.under(preset.space).trials(fixed, [0])
    return trial


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_is_a_valid_trial_with_its_settings(preset):
    trial = trial_of(preset, {})
    assert {key: trial[key] for key in preset.settings} == preset.settings


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_the_only_arm_of_a_preset_has_the_name_of_the_preset(preset):
    # A name such as `sync` or `colocated` would be wrong as soon as --set changes the placement.
    assert trial_of(preset, {}).arm == preset.name


def test_no_two_algorithms_are_the_same_settings():
    trials = [trial_of(preset, {}) for preset in ALGORITHMS.values()]
    assert len({repr({**trial.to_dict(), "arm": ""}) for trial in trials}) == len(ALGORITHMS)
    assert repr({**GRPOConfig().to_dict(), "arm": ""}) not in {
        repr({**trial.to_dict(), "arm": ""}) for trial in trials
    }


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ALGORITHMS.values(), ids=lambda preset: preset.name)
def test_a_round_of_every_algorithm_moves_the_policy_by_finite_steps(preset, policy_path):
    config = trial_of(
        preset,
        {
            "model.path": policy_path,
            "rollout.prompts": 4,
            "rollout.max_new_tokens": 10,
            "optim.lr": 1e-2,
        },
    )
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    generator.load(learner.publish().handle)
    prompts = Prompts(config, build_task(config), read_tokenizer(config.model.path))
    unit = generator.generate([prompts.request("train", index) for index in range(4)])
    # The policy is random and would earn nothing, so the rewards are invented.
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.0])
    groups = [replace(group, rewards=rewards, uses=1) for group in unit.groups]
    if config.task.part_weights:
        parts = torch.stack([rewards, 1 - rewards.square()], dim=1)
        groups = [replace(group, reward_parts=parts) for group in groups]
    before = {name: weights.clone() for name, weights in learner.policy.trained().items()}

    updated = learner.update([groups])

    assert len(updated.steps) == config.k
    assert not any(step.skipped for step in updated.steps)
    assert all(math.isfinite(step.loss) and step.grad_norm > 0 for step in updated.steps)
    after = learner.policy.trained()
    assert any(not after[name].equal(weights) for name, weights in before.items())


def test_reinforce_with_its_pluses_is_asked_back_by_its_name_here():
    with pytest.raises(ConfigError, match=r"unknown; did you mean reinforce_pp\?"):
        find_preset("reinforce++")


# ---- The page ----------------------------------------------------------------------------------


def row(preset: Preset) -> str:
    """Return a preset's row in the table of docs/algorithms.md."""
    settings = " ".join(
        f"{key}={str(value).lower() if value is True else value}"
        for key, value in preset.settings.items()
    )
    paper = re.sub(r"^https://doi.org/10.1007/BF00992696$", "Williams 1992", str(preset.paper))
    algorithm = f"{preset.meaning} ([{paper}]({preset.address}))"
    return f"| `{preset.name}` | {algorithm} | `{settings}` | {preset.differs} |".replace("  ", " ")


@pytest.mark.parametrize("preset", ALGORITHMS.values(), ids=lambda preset: preset.name)
def test_the_page_has_every_algorithm_with_settings_paper_and_difference(preset):
    assert row(preset) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_no_other_preset():
    (section,) = re.findall(r"^## Presets\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(ALGORITHMS)
