"""Packed rows in transformers models give the results of padded rows, or are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hf_models import FAMILIES, VOCAB_SIZE, tokenizer, write_hf_model
from test_hf_policy import batch_of, config_of, copy, disturb, gradients, made_up_groups, scored
from torch import Tensor

from grpo_trainable.models.hf.json_files import FIXED_ROPE, PACKED
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.store import build_policy, build_trained_policy

pytestmark = pytest.mark.numerics

# Kind of RoPE -> its parameters.
ROPE: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def both(path: str, **model: object) -> tuple[Policy, Policy]:
    """Build the policy twice: once for padded rows, and once for packed rows."""
    padded, packed = (
        build_trained_policy(config_of(path, packing=packing, **model).model, 0)[0]
        for packing in (False, True)
    )
    return padded, packed


def far(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}], ids=str
)
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(
    family: str, tied: bool, settings: dict[str, object], tmp_path: Path
):
    padded, packed = both(write_hf_model(tmp_path, family, tied=tied), **settings)
    if "lora_rank" in settings:
        for policy in (padded, packed):
            disturb(policy)
    batch = batch_of(made_up_groups())

    torch.testing.assert_close(scored(packed, batch), scored(padded, batch), rtol=0, atol=1e-5)
    expected = copy(gradients(padded, batch))
    for name, gradient in gradients(packed, batch).items():
        assert far(gradient, expected[name]) < 1e-4, name
    without, reference = packed.untrained(), padded.untrained()
    if without is not None and reference is not None:
        found, wanted = (scored(policy, batch) for policy in (without, reference))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert far(scored(packed, batch), wanted) > 1e-3


def test_the_tests_cover_every_architecture_that_packs_by_default():
    assert {family for family, _ in FAMILIES} == set(PACKED)
    assert {*ROPE} == {*FIXED_ROPE}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_these_architectures_pack_by_default(family: str, tied: bool, tmp_path: Path):
    assert config_of(write_hf_model(tmp_path, family, tied=tied)).model.packing


@pytest.mark.parametrize("kind", ROPE)
def test_packed_rows_are_rotated_as_padded_ones(kind: str, tmp_path: Path):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPE[kind]}
    path = write_hf_model(tmp_path, rope_parameters=rope)
    assert config_of(path).model.packing
    padded, packed = both(path)
    batch = batch_of(made_up_groups())
    torch.testing.assert_close(scored(packed, batch), scored(padded, batch), rtol=0, atol=1e-5)


def test_states_that_rows_share_add_up_their_gradients_in_float32(tmp_path: Path):
    path = write_hf_model(tmp_path)
    batch = batch_of(made_up_groups())
    exact = gradients(both(path)[0], batch)
    padded, packed = (gradients(policy, batch) for policy in both(path, dtype="bfloat16"))
    for name, gradient in exact.items():
        assert far(packed[name], gradient) < 1.2 * far(padded[name], gradient) + 1e-3, name


def test_a_policy_that_packs_samples_as_before(tmp_path: Path):
    padded, packed = both(write_hf_model(tmp_path))
    ids = torch.arange(2, 22).view(2, 10)
    assert torch.equal(packed.hidden_states(ids), padded.hidden_states(ids))


def test_an_architecture_whose_attention_slides_is_refused(tmp_path: Path):
    config = transformers.MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, sliding_window=8,
        bos_token_id=None, eos_token_id=tokenizer().eos_id, pad_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save(tmp_path / "tokenizer.json")
    path = str(tmp_path)
    assert not config_of(path).model.packing
    build_policy(config_of(path).model, 0)
    with pytest.raises(
        ValueError, match="does not support it \\(its attention has sliding_window\\)"
    ) as error:
        build_policy(config_of(path, packing=True).model, 0)
    assert str(error.value).startswith(f"{path}: model.packing=true: MistralForCausalLM")


def test_a_model_of_which_one_layer_slides_is_not_packed_by_default(tmp_path: Path):
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    path = write_hf_model(tmp_path, "qwen2", **sliding)
    assert not config_of(path).model.packing
    build_policy(config_of(path).model, 0)
    with pytest.raises(ValueError, match="its attention has sliding_window"):
        build_policy(config_of(path, packing=True).model, 0)
