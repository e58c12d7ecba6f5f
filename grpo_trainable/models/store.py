"""A policy on disk: a directory of config.json, policy.safetensors and tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.shape import PolicySettings, PolicyShape
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import PRESETS, ModelConfig, TransformerLM

SHIPPED_POLICY = Path(__file__).parent.parent / "assets" / "policy"
SHIPPED_PRESET = "tiny"
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


| None, seed: int) -> tuple[TransformerLM, Tokenizer]:
    """The policy a config names: a directory's, the shipped one, or random weights of a preset.

    Only `tiny` ships with weights; other presets start at random weights drawn from `seed`, with
    the shipped tokenizer.
    """
    if path is not None:
        return load_policy(path)
    if preset == SHIPPED_PRESET:
        return load_policy(SHIPPED_POLICY)
    return TransformerLM(PRESETS[preset], seed), read_tokenizer(None)


def policy_shape(preset: str, path: str | None) -> ModelConfig:
    """The shape of the policy that `build_policy` builds."""
    if path is not None or preset == SHIPPED_PRESET:
        return read_config(path or SHIPPED_POLICY)
    return PRESETS[preset]


def read_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of the policy that `build_policy` builds from the same path."""
    return Tokenizer.load(Path(path or SHIPPED_POLICY) / "tokenizer.json")
def build_policy(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    """The policy that a config's `model` names, as it is before any training, on the CPU: a
    directory's, the shipped one, or random weights of a preset. Engines and the reference have it.

    Only `tiny` ships with weights; other presets start at random weights drawn from `seed`, with
    the shipped tokenizer.

    Raises:
        ValueError: the directory cannot be used, in one line that begins with it.
    """
    if model.path is not None:
        return load_policy(model.path)
    if model.preset == SHIPPED_PRESET:
        return load_policy(SHIPPED_POLICY)
    return TransformerLM(PRESETS[model.preset], seed), read_tokenizer(None)


def build_trained_policy(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    """The same policy for the learner: with adapters and gradient checkpointing where these are
    asked for. Its `weights` have the names and shapes of those that `build_policy` gives.

    Raises:
        ValueError: as `build_policy`.
    """
    return build_policy(model, seed)


def policy_shape(model: PolicySettings) -> PolicyShape:
    """The shape of the policy that `build_policy` builds."""
    if model.path is not None or model.preset == SHIPPED_PRESET:
        config = read_config(model.path or SHIPPED_POLICY)
    else:
        config = PRESETS[model.preset]
    return PolicyShape(context_length=config.context_length, vocab_size=config.vocab_size)


def read_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of the policy in the directory `path`, or of the shipped one."""
    return Tokenizer.load(Path(path or SHIPPED_POLICY) / "tokenizer.json")
