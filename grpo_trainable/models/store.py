"""Policies on disk: building, loading and saving them.

A directory holds a policy of this package (config.json, policy.safetensors, tokenizer.json) or a
Hugging Face model. `directory.py` reads everything that can be known without the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_trainable.models.directory import (
    WEIGHTS,
    policy_directory,
    read_own,
    read_tokenizer,
    refuse_settings_of_hugging_face,
)
from grpo_trainable.models.hf import directory as hf_directory
from grpo_trainable.models.hf.adapter import load_adapter
from grpo_trainable.models.hf.json_files import is_hugging_face
from grpo_trainable.models.model_config import PRESETS
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.policy import ActingPolicy, NamedWeights, Policy
from grpo_trainable.models.shape import PolicySettings
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.plugins import load

if TYPE_CHECKING:
    from grpo_trainable.models.hf.lora import LoraPolicy
    from grpo_trainable.models.hf.policy import HFPolicy

# A function that builds (ActingPolicy, Tokenizer) from `config.model` and a seed; see
# `DESCRIBE_ACTING`.
BUILD_ACTING = "grpo_trainable.control.policy:build_control_policy"

# ---- Policies of this package ------------------------------------------------------------------


def save_policy(
    directory: str | Path,
    model: TransformerLM,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write the three files of a policy, with weights in `dtype`. A tied head is stored once."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(dtype).contiguous()
        for name, parameter in unique_parameters(model).items()
    }
    save_file(tensors, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    tokenizer.save(directory / "tokenizer.json")


def load_policy(directory: str | Path) -> tuple[TransformerLM, Tokenizer]:
    """Load a policy of this package, in float32, and its tokenizer.

    Raises:
        ValueError: The directory is not a policy of this package. The message is one line and names
            the file.
    """
    directory = Path(directory)
    config, tokenizer = read_own(directory)
    weights_file = directory / WEIGHTS
    try:
        tensors = load_file(weights_file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights_file}: not a readable safetensors file ({error})") from error
    model = TransformerLM(config, seed=None)
    copy_parameters(unique_parameters(model), tensors, source=str(weights_file))
    return model, tokenizer


# ---- Policies of any kind ----------------------------------------------------------------------


def build_any_policy(model: PolicySettings, seed: int) -> tuple[NamedWeights, Tokenizer]:
    """Build the policy that `config.model` names: a language model, or a policy for `model.env`.

    If the policy starts from adapters, these stay separate, because merging would round them.

    Raises:
        ValueError: A reason listed for `build_policy` applies, or the environment is unavailable.
    """
    if model.env is not None:
        return _build_acting(model, seed)
    return build_policy(model, seed) if model.adapter is None else _adapted(model, seed, apart=True)


def _build_acting(model: PolicySettings, seed: int) -> tuple[ActingPolicy, Tokenizer]:
    return load("model.env", BUILD_ACTING)(model, seed)


def build_policy(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    """Build the untrained language model that `config.model` names, on the CPU.

    The weights are read from a directory, or from a shipped policy if the preset has one.
    Otherwise, the weights are drawn from `seed`, and the shipped story policy provides the
    tokenizer. If the policy starts from adapters, these are merged into the weights. Engines and
    the reference use this policy.

    Raises:
        ValueError: The directory cannot be used. The message is one line that begins with the
            directory.
    """
    policy, tokenizer = _without_adapters(model, seed)
    if model.adapter is not None:
        from grpo_trainable.models.hf.lora import merge
        from grpo_trainable.models.hf.policy import HFPolicy

        assert isinstance(policy, HFPolicy), "other policies have no adapters"
        assert model.lora_rank is not None
        assert model.lora_alpha is not None
        scale = model.lora_alpha / model.lora_rank
        merge(policy, load_adapter(Path(model.adapter)), scale)
    return policy, tokenizer


def _without_adapters(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    policy, tokenizer = _unpacked(model, seed)
    if model.packing:
        try:
            policy.pack_rows()
        except ValueError as error:
            raise ValueError(f"{model.path}: {error}") from error
    return policy, tokenizer


def _unpacked(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    if model.env is not None:
        raise ValueError(f"{model.env}: the policy of this environment is not a language model")
    directory = policy_directory(model)
    if directory is None:
        return TransformerLM(PRESETS[model.preset], seed), read_tokenizer(None)
    if is_hugging_face(directory):
        # The small files are read before the weights, so that a mistake in them is reported early.
        tokenizer = hf_directory.read_tokenizer(directory)
        return _load_hf(model, directory), tokenizer
    refuse_settings_of_hugging_face(model, directory)
    return load_policy(directory)


def build_any_trained_policy(
    model: PolicySettings, seed: int, *, adapters_apart: bool = False
) -> tuple[NamedWeights, Tokenizer]:
    """Build the learner's version of the policy that `build_any_policy` builds.

    Raises:
        ValueError: For the same reasons as in `build_any_policy`.
    """
    if model.env is not None:
        return _build_acting(model, seed)
    return build_trained_policy(model, seed, adapters_apart=adapters_apart)


def build_trained_policy(
    model: PolicySettings, seed: int, *, adapters_apart: bool = False
) -> tuple[Policy, Tokenizer]:
    """Build the learner's version of the policy that `build_policy` builds.

    The policy has adapters and gradient checkpointing if the settings request them. Its `weights`
    have the same names and shapes as in the policy that `build_policy` builds. With
    `adapters_apart`, the names and shapes are the same as in the policy that
    `build_adapted_policy` builds.

    Raises:
        ValueError: For the same reasons as in `build_policy`.
    """
    if model.lora_rank is None:
        policy, tokenizer = build_policy(model, seed)
    else:
        policy, tokenizer = _adapted(model, seed, apart=adapters_apart)
    try:
        if model.gradient_checkpointing:
            policy.checkpoint_gradients()
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    return policy, tokenizer


def build_adapted_policy(model: PolicySettings, seed: int) -> tuple[HFPolicy, Tokenizer]:
    """Build the policy for an engine that keeps adapters separate from the model.

    The policy computes exactly as the learner's policy does.

    Raises:
        ValueError: For the same reasons as in `build_policy`.
    """
    policy, tokenizer = _adapted(model, seed, apart=True)
    return policy.base, tokenizer


def _load_hf(model: PolicySettings, directory: Path) -> HFPolicy:
    hf_directory.refuse_missing_library(str(directory), "transformers")
    from grpo_trainable.models.hf.policy import load_hf_policy

    return load_hf_policy(directory, dtype=model.dtype, head_fp32=model.head_fp32)


def _adapted(model: PolicySettings, seed: int, *, apart: bool) -> tuple[LoraPolicy, Tokenizer]:
    policy, tokenizer = _without_adapters(model, seed)
    hf_directory.refuse_missing_library(str(model.path), "peft")
    from grpo_trainable.models.hf.lora import LoraPolicy
    from grpo_trainable.models.hf.policy import HFPolicy

    assert isinstance(policy, HFPolicy), "other policies have no adapters"
    assert model.lora_rank is not None
    try:
        adapted = LoraPolicy(
            policy,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.lora_targets,
            seed=seed,
            start=None if model.adapter is None else load_adapter(Path(model.adapter)),
            apart=apart,
        )
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    return adapted, tokenizer
