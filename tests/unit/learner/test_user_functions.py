"""Losses and advantages from a user's file: accepted forms, and messages for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_trainable.algo import ADVANTAGES, LOSSES
from grpo_trainable.learner.user_functions import (
    UserAdvantage,
    UserLoss,
    advantage_function,
    loss_function,
)
from grpo_trainable.plugins import PluginError

CPU = torch.device("cpu")
LOSS = "def f(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):\n"
ADVANTAGE = "def f(rewards, *, eps):\n"


@pytest.fixture
def written(tmp_path: Path):
    def write(source: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"import torch\n{source}\n")
        return f"{path}:f"

    return write


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs that require a gradient, old log-probs, advantages and a mask, (2, 3)."""
    old = torch.full((2, 3), -1.0)
    log_probs = (old + torch.tensor([0.0, 0.4, -0.4])).requires_grad_()
    advantages = torch.tensor([[1.0], [-2.0]]).expand(2, 3)
    return log_probs, old, advantages, torch.tensor([[True, True, True], [True, True, False]])


# ---- Accepted functions ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_built_in_name_is_the_built_in_loss(name):
    assert loss_function(name, CPU) is LOSSES[name]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_built_in_name_is_the_built_in_advantage(name):
    assert advantage_function(name, 4) is ADVANTAGES[name]


def test_a_loss_alone_clips_nothing(written):
    loss = loss_function(written(LOSS + "    return -advantages * log_probs"), CPU)
    log_probs, old, advantages, mask = batch()
    token_loss, clipped = loss(log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    assert torch.equal(token_loss, -advantages * log_probs)
    assert clipped.tolist() == [[False] * 3] * 2


def test_a_loss_with_its_clipped_tokens_gets_the_clip_range(written):
    loss = loss_function(
        written(
            LOSS
            + "    ratio = (log_probs - old_log_probs).exp()\n"
            + "    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)\n"
            + "    return -ratio * advantages, outside"
        ),
        CPU,
    )
    _, narrow = loss(*batch(), clip_low=0.1, clip_high=0.1)
    _, high = loss(*batch(), clip_low=0.1, clip_high=0.9)
    assert narrow.tolist() == [[False, True, True]] * 2  # ratios of 1, 1.49 and 0.67
    assert high.tolist() == [[False, False, True]] * 2


def test_an_advantage_gets_rewards_and_eps(written):
    advantage = advantage_function(written(ADVANTAGE + "    return rewards * 2 + eps"), 3)
    rewards = torch.tensor([[0.0, 0.5, 1.0]])
    assert advantage(rewards, eps=0.25).tolist() == [[0.25, 1.25, 2.25]]


def test_a_built_in_loss_is_a_valid_reference():
    log_probs, *others = batch()
    theirs = loss_function("grpo_trainable.algo.losses:grpo_clip", CPU)
    results = [f(log_probs, *others, clip_low=0.2, clip_high=0.3) for f in (theirs, LOSSES["dapo"])]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["no_baseline", "grpo_clip", "cispo", "gspo", "gmpo", "dppo_kl"])
def test_every_built_in_loss_without_settings_of_its_own_passes_the_trial_of_a_users(name):
    UserLoss(f"grpo_trainable.algo.losses:{LOSSES[name].__name__}", CPU)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_built_in_advantage_passes_the_trial_of_a_users(name):
    UserAdvantage(f"grpo_trainable.algo.advantages:{ADVANTAGES[name].__name__}", 4)


