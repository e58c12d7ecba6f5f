"""A policy on disk: a directory of config.json, policy.safetensors and tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import PRESETS, ModelConfig, TransformerLM

ASSETS = Path(__file__).parent.parent / "assets"
SHIPPED_POLICY = ASSETS / "policy"  # it writes stories
ARITHMETIC_POLICY = ASSETS / "arithmetic"  # it solves word problems
# The presets that start from a policy that ships; others start from random weights.
SHIPPED = {"tiny": SHIPPED_POLICY, "arithmetic": ARITHMETIC_POLICY}
POLICY_FILES = ("config.json", "tokenizer.json", "policy.safetensors")


def save_policy(
    directory: str | Path,
    model: TransformerLM,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes the three files; weights are stored as `dtype`, a tied head once."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(dtype).contiguous()
        for name, parameter in unique_parameters(model).items()
    }
    save_file(tensors, directory / "policy.safetensors")
    (directory / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    tokenizer.save(directory / "tokenizer.json")


def load_policy(directory: str | Path) -> tuple[TransformerLM, Tokenizer]:
    """The float32 policy and its tokenizer.

    Raises:
        ValueError: the directory is not a policy of ours, in one line that names the file.
    """
    directory = Path(directory)
    for name in POLICY_FILES:
        if (directory / name).is_symlink():
            raise ValueError(f"{directory / name}: is a link, which may lead out of the directory")
    config = read_config(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the policy only {config.vocab_size}"
        )
    weights_file = directory / "policy.safetensors"
    try:
        tensors = load_file(weights_file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights_file}: not a readable safetensors file ({error})") from error
    model = TransformerLM(config)
    copy_parameters(unique_parameters(model), tensors, source=str(weights_file))
    return model, tokenizer


def read_config(directory: str | Path) -> ModelConfig:
    """The shape of the policy in `directory`; ValueError in one line when there is none."""
    config_file = Path(directory) / "config.json"
    try:
        return ModelConfig(**json.loads(config_file.read_text()))
    except OSError as error:
        raise ValueError(f"{directory}: no policy here (cannot read config.json)") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file}: not a policy's config ({error})") from error


def policy_directory(preset: str, path: str | None) -> Path | None:
    """The directory of the policy that a config names; None where it is random weights."""
    return Path(path) if path is not None else SHIPPED.get(preset)


def build_policy(preset: str, path: str | None, seed: int) -> tuple[TransformerLM, Tokenizer]:
    """The policy that a config names: a directory's, a shipped one, or random weights of a preset.

    Random weights are drawn from `seed`, and have the tokenizer of the shipped story policy.
    """
    directory = policy_directory(preset, path)
    if directory is not None:
        return load_policy(directory)
    return TransformerLM(PRESETS[preset], seed), read_tokenizer(preset, path)


def policy_shape(preset: str, path: str | None) -> ModelConfig:
    """The shape of the policy that `build_policy` builds."""
    directory = policy_directory(preset, path)
    return PRESETS[preset] if directory is None else read_config(directory)


def read_tokenizer(preset: str, path: str | None) -> Tokenizer:
    """The tokenizer of the policy that `build_policy` builds."""
    directory = policy_directory(preset, path) or SHIPPED_POLICY
    return Tokenizer.load(directory / "tokenizer.json")
