"""A directory of LoRA adapters, checked through its small files and written in peft's format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import SHIPPED_POLICY, read_config
from grpo_trainable.models.hf.adapter import check_adapter, load_adapter, write_adapter
from grpo_trainable.tasks.input_files import input_files

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
SHAPES = {
    "model.embed_tokens.weight": (9, 8),
    **{f"{layer}.weight": (6, 8) for layer in LAYERS},
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
}
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "/base",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "init_lora_weights": True,
}


def stored(**changed: Any) -> dict[str, np.ndarray]:
    """Return the matrices of both layers. `changed` gives new shapes; None omits a matrix."""
    shapes: dict[str, Any] = {
        f"base_model.model.{layer}.lora_{x}.weight": shape
        for layer in LAYERS
        for x, shape in (("A", (2, 8)), ("B", (6, 2)))
    }
    shapes |= changed
    return {name: np.ones(s, np.float32) for name, s in shapes.items() if s is not None}


def write(directory: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(stored() if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def test_plain_adapters_are_accepted(tmp_path):
    check_adapter(write(tmp_path), 2, 4.0, "q_proj", SHAPES)
    # Layers with another name in the model's files are compared only when the model is loaded.
    check_adapter(tmp_path, 2, 4.0, "q_proj", {f"transformer.{n}": s for n, s in SHAPES.items()})


FIRST = f"base_model.model.{LAYERS[0]}"


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({}, {"peft_type": "IA3"}, "has adapters of the kind IA3; valid: LORA"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights=pissa changes the weights of the"),
        ({}, {"alpha_pattern": {"q_proj": 8}}, "not plain LoRA with one lora_alpha"),
        (
            {f"{FIRST}.lora_magnitude_vector": (6,)},
            {"use_dora": True},
            "contains base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector, but",
        ),
        ({"base_model.model.lm_head.weight": (9, 8)}, {}, "contains base_model.model.lm_head.weig"),
        ({f"{FIRST}.lora_A.weight": (3, 8)}, {}, "must have lora_A and lora_B of the rank 2"),
        ({f"{FIRST}.lora_B.weight": None}, {}, "must have lora_A and lora_B of the rank 2"),
        (
            {f"{FIRST}.lora_A.weight": (2, 5)},
            {},
            r"for a matrix of the shape \(6, 5\), but the model's matrix has the shape \(6, 8\)",
        ),
        (
            {f"{FIRST}.lora_A.weight": None, f"{FIRST}.lora_B.weight": None},
            {"layers_to_transform": [1]},
            "has no adapter for model.layers.0.self_attn.q_proj; adapters can be trained only",
        ),
    ],
)
def test_other_adapters_are_one_line(tmp_path, tensors, config, said):
    directory = write(tmp_path, stored(**tensors), **config)
    with pytest.raises(ValueError, match=said) as error:
        check_adapter(directory, 2, None, "q_proj", SHAPES)
    assert str(error.value).startswith(f"{directory}: ")
    assert "\n" not in str(error.value)


def test_adapters_keep_the_scale_that_they_were_trained_with(tmp_path):
    directory = write(tmp_path)
    with pytest.raises(ValueError, match=r"trained with a lora_alpha of 4\.0, not 8\.0; leave "):
        check_adapter(directory, 2, 8.0, "q_proj", SHAPES)
    of_rank_stabilised = 4 * math.sqrt(2)
    check_adapter(write(tmp_path, use_rslora=True), 2, of_rank_stabilised, "q_proj", SHAPES)
    with pytest.raises(ValueError, match=r"trained with a lora_alpha of 5\.6\d+, not 4\.0; leave "):
        check_adapter(tmp_path, 2, None, "q_proj", SHAPES)
    with pytest.raises(ValueError, match="must give r and lora_alpha"):
        check_adapter(write(tmp_path, lora_alpha="4"), 2, 4.0, "q_proj", SHAPES)


@pytest.mark.parametrize(
    ("there", "said"), [(False, "here$"), (True, r"here \(adapter_model.bin is a pickle, which")]
)
def test_missing_weights_are_one_line(tmp_path, there, said):
    (write(tmp_path) / "adapter_model.safetensors").unlink()
    if there:
        (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match=f"no adapter_model.safetensors {said}"):
        check_adapter(tmp_path, 2, 4.0, "q_proj", SHAPES)


def test_written_adapters_have_the_names_and_the_config_of_peft(tmp_path):
    live = {
        f"{layer}.lora_{x}.default.weight": torch.full(shape, float(i))
        for i, layer in enumerate(LAYERS)
        for x, shape in (("A", (2, 8)), ("B", (6, 2)))
    }
    facts = {"base": "/base", "rank": 2, "alpha": 4.0, "targets": "all-linear"}
    write_adapter(tmp_path, live, dtype=torch.float32, **facts)  # type: ignore[arg-type]
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in stored().items()
    }
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "/base",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    check_adapter(tmp_path, 2, 4.0, "q_proj", SHAPES)
    again = load_adapter(tmp_path)
    assert again.keys() == live.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in live.items())

    facts |= {"alpha": 5.5, "targets": "self_attn.q_proj"}
    write_adapter(tmp_path, live, dtype=torch.bfloat16, **facts)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["target_modules"]) == (5.5, ["self_attn.q_proj"])
    assert {t.dtype for t in load_adapter(tmp_path).values()} == {torch.float32}


def test_a_trial_reads_its_adapters(tmp_path):
    directory = write(tmp_path / "lora")
    model = {"path": str(SHIPPED_POLICY), "adapter": str(directory)}
    config = GRPOConfig.from_dict({"model": model})
    files = {key: path for key, path in input_files(config).items() if "adapter" in key}
    assert files == {
        f"model.adapter/{name}": directory / name
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }


def test_adapters_where_a_whole_policy_is_needed_are_called_so(tmp_path):
    with pytest.raises(ValueError, match="holds LoRA adapters, not a whole policy"):
        read_config(write(tmp_path))