# ---- Mistakes found when the learner is built ----------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("f = 3", "cannot be imported: TypeError: f is not callable"),
        ("g = 3", "cannot be imported: AttributeError: .* has no attribute 'f'"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: .*no_such_module"),
        (
            "def f(log_probs, advantages): ...",
            r"too many positional arguments; the function must take "
            r"\(log_probs, old_log_probs, advantages, mask, \*, clip_low, clip_high\)",
        ),
        (
            "def f(log_probs, old_log_probs, advantages, mask): ...",
            "unexpected keyword argument 'clip_low'; the function must take",
        ),
        (
            LOSS + "    return 1 / 0",
            r"raised ZeroDivisionError: division by zero \(mine.py, line 3\)",
        ),
        (LOSS + "    log_probs @ mask", r"raised RuntimeError: .* \(mine.py, line 3\)"),
        (
            LOSS + "    pass",
            r"one number per token .* must be a .* tensor .*, but it is a NoneType",
        ),
        (
            LOSS + "    return (-advantages * log_probs).mean()",
            r"float32 tensor of shape \(3, 4\) on cpu, but it is a float32 tensor of shape \(\)",
        ),
        (LOSS + "    return (log_probs * mask).sum(-1, keepdim=True)", r"of shape \(3, 1\)"),
        (LOSS + "    return -advantages.double() * log_probs", "is a float64 tensor"),
        (
            LOSS + "    return -log_probs, mask.float()",
            "the mask of clipped tokens must be a bool tensor",
        ),
        (
            LOSS + "    return -log_probs, {}",
            "the mask of clipped tokens must be .* but it is a dict",
        ),
        (LOSS + "    return -log_probs, mask, mask", "but it is a tuple"),
        (LOSS + "    return -advantages * log_probs.detach()", "carries no gradient"),
        (LOSS + "    return -torch.zeros_like(mask).float()", "carries no gradient"),
        (LOSS + "    return 0 * log_probs", "no gradient with respect to log_probs"),
        (
            LOSS + "    return -advantages * old_log_probs.clone().requires_grad_()",
            "no gradient with respect to log_probs",
        ),
        (LOSS + "    return -advantages * log_probs / advantages", "the loss .* is not finite"),
        (
            LOSS + "    return (log_probs - old_log_probs).abs().sqrt()",
            "the gradient .* is not finite",
        ),
        (LOSS + "    advantages *= 2\n    return -advantages * log_probs", "in place"),
        (LOSS + "    return -advantages * log_probs.sub_(old_log_probs)", "in place"),
    ],
)
def test_a_wrong_loss_is_refused_in_one_line_when_it_is_loaded(written, source, reason):
    reference = written(source)
    with pytest.raises(PluginError, match=reason) as error:
        loss_function(reference, CPU)
    message = str(error.value)
    assert message.startswith(f"loss.type={reference}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(rewards): ...", r"unexpected keyword argument 'eps'; .* \(rewards, \*, eps\)"),
        (ADVANTAGE + "    return rewards.mean()", r"must be .* \(2, 4\) .* of shape \(\)"),
        (ADVANTAGE + "    return rewards.tolist()", "but it is a list"),
        (ADVANTAGE + "    return rewards.double()", "is a float64 tensor"),
        (ADVANTAGE + "    return rewards[2]", r"raised IndexError: .* \(mine.py, line 3\)"),
        (
            ADVANTAGE
            + "    centred = rewards - rewards.mean(-1, keepdim=True)\n"
            + "    return centred / centred.std(-1, keepdim=True)",
            r"gives .*nan.* for the rewards \[\[0.0, 0.333, 0.667, 1.0\], \[0.5, .*; add eps",
        ),
    ],
)
def test_a_wrong_advantage_is_refused_in_one_line_when_it_is_loaded(written, source, reason):
    reference = written(source)
    with pytest.raises(PluginError, match=reason) as error:
        advantage_function(reference, 4)
    message = str(error.value)
    assert message.startswith(f"loss.advantage={reference}: ")
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore:std")  # torch warns about a single reward, as expected
def test_an_advantage_is_tried_on_groups_of_the_size_it_will_see(written):
    source = ADVANTAGE + "    return rewards / (rewards.std(-1, keepdim=True) + eps)"
    assert advantage_function(written(source), 2)
    with pytest.raises(PluginError, match="nan"):  # a single reward has no standard deviation
        advantage_function(written(source), 1)


# ---- Mistakes found only in some batches ---------------------------------------------------------


def test_a_mistake_that_the_trial_does_not_show_is_refused_at_the_call(written):
    loss = loss_function(
        written(LOSS + "    return (-advantages * log_probs)[:3] / (len(log_probs) - 2)"), CPU
    )
    with pytest.raises(PluginError, match=r"loss\.type=.* must be .* \(4, 2\)"):
        loss(*(torch.rand(4, 2, requires_grad=True),) * 3, torch.ones(4, 2).bool(),
             clip_low=0.2, clip_high=0.2)  # fmt: skip
    advantage = advantage_function(written(ADVANTAGE + "    return rewards[:2]"), 3)
    with pytest.raises(PluginError, match=r"loss\.advantage=.* must be .* \(5, 3\)"):
        advantage(torch.rand(5, 3), eps=1e-8)
