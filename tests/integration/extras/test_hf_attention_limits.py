"""Episodes need a model whose layers attend to all earlier tokens. Other models are refused."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_json_files

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.models.hf.attention_limits import attention_limit, limit_in

transformers = pytest.importorskip("transformers")

MIXED = ["full_attention", "sliding_attention"]
# Entries of config.json, and the attribute that limits attention. Some entries copy config.json
# files from the hub, which omit attributes that have their default value.
LIMITED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: 4096"),
    ({"model_type": "phi3", "sliding_window": 2047}, "sliding_window: 2047"),
    (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
        "layer_types: sliding_attention",
    ),
    ({"model_type": "qwen3", "layer_types": MIXED}, "layer_types: sliding_attention"),
    ({"model_type": "gemma2"}, "layer_types: sliding_attention"),
    ({"model_type": "gemma3_text"}, "layer_types: sliding_attention"),
    (
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}},
        "layer_types: sliding_attention",
    ),
    ({"model_type": "gpt_oss"}, "layer_types: sliding_attention"),
    ({"model_type": "modernbert-decoder"}, "layer_types: sliding_attention"),
    ({"model_type": "llama4_text"}, "layer_types: chunked_attention"),
    ({"model_type": "deepseek_v32"}, "layer_types: indexed_attention"),
    (
        {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "attention_layers: local",
    ),
    ({"model_type": "reformer"}, "attn_layers: local"),
    # Layers with a recurrent state, or with both such a state and attention.
    ({"model_type": "mamba"}, "layer_types: linear_attention"),
    ({"model_type": "falcon_mamba"}, "layer_types: linear_attention"),
    ({"model_type": "mamba2"}, "layer_types: linear_attention"),
    ({"model_type": "bamba"}, "layer_types: linear_attention"),
    ({"model_type": "zamba2"}, "layer_types: linear_attention"),
    ({"model_type": "falcon_h1"}, "layer_types: hybrid"),
    ({"model_type": "recurrent_gemma"}, "layer_types: linear_attention"),
    ({"model_type": "qwen3_next"}, "layer_types: linear_attention"),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layer_types: conv"),
]
UNLIMITED: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "num_hidden_layers": 1},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
    {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4096},
    {"model_type": "qwen3", "layer_types": ["full_attention"] * 2},
    {"model_type": "qwen3_moe", "use_sliding_window": False, "sliding_window": 4096},
    {"model_type": "smollm3"},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "layer_types": ["full_attention"] * 2},
    {"model_type": "gpt2"},
    {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 2]]},
    {"model_type": "glm4_moe_lite"},  # has `mlp_layer_types`
]


def written(directory: Path, config: dict[str, Any]) -> str:
    sizes = {"num_hidden_layers": 2} if "layer_types" in config else {}
    return str(write_json_files(directory, {"architectures": None, **sizes, **config}))


def engine_for_episodes(path: str) -> str:
    config = {"model": {"path": path, "chat_template": "off"}, "env": {"name": "my:Env"}}
    return chosen_engine(GRPOConfig.from_dict(config)).name


@pytest.mark.parametrize(("config", "limit"), LIMITED, ids=lambda value: str(value)[:60])
def test_a_model_that_does_not_attend_to_all_is_refused_before_anything_starts(
    tmp_path: Path, config: dict[str, Any], limit: str
):
    path = written(tmp_path, config)
    message = (
        f"env.name=my:Env: some layers of model.path={path} do not attend to all earlier tokens "
        f"({limit}); choose a model whose layers all do"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        engine_for_episodes(path)


@pytest.mark.parametrize("config", UNLIMITED, ids=str)
def test_a_model_that_attends_to_all_may_play(tmp_path: Path, config: dict[str, Any]):
    assert engine_for_episodes(written(tmp_path, config)) == "hf"


def test_a_window_matters_only_to_episodes(tmp_path: Path):
    path = written(tmp_path, {"model_type": "gemma2"})
    assert chosen_engine(GRPOConfig.from_dict({"model": {"path": path}})).name == "hf"


def test_a_config_that_transformers_cannot_read_is_refused(tmp_path: Path):
    path = written(tmp_path, {"model_type": "gemma2", "layer_types": ["full_attention"] * 3})
    message = rf"^{re.escape(path)}: transformers cannot read it \(.*\)$"
    with pytest.raises(ValueError, match=message):
        attention_limit(Path(path))


@pytest.mark.slow
def test_every_architecture_whose_cache_drops_tokens_is_limited():
    """Compare the kinds of layers with the caches that transformers makes for them."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    mapping: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    limited, unlimited = set(), set()
    for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = mapping.CONFIG_MAPPING[name]().get_text_config(decoder=True)
            layers = transformers.DynamicCache(config=config).layers
        except Exception:  # some architectures need arguments, and some have other caches
            continue
        keeps_all = all(type(layer).__name__ == "DynamicLayer" for layer in layers)
        (unlimited if limit_in(config) is None else limited).add(name)
        assert keeps_all or name in limited
    assert {"mistral", "gemma2", "mamba", "jamba", "llama4", "gpt_neo"} <= limited
    assert {"llama", "qwen2", "qwen3", "gemma", "gpt2", "glm4_moe_lite", "phi"} <= unlimited
