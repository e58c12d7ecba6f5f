"""The small JSON files of a Hugging Face model, and the facts in them that determine defaults.

This module imports only the standard library, because the config uses it and must load quickly.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from grpo_trainable.plugins import one_line

# The weights of a model: one file, or several files that an index lists.
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"
# Keys for the maximum sequence length in the configs of different architectures.
CONTEXT_LENGTH = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# Values of model_type for which tests compare packed rows with padded rows.
PACKED = ("llama", "qwen2", "qwen3")
# Kinds of RoPE whose angles depend only on the position. The tests of `PACKED` use these kinds.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
ADAPTER_CONFIG = "adapter_config.json"  # peft writes this file next to LoRA adapters
JSON_FILES = ("*.json", "*.jinja")  # patterns of the small files


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a Hugging Face model. The defaults apply if the model is not on this machine."""

    has_chat_template: bool = False
    context_length: int | None = None  # maximum tokens of a prompt plus its response
    packs: bool = False  # tests show that packed and padded rows have the same log-probs


def facts_of(path: str) -> ModelFacts | None:
    """Return the facts about a Hugging Face model, or None for any other directory.

    Files that cannot be read count as missing, because a later check of the model reports them.

    Args:
        path: A directory, or the name of a model on the hub. Nothing is downloaded.
    """
    if os.path.isdir(path):
        directory: Path | None = Path(path)
    elif is_hub_id(path):
        directory = downloaded(path)
    else:
        return None
    if directory is None:
        return ModelFacts()
    if not is_hugging_face(directory):
        return None
    return ModelFacts(
        has_chat_template=has_chat_template(directory),
        context_length=context_length(text_config(directory)),
        packs=packs(read_json(directory / "config.json")),
    )


def is_hub_id(text: str) -> bool:
    """Return True if `text` has the form organisation/name. The model need not exist."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def downloaded(hub_id: str) -> Path | None:
    """Return the directory to which files of a model were downloaded from the hub, or None."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (OSError, ValueError):  # there is no download, or the name is invalid
        return None


def is_hugging_face(directory: Path) -> bool:
    """Return True if config.json can be read and describes a Hugging Face model."""
    try:
        config = read_json(directory / "config.json")
    except ValueError:
        return False
    return not config.keys().isdisjoint({"model_type", "architectures"})


def has_chat_template(directory: Path) -> bool:
    """Return True if transformers finds a chat template for this model's prompts.

    tokenizer_config.json may contain one template, or several named templates. If there are
    several, the template named `default` is used.
    """
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        found = read_json(directory / "tokenizer_config.json", missing={}).get("chat_template")
    except ValueError:
        return False
    if isinstance(found, list):
        return any(isinstance(one, dict) and one.get("name") == "default" for one in found)
    return isinstance(found, str)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum context length that a config.json states, in tokens, or None."""
    return next((config[name] for name in CONTEXT_LENGTH if is_count(config.get(name))), None)


def packs(config: Mapping[str, Any]) -> bool:
    """Return True if tests show that packing changes no result of a model with this config.json.

    Two conditions are necessary: every layer attends to all earlier tokens, and the rotation of a
    token depends only on the token's position.
    """
    kinds = config.get("layer_types") or []
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("model_type") in PACKED
        and not config.get("use_sliding_window")
        and isinstance(kinds, list)
        and all(kind == "full_attention" for kind in kinds)
        and isinstance(rope, dict)
        and rope.get("rope_type", rope.get("type", "default")) in FIXED_ROPE
    )


def text_config(directory: Path) -> dict[str, Any]:
    """Return config.json. In a multimodal model, the entries about text take precedence."""
    config = read_json(directory / "config.json")
    part = config.get("text_config")
    return {**config, **part} if isinstance(part, dict) else config


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of the file.

    If there is no file, return `missing`, or raise a ValueError if `missing` is None.
    """
    if missing is not None and not path.is_file():
        return missing
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def lora_alpha(adapter_config: Mapping[str, Any]) -> float | None:
    """Return the alpha for which the scale of LoRA adapters is alpha / rank.

    Return None if the rank or alpha is missing or invalid.

    Args:
        adapter_config: The content of adapter_config.json.
    """
    rank, alpha = adapter_config.get("r"), adapter_config.get("lora_alpha")
    if not is_count(rank) or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return None
    # rsLoRA divides by √r instead of r.
    return float(alpha * math.sqrt(rank) if adapter_config.get("use_rslora") else alpha)


def is_count(value: Any) -> TypeGuard[int]:
    """Return True if `value` is an integer >= 1."""
    return type(value) is int and value >= 1
