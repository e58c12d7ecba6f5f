"""Export a trained policy as a Hugging Face directory, or its adapters as a peft directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import policy_directory
from grpo_trainable.models.hf.adapter import write_adapter
from grpo_trainable.models.hf.json_files import is_hugging_face
from grpo_trainable.models.hf.llama import write_llama
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.store import build_policy, build_trained_policy, load_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.plugins import one_line
from grpo_trainable.storage.atomic import new_directory, refuse_occupied
from grpo_trainable.storage.checkpointing import (
    CheckpointError,
    TrialState,
    checkpoints_named,
    newest_whole,
    read_checkpoint,
)
from grpo_trainable.tasks.input_files import InputChanged, refuse_changed_policy

if TYPE_CHECKING:
    from grpo_trainable.models.hf.policy import HFPolicy
    from grpo_trainable.storage.object_store import AnyPath

# Files of a Hugging Face model, other than the weights, that training does not change.
UNCHANGED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)


class ExportError(ValueError):
    """The source cannot be exported. The message is one line that names the source."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Facts about an exported policy."""

    source: AnyPath  # the checkpoint or policy that was read
    round: int | None  # training rounds completed; None if the source is not a checkpoint
    architecture: str
    parameters: int
    dtype: torch.dtype


def export(source: AnyPath, out: Path, dtype: torch.dtype | None = None) -> Exported:
    """Write a policy to the new directory `out`. The directory appears only when it is complete.

    Args:
        source: A checkpoint, the directory of a trial (its newest intact checkpoint is used), or a
            policy of this package.
        out: Directory to create. It may exist if it is empty.
        dtype: Type of the stored weights. By default weights keep the type that training used.

    Raises:
        ExportError: If `source` contains no policy, or if the files of the trial's initial policy
            have changed. The message is one line.
        OSError: If `out` cannot be written, or is neither new nor empty.
    """
    refuse_occupied(out)
    try:
        if _is_policy(source):
            return _export_ours(source, None, out, *load_policy(source), dtype)
        checkpoint = _checkpoint(source)
        return _export_trained(checkpoint, read_checkpoint(checkpoint), out, dtype)
    except (CheckpointError, InputChanged, ValueError) as error:
        raise ExportError(str(error)) from error


def _is_policy(source: AnyPath) -> TypeGuard[Path]:
    if not isinstance(source, Path):
        return False  # an object store contains only experiments
    if is_hugging_face(source):
        raise ExportError(f"{source}: is already a Hugging Face directory")
    return (source / "policy.safetensors").is_file()


def _checkpoint(source: AnyPath) -> AnyPath:
    found = checkpoints_named(source)
    if found == [source]:
        return source
    newest = newest_whole(source)
    if newest is None:
        raise ExportError(f"{source}: none of its checkpoints is intact")
    return newest[0]


def _export_trained(
    source: AnyPath, trial: TrialState, out: Path, dtype: torch.dtype | None
) -> Exported:
    config = GRPOConfig.from_dict(trial.state["config"])
    refuse_changed_policy(config, trial.state["inputs"])
    round_ = int(trial.state["pipeline"]["learner_round"])
    policy, tokenizer = build_policy(config.model, config.seed)
    if isinstance(policy, TransformerLM):
        copy_parameters(policy.weights(), trial.policy, source=str(source))
        return _export_ours(source, round_, out, policy, tokenizer, dtype)
    from grpo_trainable.models.hf.policy import HFPolicy

    assert isinstance(policy, HFPolicy)
    if dtype is not None:
        policy.to(dtype)  # before adapters are merged, so that weights are rounded only once
    copy_parameters(policy.weights(), _merged(config, trial.policy, source), source=str(source))
    beside = policy_directory(config.model)
    assert beside is not None
    return _export_theirs(source, round_, out, policy, beside)


def export_adapters(source: AnyPath, out: Path, dtype: torch.dtype | None = None) -> Exported:
    """Write only the LoRA adapters of a checkpoint, in the format of `peft`.

    Args:
        source: A checkpoint, or the directory of a trial (its newest intact checkpoint is used).
        out: Directory to create. It may exist if it is empty.
        dtype: Type of the stored adapters, by default float32.

    Raises:
        ExportError: If `source` contains no adapters. The message is one line.
        OSError: If `out` cannot be written, or is neither new nor empty.
    """
    refuse_occupied(out)
    try:
        checkpoint = _checkpoint(source)
        trial = read_checkpoint(checkpoint)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    model = GRPOConfig.from_dict(trial.state["config"]).model
    if model.lora_rank is None or model.path is None:
        raise ExportError(f"{checkpoint}: has no adapters, because model.lora_rank was none")
    stored = dtype or torch.float32
    with new_directory(out) as directory:
        write_adapter(
            directory,
            trial.policy,
            base=model.path,
            rank=model.lora_rank,
            alpha=model.lora_alpha or 2 * model.lora_rank,
            targets=model.lora_targets,
            dtype=stored,
        )
    return Exported(
        source=checkpoint,
        round=int(trial.state["pipeline"]["learner_round"]),
        architecture=f"LoRA adapters of rank {model.lora_rank} for {model.path}",
        parameters=sum(tensor.numel() for tensor in trial.policy.values()),
        dtype=stored,
    )


def _merged(
    config: GRPOConfig, trained: Mapping[str, Tensor], source: AnyPath
) -> dict[str, Tensor]:
    """Return all weights of the model. LoRA adapters are merged into the model."""
    if config.model.lora_rank is None:
        return dict(trained)
    from grpo_trainable.models.hf.lora import LoraPolicy

    policy, _ = build_trained_policy(config.model, config.seed)
    assert isinstance(policy, LoraPolicy)
    copy_parameters(policy.trained(), dict(trained), source=str(source))
    return dict(policy.merged())


def _export_ours(
    source: AnyPath,
    round_: int | None,
    out: Path,
    policy: TransformerLM,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
) -> Exported:
    stored = dtype or torch.float32
    with new_directory(out) as directory:
        write_llama(directory, policy.config, policy.weights(), tokenizer, stored)
    return _told(source, round_, "LlamaForCausalLM", policy, stored)


def _export_theirs(
    source: AnyPath,
    round_: int,
    out: Path,
    policy: HFPolicy,
    beside: Path,
) -> Exported:
    model: Any = policy.model
    with new_directory(out) as directory:
        try:
            model.save_pretrained(directory)
        except ValueError as error:  # transformers refuses to save some model settings
            raise ExportError(
                f"{source}: transformers cannot save this model ({one_line(error)})"
            ) from error
        for name in UNCHANGED:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, directory / name)
    return _told(source, round_, type(model).__name__, policy, model.dtype)


def _told(
    source: AnyPath,
    round_: int | None,
    architecture: str,
    policy: torch.nn.Module,
    dtype: torch.dtype,
) -> Exported:
    return Exported(
        source=source,
        round=round_,
        architecture=architecture,
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        dtype=dtype,
    )
