"""Compare a trial's memory estimate with sums computed by hand and with tensors of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, write_hf_model

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.kv_cache import KVCache
from grpo_trainable.models.model_config import PRESETS, ModelConfig
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.shelved_cache import Shelf, shelf_columns
from grpo_trainable.models.store import build_policy, build_trained_policy
from grpo_trainable.models.transformer import TransformerLM
from tuning.memory import DoesNotFit, compare, machine_bytes, need_of
from tuning.memory_estimate import (
    ENVIRONMENT_BYTES,
    PROCESS_BYTES,
    Dimensions,
    estimate,
    policy_dimensions,
    size,
)
from tuning.model_dimensions import KNOWN, dimensions_of, stored_parameters

QWEN = "Qwen/Qwen2.5-Math-1.5B"


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(settings)


def parts(trial: GRPOConfig, dimensions: Dimensions | None = None) -> dict[str, int]:
    """Return the bytes of each part, for all actors together."""
    found = dimensions or policy_dimensions(trial.model)
    assert found is not None
    bytes_of: dict[str, int] = {}
    for part in estimate(trial, found).parts:
        bytes_of[part.what] = bytes_of.get(part.what, 0) + part.bytes
    return bytes_of


def course_math(**model: Any) -> GRPOConfig:
    return config(
        model={"path": QWEN, "dtype": "bfloat16", **model},
        rollout={"prompts": 32, "group_size": 8, "max_new_tokens": 1024},
        optim={"microbatch": 2},
    )


# ---- Examples by hand ------------------------------------------------------------------------


def test_the_parameters_of_a_model_that_presets_name_are_those_of_its_card():
    # Each of 28 layers has q 1536 x 1536 + 1536, k and v 1536 x 256 + 256 each, o 1536 x 1536, MLP
    # 3 x 1536 x 8960, and two norms of 1536. There is also a final norm, and a matrix of
    # 151936 x 1536, which is both the embedding and the head.
    layer = 2_360_832 + 2 * 393_472 + 2_359_296 + 41_287_680 + 3_072
    found = dimensions_of(KNOWN[QWEN])

    assert found is not None
    assert layer == 46_797_824
    assert found.parameters == 28 * layer + 1_536 + 233_373_696 == 1_543_714_304


def test_the_parts_of_the_course_s_model_follow_from_its_parameters():
    found = parts(course_math())

    n = 1_543_714_304
    assert found["weights"] == found["reference"] == found["sampling weights"] == 2 * n
    assert found["published snapshot"] == 2 * n
    assert found["gradients"] == found["master weights"] == 4 * n
    assert found["optimizer moments"] == 8 * n
    # 256 rows of 256 + 1024 tokens, in 28 layers with 2 heads of 128 keys and 128 values.
    assert found["KV cache"] == 256 * 1280 * 28 * 2 * 256 * 2 == 9_395_240_960
    # 256 rows of 151936 logits and as many probabilities, plus the head in float32.
    assert found["sampling logits"] == 2 * 256 * 151_936 * 4 + 151_936 * 1_536 * 4
    # 256 responses of 1024 tokens, with 25 bytes per token, and 32 prompts of 256 ids.
    assert found["buffer"] == 256 * 1024 * 25 + 32 * 256 * 8
    assert found["processes"] == 2 * PROCESS_BYTES
    # When colocated, sampling takes more memory than training, which reuses that memory afterwards.
    assert "activations" not in found


def test_lora_has_gradients_and_moments_of_its_adapters_alone_and_no_reference():
    found = parts(course_math(lora_rank=16))

    # Per layer: q and o 1536 + 1536, k and v 1536 + 256, and three of 1536 + 8960.
    adapters = 16 * 28 * (2 * 3_072 + 2 * 1_792 + 3 * 10_496)
    assert found["gradients"] == 4 * adapters == 73_859_072
    assert found["optimizer moments"] == 8 * adapters
    assert found["master weights"] == found["reference"] == 0


def test_adapters_on_named_layers_only():
    found = parts(course_math(lora_rank=2, lora_targets="q_proj, self_attn.v_proj"))

    assert found["gradients"] == 4 * 2 * 28 * (3_072 + 1_792)


def test_side_by_side_each_generator_has_its_own_copy_and_cache():
    alone = parts(config(placement="disaggregated", rollout={"unit_prompts": 4}))
    three = parts(
        config(
            placement="disaggregated",
            rollout={"unit_prompts": 4},
            resources={"num_generators": 3, "reference": "generator"},
        )
    )

    for what in ("sampling weights", "KV cache"):
        assert three[what] == 3 * alone[what]
    assert three["reference"] == 3 * alone["reference"]
    assert three["weights"] == alone["weights"]
    assert alone["activations"] == three["activations"] > 0
    assert (alone["processes"], three["processes"]) == (3 * PROCESS_BYTES, 5 * PROCESS_BYTES)


def test_each_generator_has_its_own_reward_processes_and_environments():
    def processes(task: dict[str, Any], generators: int) -> int:
        resources = {"num_generators": generators}
        rollout = {"prompts": 8, "unit_prompts": 2}
        side_by_side = config(
            placement="disaggregated", task=task, rollout=rollout, resources=resources
        )
        return parts(side_by_side)["processes"]

    # Two processes for the trial and a learner, and one per generator. Each generator adds a reward
    # process or two groups of environments.
    assert processes({"reward": "my.py:score"}, 1) == 4 * PROCESS_BYTES
    assert processes({"reward": "my.py:score"}, 3) == 8 * PROCESS_BYTES
    assert processes({"name": "guess"}, 3) == 5 * PROCESS_BYTES + 6 * ENVIRONMENT_BYTES


def test_several_learners_hold_the_policy_each_or_between_them():
    def of(**resources: Any) -> dict[str, int]:
        return parts(
            config(placement="disaggregated", model={"preset": "course"}, resources=resources)
        )

    one, two = of(), of(num_learners=2)
    four = of(num_learners=4, learner_strategy="fsdp2")
    for what in ("weights", "gradients", "optimizer moments", "reference", "activations"):
        assert two[what] == 2 * one[what]
    assert two["published snapshot"] == one["published snapshot"]
    assert two["processes"] == one["processes"] + PROCESS_BYTES
    for what in ("weights", "gradients", "optimizer moments", "reference"):
        assert four[what] == pytest.approx(one[what], abs=16)
    # Each of four learners gathers the embedding and the head, 2 x 50,257 x 512, and two of the
    # four layers, with their gradients. The first learner also gathers everything to publish it.
    outside = 2 * 50_257 * 512
    assert four["gathered layers"] == 4 * 8 * (outside + (one["weights"] // 4 - outside) // 2)
    assert four["published snapshot"] == 2 * one["published snapshot"]
    kept = of(num_learners=2, elastic=True)["recovery copy"]
    assert kept == two["weights"] + two["optimizer moments"]


def test_a_checkpoint_is_read_into_memory_that_waits_for_gradients_and_moments():
    def of(**resources: Any) -> dict[str, int]:
        return parts(
            config(
                placement="disaggregated",
                model={"preset": "course"},
                optim={"microbatch": 1},
                resources=resources,
            )
        )

    alone = of()
    n = alone["weights"] // 4
    assert alone.get("checkpoint", 0) == 0
    # Each of four learners reads the whole checkpoint, which has 12 bytes per parameter. A quarter
    # of it fits into the memory of the learner's own gradients and moments.
    assert of(num_learners=4, learner_strategy="fsdp2")["checkpoint"] == 4 * 9 * n


def test_a_checkpoint_goes_through_main_memory_to_a_gpu():
    trial = course_math()
    gpu = config(**{**trial.to_dict(), "resources": {"worker_gpus": 1.0}})
    dimensions = policy_dimensions(trial.model)
    assert dimensions is not None
    found = {part.what: part for part in estimate(gpu, dimensions).parts}["checkpoint"]
    # Each of 1,543,714,304 parameters has a bfloat16 weight, a float32 master weight, and two
    # float32 moments.
    assert (found.bytes, found.gpus) == (14 * 1_543_714_304, 0.0)
    assert parts(trial).get("checkpoint", 0) == 0


def test_the_cache_of_vllm_fits_into_its_share_of_a_gpu():
    apart = {"placement": "disaggregated", "engine": "vllm"}
    on_cpus, on_gpus = (parts(config(**apart, resources={"generator_gpus": n})) for n in (0, 1))
    missing = {"KV cache", "sampling logits"}
    assert on_cpus.keys() - on_gpus.keys() == missing
    assert {what: on_cpus[what] for what in on_gpus} == on_gpus


@pytest.mark.parametrize(("engine", "smaller"), [("torch", 1), ("vllm", 2)])
def test_only_vllm_samples_with_a_bfloat16_cache(engine, smaller):
    apart = {"placement": "disaggregated", "engine": engine}
    wide, narrow = (
        parts(config(**apart, model={"sampler_dtype": dtype})) for dtype in ("float32", "bfloat16")
    )
    assert wide["KV cache"] == smaller * narrow["KV cache"]
    assert wide["sampling weights"] == 2 * narrow["sampling weights"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": {"preset": "course", "gradient_checkpointing": True}}, "activations"),
        ({"optim": {"microbatch": 4}}, "activations"),
        ({"optim": {"microbatch_tokens": 300}}, "activations"),
        ({"rollout": {"unit_prompts": 2}}, "KV cache"),
        ({"rollout": {"slots": 8}}, "KV cache"),
        ({"rollout": {"slots": 8}}, "sampling logits"),
        ({"loss": {"kl_monitor": False}}, "reference"),
        ({"transport_dtype": "bfloat16"}, "published snapshot"),
    ],
)
def test_what_the_documentation_names_makes_a_part_smaller(change, what):
    base = {"model": {"preset": "course"}, "placement": "disaggregated"}

    assert parts(config(**{**base, **change}))[what] < parts(config(**base))[what]


# ---- Against real tensors --------------------------------------------------------------------


def held(policy: Policy) -> int:
    return sum(tensor.nbytes for tensor in policy.weights().values())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_weights_of_our_policies_are_counted_to_the_byte(preset):
    trial = config(model={"preset": preset})

    assert parts(trial)["weights"] == held(build_policy(trial.model, 0)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_weights_of_hugging_face_models_are_counted_to_the_byte(family, tied, tmp_path):
    path = write_hf_model(tmp_path / "model", family, tied=tied)
    trial = config(model={"path": path})
    policy, _ = build_policy(trial.model, 0)

    by_formula = dimensions_of(json.loads(Path(path, "config.json").read_text()))
    assert by_formula is not None
    assert parts(trial)["weights"] == held(policy)
    assert by_formula.parameters == stored_parameters(Path(path)) == held(policy) // 4


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,down_proj"])
def test_adapters_are_counted_to_the_byte(targets, tmp_path):
    pytest.importorskip("peft")
    path = write_hf_model(tmp_path / "model", "qwen2", tied=True)
    trial = config(model={"path": path, "lora_rank": 3, "lora_targets": targets})
    policy, _ = build_trained_policy(trial.model, 0)

    trained = sum(tensor.nbytes for tensor in policy.trained().values())
    assert parts(trial)["gradients"] == trained
    assert parts(trial)["weights"] == held(build_policy(trial.model, 0)[0]) + trained


def kept_for_backward(policy: Policy, rows: int, length: int) -> int:
    """Return the number of bytes that autograd keeps for one forward pass of the body.

    The first tokens of the rows differ, so packed rows share nothing.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(rows)[:, None].repeat(1, length)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.states_at(ids, torch.ones_like(ids, dtype=torch.bool))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
