"""Find and check the Hugging Face model that a stage starts from, without loading it."""

from __future__ import annotations

from pathlib import Path

from grpo_trainable.models.directory import WEIGHTS
from grpo_trainable.models.hf.directory import read_tokenizer, refuse_unusable
from grpo_trainable.models.hf.json_files import (
    downloaded,
    has_chat_template,
    is_hub_id,
    is_hugging_face,
    read_json,
)
from grpo_trainable.tools.alignment.stages import Stage

CLASSIFIER = "ForSequenceClassification"  # suffix of a classifier's architecture name


def base_model(path: str, stage: Stage) -> Path:
    """Return the directory of the model that `path` names, after checking its files.

    Args:
        path: A directory, or the hub name of a model that is already downloaded. The hub is never
            contacted.
        stage: The stage that trains the model.

    Raises:
        ValueError: If there is no such model, or the stage cannot train it. The message is one line
            that begins with the path.
    """
    directory = Path(path).resolve() if Path(path).is_dir() else _download_of(path)
    if not is_hugging_face(directory):
        if (directory / WEIGHTS).is_file():
            raise ValueError(
                f"{path}: is a policy of this package; write it as a Hugging Face model first: "
                f"python launch/export.py {path} OUT"
            )
        raise ValueError(f"{path}: holds no Hugging Face model (config.json, model.safetensors)")
    refuse_unusable(directory)
    read_tokenizer(directory)  # raises an error if no token ends a response
    kinds = read_json(directory / "config.json").get("architectures") or [""]
    if stage.writes_text and str(kinds[0]).endswith(CLASSIFIER):
        raise ValueError(f"{path}: is a reward model ({kinds[0]}); {stage.name} needs a policy")
    return directory


def _download_of(path: str) -> Path:
    directory = downloaded(path) if is_hub_id(path) else None
    if directory is None:
        remedy = "; the hub is not contacted, so download the model first" * is_hub_id(path)
        raise ValueError(f"{path}: no such directory{remedy}")
    return directory


def refuse_missing_template(directory: Path) -> None:
    """Check that the model has a chat template, which conversations need.

    Raises:
        ValueError: If the model has no chat template. The message is one line.
    """
    if not has_chat_template(directory):
        raise ValueError(
            f"{directory}: has no chat template, which conversations need; use a chat model, add "
            "chat_template.jinja to the model, or write the rows as texts, not as conversations"
        )
