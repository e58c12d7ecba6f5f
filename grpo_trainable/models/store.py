"""A policy on disk: a directory of ours (config.json, policy.safetensors, tokenizer.json) or one of
transformers. This file alone tells them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_trainable.models import hf_directory
from grpo_trainable.models.hf_directory import is_hugging_face, local_directory
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.shape import PolicySettings, PolicyShape
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import PRESETS, ModelConfig, TransformerLM

if TYPE_CHECKING:
    from grpo_trainable.models.hf import HFPolicy

ASSETS = Path(__file__).parent.parent / "assets"
SHIPPED_POLICY = ASSETS / "policy"  # it writes stories
ARITHMETIC_POLICY = ASSETS / "arithmetic"  # it solves word problems
# The presets whose weights ship; the others start from random ones.
GAMES_POLICY = ASSETS / "games"  # it plays at random
SHIPPED = {"tiny": SHIPPED_POLICY, "arithmetic": ARITHMETIC_POLICY, "games": GAMES_POLICY}
POLICY_FILES = ("config.json", "tokenizer.json", "policy.safetensors")


# ---- Of ours -----------------------------------------------------------------------------------


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
    model = TransformerLM(config, seed=None)
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


# ---- Of either kind ----------------------------------------------------------------------------


def build_policy(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    """The policy that a config's `model` names, as it is before any training, on the CPU: a
    directory's, one that ships, or random weights of a preset. Engines and the reference have it.

    Random weights are drawn from `seed` and have the tokenizer of the shipped story policy.

    Raises:
        ValueError: the directory cannot be used, in one line that begins with it.
    """
    directory = policy_directory(model)
    if directory is None:
        return TransformerLM(PRESETS[model.preset], seed), read_tokenizer(None)
    if is_hugging_face(directory):
        tokenizer = hf_directory.read_tokenizer(directory)  # what fails fast comes first
        return _load_hf(model, directory), tokenizer
    _refuse_settings_of_hugging_face(model, directory)
    return load_policy(directory)


def build_trained_policy(model: PolicySettings, seed: int) -> tuple[Policy, Tokenizer]:
    """The same policy for the learner: with adapters and gradient checkpointing where these are
    asked for. Its `weights` have the names and shapes of those that `build_policy` gives.

    Raises:
        ValueError: as `build_policy`.
    """
    policy, tokenizer = build_policy(model, seed)
    if model.lora_rank is not None:
        hf_directory.refuse_missing_library(str(model.path), "peft")
    try:
        if model.lora_rank is not None:
            policy = _with_adapters(policy, model, seed)
        if model.gradient_checkpointing:
            policy.checkpoint_gradients()
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    return policy, tokenizer


def check_policy(model: PolicySettings, seed: int) -> tuple[PolicyShape, Tokenizer]:
    """What a prompt must fit, and its tokenizer, after everything was looked at that can be known
    about the policy before it is trained; only the weights of a large model stay unread.

    Raises:
        ValueError: as `build_policy`.
    """
    directory = policy_directory(model)
    if directory is None or not is_hugging_face(directory):
        _, tokenizer = build_policy(model, seed)
        return policy_shape(model), tokenizer
    hf_directory.refuse_unusable(directory)
    if model.lora_rank is not None:
        hf_directory.refuse_missing_library(str(directory), "peft")
    return policy_shape(model), hf_directory.read_tokenizer(directory)


def policy_directory(model: PolicySettings) -> Path | None:
    """Where the policy lies; None where its weights are drawn at random."""
    if model.path is not None:
        return local_directory(model.path)
    return SHIPPED.get(model.preset)


def policy_files(model: PolicySettings) -> dict[str, Path]:
    """The files that the policy and its tokenizer are read from, by name.

    Raises:
        ValueError: as `build_policy`.
    """
    directory = policy_directory(model)
    if directory is None:
        return {"tokenizer.json": SHIPPED_POLICY / "tokenizer.json"}
    hugging_face = is_hugging_face(directory)
    names = hf_directory.model_files(directory) if hugging_face else POLICY_FILES
    return {name: directory / name for name in names}


def policy_shape(model: PolicySettings) -> PolicyShape:
    """The shape of the policy that `build_policy` builds."""
    directory = policy_directory(model)
    if directory is not None and is_hugging_face(directory):
        return hf_directory.read_shape(directory)
    config = PRESETS[model.preset] if directory is None else read_config(directory)
    return PolicyShape(context_length=config.context_length, vocab_size=config.vocab_size)


def policy_tokenizer(model: PolicySettings) -> Tokenizer:
    """The tokenizer of the policy that `build_policy` builds."""
    directory = policy_directory(model)
    return read_tokenizer(None if directory is None else str(directory))


def read_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a directory, or of the shipped story policy."""
    directory = SHIPPED_POLICY if path is None else local_directory(path)
    if is_hugging_face(directory):
        return hf_directory.read_tokenizer(directory)
    return Tokenizer.load(directory / "tokenizer.json")


def _load_hf(model: PolicySettings, directory: Path) -> HFPolicy:
    hf_directory.refuse_missing_library(str(directory), "transformers")
    from grpo_trainable.models.hf import load_hf_policy

    return load_hf_policy(directory, dtype=model.dtype, head_fp32=model.head_fp32)


def _with_adapters(policy: Policy, model: PolicySettings, seed: int) -> Policy:
    from grpo_trainable.models.hf import HFPolicy
    from grpo_trainable.models.lora import LoraPolicy

    assert isinstance(policy, HFPolicy), "others have no adapters"
    assert model.lora_rank is not None
    return LoraPolicy(
        policy,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.lora_targets,
        seed=seed,
    )


def _refuse_settings_of_hugging_face(model: PolicySettings, directory: Path) -> None:
    """ValueError where a policy of ours is asked for what only those of transformers can do."""
    asked = {
        "model.dtype": model.dtype != "float32",
        "model.lora_rank": model.lora_rank is not None,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{directory}: {key} is for Hugging Face models, and this is none")