def test_activations_are_what_autograd_keeps_of_our_policy():
    trial = config(placement="disaggregated", model={"preset": "small"}, optim={"microbatch": 2})
    rows, length = 2, 256 - 1  # the estimate assumes that prompts fill the context

    policy = TransformerLM(PRESETS["small"])
    kept = kept_for_backward(policy, rows, length)
    assert kept == pytest.approx(parts(trial)["activations"], rel=0.03)
    policy.pack_rows()
    assert kept_for_backward(policy, rows, length) < 1.1 * parts(trial)["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_activations_are_what_autograd_keeps_of_hugging_face_models(family, tied, dtype, tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6}
    path = write_hf_model(tmp_path / "model", family, tied=tied, **shape)
    trial = config(
        placement="disaggregated",
        model={"path": path, "dtype": dtype, "packing": False},
        rollout={"max_new_tokens": 24},
        optim={"microbatch": 2},
    )
    rows, length = 2, 64 - 1

    policy, _ = build_policy(trial.model, 0)
    kept = kept_for_backward(policy, rows, length)
    assert kept == pytest.approx(parts(trial)["activations"], rel=0.05)
    policy.pack_rows()
    assert kept_for_backward(policy, rows, length) < 1.1 * parts(trial)["activations"]


def test_the_cache_of_our_engine_is_counted_to_the_byte():
    shape: ModelConfig = PRESETS["small"]
    rollout = {"prompts": 3, "unit_prompts": 2, "group_size": 4}
    trial = config(placement="disaggregated", model={"preset": "small"}, rollout=rollout)
    # Two prompts of four rows each. The estimate assumes that prompts fill the context.
    cache = KVCache(shape.num_layers, 8, shape.num_heads, shape.head_dim, 256, torch.device("cpu"))

    assert parts(trial)["KV cache"] == cache._storage.nbytes


def test_slots_have_a_place_on_shelves_of_twice_their_tokens_at_most():
    shape: ModelConfig = PRESETS["small"]
    rollout = {"prompts": 6, "group_size": 4, "slots": 8}
    trial = config(placement="disaggregated", model={"preset": "small"}, rollout=rollout)
    # The estimate assumes that prompts fill the context of 256 tokens. The shelves have 32, 64, 128
    # and 256 columns, which is less than 2 x 256 together.
    shelves = [
        Shelf(shape, columns, 8, torch.device("cpu"))._storage.nbytes
        for columns in shelf_columns(256)
    ]

    assert 0.9 * parts(trial)["KV cache"] < sum(shelves) <= parts(trial)["KV cache"]


# ---- Comparison with the machine -------------------------------------------------------------


def test_a_trial_that_does_not_fit_is_one_line_with_its_parts():
    need = need_of(config(arm="async_k1", model={"preset": "course"}))
    assert need.estimate is not None
    takes = need.estimate.host_bytes

    assert "memory of a trial" in compare([need], 1, takes, "this machine")
    with pytest.raises(DoesNotFit) as refused:
        compare([need], 1, takes - 1, "this machine")
    assert "\n" not in str(refused.value)
    for word in ("arm async_k1", size(takes), "optimizer moments 511 MB", "docs/memory.md"):
        assert word in str(refused.value)
    with pytest.raises(DoesNotFit, match="2 trials run at the same time"):
        compare([need], 2, takes, "this machine")


@pytest.mark.slow
def test_a_model_whose_sizes_are_not_known_is_said_to_be_not_estimated(tmp_path):
    path = write_hf_model(tmp_path / "model")
    config_file = Path(path, "config.json")
    named = json.loads(config_file.read_text())
    del named["hidden_size"]
    config_file.write_text(json.dumps(named))

    need = need_of(config(model={"path": path}))
    assert need.estimate is None
    assert "not estimated" in compare([need], 1, 1, "this machine")


def test_this_machine_has_memory():
    assert machine_bytes() > 1 << 28


def test_sizes_are_read_easily():
    assert [size(n) for n in (1, 1_499_999, 999_000_000, 12_349_714_432)] == [
        "1 MB",
        "1 MB",
        "999 MB",
        "12.3 GB",
    ]
