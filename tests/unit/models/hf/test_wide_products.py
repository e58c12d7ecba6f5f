"""A CPU computes a bfloat16 model's products and attention in float32, and rounds results once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_models import VOCAB_SIZE, write_hf_model

import grpo_trainable.models.hf.policy as hf
from grpo_trainable.models.hf.policy import HFPolicy, load_hf_policy, widen_products

# Importing transformers takes seconds.
pytestmark = [pytest.mark.numerics, pytest.mark.slow]


def layer(*, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(24, 16, bias=bias).bfloat16()


def policy_of(path: Path, dtype: str, *, has_instructions: bool = False) -> HFPolicy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "multiplies_bfloat16", lambda: has_instructions)
        return load_hf_policy(path, dtype=dtype, head_fp32=True)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_hf_model(tmp_path_factory.mktemp("model") / "m", request.param))


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_rounded_once(bias: bool):
    linear, x = layer(bias=bias), torch.randn(2, 3, 24).bfloat16()
    widen_products(linear)
    exact = F.linear(
        x.double(), linear.weight.double(), linear.bias.double() if bias else None
    ).bfloat16()
    assert linear(x).dtype == torch.bfloat16
    # A few results differ, where the exact value is near the middle between two bfloat16 numbers.
    assert (linear(x) == exact).float().mean() > 0.99
    torch.testing.assert_close(linear(x), exact)


def test_gradients_are_those_of_exact_products_rounded_once():
    linear, x = layer(), torch.randn(2, 3, 24).bfloat16().requires_grad_()
    widen_products(linear)
    linear(x).backward(upstream := torch.randn(2, 3, 16).bfloat16())
    grad, rows = upstream.double(), x.detach().double()
    torch.testing.assert_close(x.grad, (grad @ linear.weight.double()).bfloat16())
    expected = torch.einsum("bso,bsi->oi", grad, rows)
    torch.testing.assert_close(linear.weight.grad, expected.bfloat16())
    torch.testing.assert_close(linear.bias.grad, grad.sum(dim=(0, 1)).bfloat16())


def test_what_is_frozen_has_no_gradient():
    linear = layer().requires_grad_(False)
    widen_products(linear)
    x = torch.randn(3, 24).bfloat16().requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None


def test_float32_layers_are_left_alone():
    linear = torch.nn.Linear(4, 4)
    before = linear.forward
    widen_products(linear)
    assert linear.forward == before


def test_only_a_cpu_without_the_instructions_widens_products(path: Path):
    for has_instructions in (False, True):
        model = policy_of(path, "bfloat16", has_instructions=has_instructions).model
        linears = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.Linear)]
        assert linears
        assert all(("forward" in vars(m)) is not has_instructions for m in linears)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_hidden_states_are_near_those_of_the_model_in_float32(path: Path, has_instructions: bool):
    narrow = policy_of(path, "bfloat16", has_instructions=has_instructions)
    wide = policy_of(path, "float32")
    wide.load_state_dict(narrow.state_dict())  # the same weights
    ids = torch.randint(0, VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(1))
    found, expected = narrow.hidden_states(ids).float(), wide.hidden_states(ids)
    assert (found - expected).abs().max() < 2.0**-5 * expected.abs().max()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("padded", [True, False])
def test_a_single_query_attends_as_torch_does(kv_heads: int, padded: bool):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from grpo_trainable.models.hf.attention import _attention

    torch.manual_seed(2)
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // kv_heads
    query = torch.randn(3, 4, 1, 8).bfloat16()
    key, value = (torch.randn(3, kv_heads, 7, 8).bfloat16() for _ in range(2))
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :5] = False  # padding on the left
    used = mask if padded else None
    found, _ = _attention(module, query, key, value, used, scaling=0.3)
    wide = (x.float() for x in (query, key, value))
    expected, _ = sdpa_attention_forward(module, *wide, used, scaling=0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16())
