"""What a policy's directory says before its weights are read: whether it is one of ours
(config.json, policy.safetensors, tokenizer.json) or one of transformers, its shape and tokenizer.

This file alone tells them apart. No torch is imported, so that the command can ask before anything
starts.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from grpo_trainable.models.hf import directory as hf_directory
from grpo_trainable.models.hf.directory import (
    is_hugging_face,
    local_directory,
    refuse_unknown_targets,
)
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
SHIPPED_POLICY = ASSETS / "policy"  # it writes stories
ARITHMETIC_POLICY = ASSETS / "arithmetic"  # it solves word problems
# The presets whose weights ship; the others start from random ones.
GAMES_POLICY = ASSETS / "games"  # it plays at random
SHIPPED = {"tiny": SHIPPED_POLICY, "arithmetic": ARITHMETIC_POLICY, "games": GAMES_POLICY}
WEIGHTS = "policy.safetensors"
# Called with `model.env`, returns (PolicyShape, Tokenizer). Loaded by name, like an engine: what
# acts in environments builds on models.
DESCRIBE_ACTING = "grpo_trainable.control.tokenizer:describe_control_policy"
POLICY_FILES = ("config.json", "tokenizer.json", WEIGHTS)


# ---- Of ours -----------------------------------------------------------------------------------


def read_own(directory: Path) -> tuple[ModelConfig, Tokenizer]:
    """The shape and the tokenizer of a policy of ours.

    Raises:
        ValueError: the directory is not a policy of ours, in one line that names the file.
    """
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
    return config, tokenizer


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Looks at the names and shapes in the file of a policy's weights, and at its length.

    Raises:
        ValueError: they are not those of the policy's shape, or the file cannot be read.
    """
    path = directory / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    match_shapes(parameter_shapes(config), found, str(path))


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


def check_policy(model: PolicySettings) -> tuple[PolicyShape, Tokenizer]:
    """What a prompt must fit, and its tokenizer, after everything was looked at that can be known
    about the policy before it is trained; only the weights of a large model stay unread.

    Raises:
        ValueError: the directory cannot be used, in one line that begins with it.
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
    return policy_shape(model), hf_directory.read_tokenizer(directory)


def policy_directory(model: PolicySettings) -> Path | None:
    """Where the policy lies; None where its weights are drawn at random."""
    if model.path is not None:
        return local_directory(model.path)
    return None if model.env is not None else SHIPPED.get(model.preset)


def policy_files(model: PolicySettings) -> dict[str, Path]:
    """The files that the policy and its tokenizer are read from, by name.

    Raises:
        ValueError: as `check_policy`.
    """
    directory = policy_directory(model)
    if model.env is not None:
        return {}
    if directory is None:
        return {"tokenizer.json": SHIPPED_POLICY / "tokenizer.json"}
    hugging_face = is_hugging_face(directory)
    names = hf_directory.model_files(directory) if hugging_face else POLICY_FILES
    return {name: directory / name for name in names} | hf_directory.revision_file(directory)


def policy_shape(model: PolicySettings) -> PolicyShape:
    """The shape of the policy that `build_policy` builds."""
    if model.env is not None:
        return _acting(model.env)[0]
    directory = policy_directory(model)
    if directory is not None and is_hugging_face(directory):
        return hf_directory.read_shape(directory)
    config = PRESETS[model.preset] if directory is None else read_config(directory)
    return PolicyShape(context_length=config.context_length, vocab_size=config.vocab_size)


def policy_tokenizer(model: PolicySettings) -> Tokenizer:
    """The tokenizer of the policy that `build_policy` builds."""
    if model.env is not None:
        return _acting(model.env)[1]
    directory = policy_directory(model)
    return read_tokenizer(None if directory is None else str(directory))


def _acting(env: str) -> tuple[PolicyShape, Tokenizer]:
    return load("model.env", DESCRIBE_ACTING)(env)


def read_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a directory, or of the shipped story policy."""
    directory = SHIPPED_POLICY if path is None else local_directory(path)
    if is_hugging_face(directory):
        return hf_directory.read_tokenizer(directory)
    return Tokenizer.load(directory / "tokenizer.json")


def refuse_settings_of_hugging_face(model: PolicySettings, directory: Path) -> None:
    """ValueError where a policy of ours is asked for what only those of transformers can do."""
    asked = {
        "model.dtype": model.dtype != "float32",
        "model.lora_rank": model.lora_rank is not None,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{directory}: {key} is for Hugging Face models, and this is none")
