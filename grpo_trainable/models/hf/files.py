"""The files of a Hugging Face model: their names, and their download from the hub.

This module imports only the standard library, because the config uses it and must load quickly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from grpo_trainable.models.hf.json_files import (
    JSON_FILES,
    SHARDS,
    WEIGHTS,
    downloaded,
    is_hub_id,
    read_json,
)
from grpo_trainable.plugins import one_line

INSTALL = "pip install -e '.[hf]'"
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja", SHARDS)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Endings of the small files of a model and its tokenizer, in any layout that transformers reads.
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model")


class NotOnTheHub(ValueError):
    """A model named by its hub id cannot be downloaded. The message is one line."""


def local_directory(path: str, *, weights: bool = True) -> Path:
    """Return `path` if it is a directory. Otherwise, download the model with this hub id.

    A complete earlier download is used without contacting the hub.

    Args:
        path: A directory or a hub id.
        weights: If False, only the small files are downloaded.

    Raises:
        NotOnTheHub: `path` is not a directory, and the hub cannot be reached or has no such model.
            The message is one line.
        ValueError: `path` is neither a directory nor a valid hub id, or the library that downloads
            models is not installed. The message is one line.
    """
    if Path(path).is_dir():
        return Path(path)
    is_file = Path(path).exists()
    if is_file or not is_hub_id(path):
        raise ValueError(
            f"{path}: {'is a file' if is_file else 'no such directory'}; valid: the directory of a "
            "policy of this package or of a Hugging Face causal language model, or a name on the "
            "hub (organisation/name)"
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"{path}: no such directory; to use a model from the Hugging Face hub, run: {INSTALL}"
        )
    from huggingface_hub import snapshot_download

    there = downloaded(path)
    if there is not None and _is_complete(there, weights=weights):
        return there
    wanted = [*JSON_FILES, *(("*.safetensors",) if weights else ())]
    try:
        # Subdirectories hold other formats of the same weights.
        return Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # a network fails in many ways
        raise NotOnTheHub(
            f"{path}: no such directory, and it cannot be downloaded from the Hugging Face hub "
            f"({one_line(error)})"
        ) from error


def _is_complete(directory: Path, *, weights: bool) -> bool:
    """Return True if an earlier download has the wanted files.

    Small files are downloaded together with the weights, or earlier. So the small files are
    complete if the weights are present, even if the model has no tokenizer_config.json.
    """
    small = ("config.json", "tokenizer_config.json")
    if not weights and all((directory / name).is_file() for name in small):
        return True
    try:
        model_files(directory)
        return True
    except ValueError:
        return False


def fetch_small_files(path: Any) -> None:
    """Download the small files of the model at `path`, because some defaults depend on them.

    If `path` is not a hub id, nothing happens.

    Raises:
        ValueError: The files cannot be downloaded. The message is one line.
    """
    if not isinstance(path, str) or not is_hub_id(path):
        return
    try:
        local_directory(path, weights=False)
    except ValueError as error:
        raise ValueError(f"model.path={error}") from error


def model_files(directory: Path) -> list[str]:
    """Return the names of all files that make up the policy and its tokenizer."""
    small = [name for name in SMALL_FILES if (directory / name).is_file()]
    return ["config.json", "tokenizer.json", *small, *weight_files(directory)]


def reward_model_files(directory: Path) -> list[str]:
    """Return the names of all files that make up a reward model and its tokenizer.

    Raises:
        ValueError: The directory does not exist, or has no weights. The message is one line.
    """
    weights = weight_files(directory)
    files = (path for path in directory.iterdir() if path.is_file())
    return [*sorted(path.name for path in files if path.suffix in SMALL_SUFFIXES), *weights]


def revision_file(directory: Path) -> dict[str, Path]:
    """Return the file `refs/main` of a download from the hub, or {} for any other directory.

    `huggingface_hub` needs this file to find the download. Without the file, it contacts the hub.
    """
    main = directory.parent.parent / "refs" / "main"
    return {"refs/main": main} if directory.parent.name == "snapshots" and main.is_file() else {}


def weight_files(directory: Path) -> list[str]:
    """Return the names of the safetensors files that hold the weights.

    Raises:
        ValueError: There are no such files, or a listed file is missing. The message is one line.
    """
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (directory / SHARDS).is_file():
        raise ValueError(f"{directory}: {_why_no_weights(directory)}")
    places = read_json(directory / SHARDS).get("weight_map")
    names = sorted(set(places.values())) if isinstance(places, dict) else []
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"{directory}: {name}, which {SHARDS} lists, is missing")
    if not names:
        raise ValueError(f"{directory / SHARDS}: lists no files")
    return names


def _why_no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which runs code when it is read; only safetensors are read "
            "(if you trust it, load it with transformers and save it with save_pretrained)"
        )
    return f"no {WEIGHTS} here"
