"""AdamW without torch's compiler: its numbers, and the imports of a training process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_trainable.learner.adamw import AdamW, ParameterGroup

UNIT = Path(__file__).resolve().parents[1]


def parameter(*values: float) -> Tensor:
    return torch.nn.Parameter(torch.tensor(values))


def make(*groups: list[Tensor], lr: float = 0.1, weight_decay: float = 0.0) -> AdamW:
    made = [ParameterGroup(parameters=group, lr=lr) for group in groups]
    return AdamW(made, betas=(0.9, 0.99), weight_decay=weight_decay)


def test_first_step_is_the_learning_rate_against_the_sign_of_the_gradient():
    weight = parameter(1.0, -2.0)
    weight.grad = torch.tensor([3.0, -0.5])
    make([weight]).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -1.9]))


def test_second_step_divides_the_mean_by_the_root_of_the_mean_square():
    weight = parameter(0.0)
    adamw = make([weight])
    for gradient in (1.0, 3.0):
        weight.grad = torch.tensor([gradient])
        adamw.step()
    # With the bias correction, the moments are:
    # (0.9 * 0.1 + 0.1 * 3) / (1 - 0.9^2) and (0.99 * 0.01 + 0.01 * 9) / (1 - 0.99^2).
    second = 0.1 * (0.39 / 0.19) / math.sqrt(0.0999 / 0.0199)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.1 - second]))


def test_weights_decay_beside_the_gradient():
    weight = parameter(2.0)
    weight.grad = torch.zeros(1)
    make([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([2.0 * (1 - 0.1 * 0.5)]))


def test_each_group_has_its_learning_rate():
    first, second = parameter(0.0), parameter(0.0)
    first.grad = second.grad = torch.ones(1)
    adamw = make([first], [second])
    adamw.groups[1].lr = 0.3
    adamw.step()
    torch.testing.assert_close(torch.cat([first, second]).detach(), torch.tensor([-0.1, -0.3]))


def test_a_parameter_without_a_gradient_stays_and_has_no_state():
    trained, unused = parameter(1.0), parameter(1.0)
    trained.grad = torch.ones(1)
    adamw = make([trained, unused])
    adamw.step()
    assert unused.item() == 1.0
    assert list(adamw.state) == [trained]
    assert sorted(adamw.state[trained]) == ["exp_avg", "exp_avg_sq", "step"]


def test_zero_grad_drops_every_gradient():
    first, second = parameter(1.0), parameter(1.0)
    first.grad = second.grad = torch.ones(1)
    make([first], [second]).zero_grad()
    assert first.grad is None
    assert second.grad is None


@pytest.mark.numerics
@pytest.mark.slow
def test_weights_and_state_are_those_of_torchs_fused_adamw_bit_for_bit():
    torch.manual_seed(0)
    start = [torch.randn(33, 17), torch.randn(17), torch.randn(5, 64).t()]
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    adamw = make(ours[:2], ours[2:], lr=3e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:]}],
        lr=3e-3,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        fused=True,
    )
    for step in range(20):
        rate = 3e-3 * (1 - step / 20)
        adamw.groups[1].lr = reference.param_groups[1]["lr"] = rate
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        adamw.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert one.equal(other)
        state = reference.state[other]
        assert adamw.state[one].keys() == state.keys()
        assert all(value.equal(state[key]) for key, value in adamw.state[one].items())


TRAINS = """
import sys
from pathlib import Path
from policies import write_quick_policy
from pairs import Pair

pair = Pair(write_quick_policy(Path(sys.argv[1])), rollout={"max_new_tokens": 4})
pair.sync()
groups = pair.rollouts()
pair.learner.warm_up(10)
assert pair.learner.update([groups]).version == 1
print(*sorted(name for name in sys.modules if name.startswith("torch._dynamo")))
"""


@pytest.mark.slow
def test_a_process_that_samples_and_trains_does_not_import_the_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, str(tmp_path)],
        cwd=UNIT.parents[1],
        env={**os.environ, "PYTHONPATH": str(UNIT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
