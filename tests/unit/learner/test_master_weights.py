"""Float32 master weights behind a bfloat16 policy."""

from __future__ import annotations

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.optimizer import MasterWeights, PolicyOptimizer

pytestmark = pytest.mark.numerics

CONFIG = GRPOConfig.from_dict({"optim": {"lr": 1e-4, "grad_clip": 1e6}})


def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = torch.linspace(0.5, 1.5, 64).reshape(8, 8)
    return {"a": torch.nn.Parameter(values.to(dtype)), "b": torch.nn.Parameter(values[0].clone())}


def train(optimizer: PolicyOptimizer, trained: dict[str, torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        for part in (0.25, 0.75):  # two microbatches
            sum((part * p.float() ** 2).sum() for p in trained.values()).backward()
        optimizer.step(0.0)


def test_float32_parameters_are_trained_themselves():
    trained = parameters(torch.float32)
    masters = MasterWeights(trained)
    assert masters.copies == {}
    assert all(masters.parameters[name] is trained[name] for name in trained)


@pytest.mark.slow
def test_steps_that_bfloat16_would_round_away_add_up():
    trained, exact = parameters(torch.bfloat16), parameters(torch.float32)
    exact["a"].data.copy_(trained["a"].data)
    optimizer, reference = PolicyOptimizer(trained, CONFIG), PolicyOptimizer(exact, CONFIG)
    first = trained["a"].detach().clone()
    train(optimizer, trained, 1)
    train(reference, exact, 1)
    # Near 1, bfloat16 numbers are 0.004 to 0.008 apart: a single step of 0.0001 is lost.
    assert torch.equal(trained["a"], first)
    train(optimizer, trained, 99)
    train(reference, exact, 99)
    assert (exact["a"] - first.float()).abs().max() > 0.009
    # The gradient is computed at the rounded weight.
    torch.testing.assert_close(trained["a"].float(), exact["a"], rtol=0, atol=0.005)
    torch.testing.assert_close(trained["b"], exact["b"], rtol=0, atol=1e-6)


def test_gradients_add_up_in_float32_and_leave_none_in_the_policy():
    trained = parameters(torch.bfloat16)
    masters = MasterWeights(trained)
    for scale in (256.0, 1.0):  # bfloat16 cannot represent 257
        (scale * trained["a"]).sum().backward()
    assert trained["a"].grad is None
    assert (masters.copies["a"].grad == 257).all()


def test_a_state_goes_on_bit_for_bit():
    whole, first = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, before = PolicyOptimizer(whole, CONFIG), PolicyOptimizer(first, CONFIG)
    train(optimizer, whole, 5)
    train(before, first, 2)
    state, counters = before.tensors(), before.counters()
    assert state["a/master"].dtype == torch.float32
    assert "b/master" not in state

    second = parameters(torch.bfloat16)
    after = PolicyOptimizer(second, CONFIG)
    for name, parameter in second.items():
        parameter.data.copy_(first[name])
    after.load_state(state, counters)
    train(after, second, 3)
    assert all(torch.equal(second[name], whole[name]) for name in whole)
    done, expected = after.tensors(), optimizer.tensors()
    assert done.keys() == expected.keys()
    assert all(torch.equal(done[key], expected[key]) for key in expected)
