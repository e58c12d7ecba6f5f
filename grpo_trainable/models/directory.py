"""A policy's directory, examined before its weights are read.

The directory contains a policy of this package (config.json, policy.safetensors, tokenizer.json) or
a Hugging Face model. This module tells the two kinds apart, and reads the shape and the tokenizer
of either kind. The module does not import torch, so that the launcher can check a policy before it
starts anything else.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from grpo_trainable.models.hf import directory as hf_directory
from grpo_trainable.models.hf.adapter import check_adapter
from grpo_trainable.models.hf.directory import refuse_unknown_targets
from grpo_trainable.models.hf.files import (
    NotOnTheHub,
    local_directory,
    model_files,
    revision_file,
)
from grpo_trainable.models.hf.json_files import ADAPTER_CONFIG, is_hugging_face
from grpo_trainable.models.model_config import (
    PRESETS,
    ModelConfig,
    match_shapes,
    parameter_shapes,
)
from grpo_trainable.models.shape import PolicySettings, PolicyShape
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.plugins import load

ASSETS = Path(__file__).parent.parent / "assets"
SHIPPED_POLICY = ASSETS / "policy"  # this policy writes stories
ARITHMETIC_POLICY = ASSETS / "arithmetic"  # this policy solves word problems
GAMES_POLICY = ASSETS / "games"  # this policy plays games at random
# The presets that ship with weights. Other presets start from random weights.
SHIPPED = {"tiny": SHIPPED_POLICY, "arithmetic": ARITHMETIC_POLICY, "games": GAMES_POLICY}
WEIGHTS = "policy.safetensors"
# A function from `model.env` to (PolicyShape, Tokenizer). It is loaded by name, like an engine,
# because the package `control` imports the package `models`.
DESCRIBE_ACTING = "grpo_trainable.control.tokenizer:describe_control_policy"
POLICY_FILES = ("config.json", "tokenizer.json", WEIGHTS)


# ---- Policies of this package ------------------------------------------------------------------


def read_own(directory: Path) -> tuple[ModelConfig, Tokenizer]:
    """Read the shape and the tokenizer of a policy of this package.

    Raises:
        ValueError: The directory is not a policy of this package. The message is one line and names
            the file.
    """
    for name in POLICY_FILES:
        if (directory / name).is_symlink():
            raise ValueError(
                f"{directory / name}: is a link, which may lead out of the directory; replace the "
                "link with a copy of the file"
            )
    config = read_config(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"but the policy has only {config.vocab_size}"
        )
    return config, tokenizer


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Check the length of a policy's weights file, and the names and shapes of its tensors.

    Raises:
        ValueError: The tensors do not match the policy's shape, or the file cannot be read.
    """
    path = directory / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    match_shapes(parameter_shapes(config), found, str(path))


def read_config(directory: str | Path) -> ModelConfig:
    """Read the shape of the policy in `directory`.

    Raises:
        ValueError: The directory contains no policy. The message is one line.
    """
    config_file = Path(directory) / "config.json"
    try:
        return ModelConfig(**json.loads(config_file.read_text()))
    except OSError as error:
        adapters = (Path(directory) / ADAPTER_CONFIG).is_file()
        what = "LoRA adapters, not a whole policy" if adapters else "no policy"
        raise ValueError(f"{directory}: holds {what} (cannot read config.json)") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file}: not the config of a policy ({error})") from error


# ---- Policies of any kind ----------------------------------------------------------------------


def check_policy(model: PolicySettings) -> tuple[PolicyShape, Tokenizer]:
    """Check the policy as far as possible before training, and return its shape and tokenizer.

    Only the names and shapes of the weights are read.

    Raises:
        ValueError: The directory cannot be used. The message is one line that begins with the
            directory.
    """
    directory = policy_directory(model)
    if directory is None:
        return policy_shape(model), policy_tokenizer(model)
    if not is_hugging_face(directory):
        refuse_settings_of_hugging_face(model, directory)
        config, tokenizer = read_own(directory)
        check_weights(directory, config)
        return policy_shape(model), tokenizer
    hf_directory.refuse_unusable(directory)
    shapes = hf_directory.weight_shapes(directory)
    if model.lora_rank is not None:
        hf_directory.refuse_missing_library(str(directory), "peft")
        try:
            refuse_unknown_targets(model.lora_targets, shapes)
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from None
        if model.adapter is not None:
            check_adapter(
                Path(model.adapter), model.lora_rank, model.lora_alpha, model.lora_targets, shapes
            )
    return policy_shape(model), hf_directory.read_tokenizer(directory)


def policy_directory(model: PolicySettings) -> Path | None:
    """Return the directory of the policy, or None if its weights are drawn at random."""
    if model.path is not None:
        try:
            return local_directory(model.path)
        except NotOnTheHub as error:
            if model.adapter is None:
                raise
            raise NotOnTheHub(
                f"{error}; the adapters belong to this model: to use a copy of it, set model.path "
                f"to the copy's directory, and model.adapter={model.adapter}"
            ) from error
    return None if model.env is not None else SHIPPED.get(model.preset)


def policy_files(model: PolicySettings) -> dict[str, Path]:
    """Return, by name, the files from which the policy and its tokenizer are read.

    Raises:
        ValueError: For the same reasons as in `check_policy`.
    """
    directory = policy_directory(model)
    if model.env is not None:
        return {}
    if directory is None:
        return {"tokenizer.json": SHIPPED_POLICY / "tokenizer.json"}
    hugging_face = is_hugging_face(directory)
    names = model_files(directory) if hugging_face else POLICY_FILES
    return {name: directory / name for name in names} | revision_file(directory)


def policy_shape(model: PolicySettings) -> PolicyShape:
    """Return the shape of the policy that `build_policy` builds."""
    if model.env is not None:
        return _acting(model.env)[0]
    directory = policy_directory(model)
    if directory is not None and is_hugging_face(directory):
        return hf_directory.read_shape(directory)
    config = PRESETS[model.preset] if directory is None else read_config(directory)
    return PolicyShape(
        context_length=config.context_length, vocab_size=config.vocab_size, heads=config.num_heads
    )


def policy_tokenizer(model: PolicySettings) -> Tokenizer:
    """Return the tokenizer of the policy that `build_policy` builds."""
    if model.env is not None:
        return _acting(model.env)[1]
    directory = policy_directory(model)
    return read_tokenizer(None if directory is None else str(directory))


def _acting(env: str) -> tuple[PolicyShape, Tokenizer]:
    return load("model.env", DESCRIBE_ACTING)(env)


def read_tokenizer(path: str | None) -> Tokenizer:
    """Read the tokenizer of the policy at `path`.

    If `path` is None, read the tokenizer of the shipped story policy.
    """
    directory = SHIPPED_POLICY if path is None else local_directory(path)
    if is_hugging_face(directory):
        return hf_directory.read_tokenizer(directory)
    return Tokenizer.load(directory / "tokenizer.json")


def refuse_settings_of_hugging_face(model: PolicySettings, directory: Path) -> None:
    """Raise a ValueError if `model` has a setting that only Hugging Face models support."""
    asked = {
        "model.dtype": model.dtype != "float32",
        "model.lora_rank": model.lora_rank is not None,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(
                f"{directory}: {key} is only for Hugging Face models, but this directory has none"
            )
