"""A Hugging Face model on disk, examined through its small files.

This module imports neither torch nor transformers, so that the launcher can check a model before it
starts anything else.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from grpo_trainable.models.hf.files import INSTALL, reward_model_files, weight_files
from grpo_trainable.models.hf.json_files import (
    ADAPTER_CONFIG,
    CONTEXT_LENGTH,
    context_length,
    is_count,
    read_json,
    text_config,
)
from grpo_trainable.models.safetensors_header import tensor_shapes
from grpo_trainable.models.shape import PolicyShape
from grpo_trainable.models.tokenizer import Tokenizer, read_backend
from grpo_trainable.plugins import missing_library

# One of these files holds the vocabulary of a tokenizer.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

# ---- Shape and checks ------------------------------------------------------------------------


def read_shape(directory: Path) -> PolicyShape:
    """Read the length of the context, the size of the vocabulary and the numbers of heads.

    Raises:
        ValueError: config.json lacks the length of the context or the size of the vocabulary. The
            message is one line.
    """
    config = text_config(directory)
    length = context_length(config)
    if length is None:
        raise ValueError(
            f"{directory / 'config.json'}: no {CONTEXT_LENGTH[0]} (maximum context length)"
        )
    if not is_count(config.get("vocab_size")):
        raise ValueError(f"{directory / 'config.json'}: no vocab_size")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return PolicyShape(
        context_length=length,
        vocab_size=config["vocab_size"],
        heads=heads if is_count(heads) else None,
        kv_heads=kv_heads if is_count(kv_heads) else None,
    )


def weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shapes of the stored tensors. Only headers are read.

    Raises:
        ValueError: A file is missing, truncated or not in the safetensors format. The message is
            one line.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weight_files(directory):
        shapes |= tensor_shapes(directory / name)
    return shapes


def refuse_unreadable(directory: Path) -> None:
    """Check, without importing `transformers`, that the library can read a model.

    Raises:
        ValueError: A library is missing; weights are missing; or the architecture is unknown or
            brings its own code. The message is one line and says what to do.
    """
    refuse_missing_library(str(directory), "transformers")
    config = read_json(directory / "config.json")
    if "auto_map" in config:
        raise ValueError(
            f"{directory}: config.json names custom model code (auto_map), which is never run; "
            "if transformers itself knows the architecture, remove auto_map"
        )
    if not _known_to_transformers(config.get("model_type")):
        raise ValueError(
            f"{directory}: the installed version of transformers does not know the architecture "
            f"model_type={json.dumps(config.get('model_type'))}"
        )
    weight_files(directory)


def refuse_other_than_reward_model(directory: Path) -> None:
    """Check the files of a reward model, without importing `transformers`.

    Raises:
        ValueError: The library is missing or cannot read the model, the directory also holds
            adapters, the weights are quantized, or there is no tokenizer. The message is one line.
    """
    refuse_missing_library(str(directory), "transformers")
    files = reward_model_files(directory)
    refuse_unreadable(directory)
    if not any(name in VOCABULARIES for name in files):
        raise ValueError(f"{directory}: has no tokenizer ({' or '.join(VOCABULARIES)})")
    if (directory / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{directory}: holds both a model and {ADAPTER_CONFIG}; merge the adapters into the "
            "model, or remove that file"
        )
    if "quantization_config" in read_json(directory / "config.json"):
        raise ValueError(
            f"{directory}: the weights are quantized, but rewards are computed in float32; choose "
            "a model with unquantized weights"
        )


def refuse_unusable(directory: Path) -> None:
    """Check a policy as far as possible before `transformers` reads its weights.

    Raises:
        ValueError: The library cannot read the model, the directory also holds adapters, or the
            weights are quantized. The message is one line and says what to do.
    """
    refuse_unreadable(directory)
    if (directory / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{directory}: holds both a model and {ADAPTER_CONFIG}; if the model needs no "
            "adapters, remove that file; otherwise set model.path to the model, and model.adapter "
            "to a directory that holds only the adapters"
        )
    if "quantization_config" in read_json(directory / "config.json"):
        raise ValueError(f"{directory}: the weights are quantized and cannot be trained")


def refuse_missing_library(source: str, name: str) -> None:
    """Raise a ValueError if the library `name`, which `source` needs, is not installed."""
    missing = missing_library(name, INSTALL)
    if missing is not None:
        raise ValueError(f"{source}: {missing}")


def _known_to_transformers(model_type: Any) -> bool:
    """Return True if the tables of the installed `transformers` contain an architecture.

    The tables are searched as text, because importing them would take seconds.
    """
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tables = (Path(spec.origin).parent / "models" / "auto").glob("*.py")
    name = f'"{model_type}"'
    return isinstance(model_type, str) and any(
        name in table.read_text(encoding="utf-8") for table in tables
    )


# ---- Tokenizer -------------------------------------------------------------------------------


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json, with the end ids and the padding id that the other files name.

    A response ends with the tokenizer's end-of-text token, which is the first of `end_ids`. A
    response also ends with any end token that generation_config.json lists. If
    generation_config.json lists no end token, the list in config.json is used. If no file names a
    padding token, an end id serves as padding. This is safe, because no result depends on the token
    at a padded position.

    Raises:
        ValueError: A file cannot be read, no end token is named, or the model's vocabulary is too
            small. The message is one line.
    """
    vocab_size = read_shape(directory).vocab_size
    backend = read_backend(directory / "tokenizer.json")
    named = {
        name: read_json(directory / f"{name}.json", missing={})
        for name in ("tokenizer_config", "generation_config")
    }
    of_tokenizer, of_generation = named["tokenizer_config"], named["generation_config"]
    config = text_config(directory)
    listed = _ids(of_generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    ends = [*_token(backend, of_tokenizer.get("eos_token")), *listed]
    pads = [
        *_token(backend, of_tokenizer.get("pad_token")),
        *_ids(of_generation.get("pad_token_id")),
        *_ids(config.get("pad_token_id")),
    ]
    end_ids, pad_ids = (
        list(dict.fromkeys(token for token in tokens if 0 <= token < vocab_size))
        for tokens in (ends, pads)
    )
    if not end_ids:
        raise ValueError(
            f"{directory}: no token ends a response; name one as eos_token_id in "
            "generation_config.json"
        )
    tokenizer = Tokenizer(backend, end_ids=end_ids, pad_id=[*pad_ids, *end_ids][0])
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only "
            f"{vocab_size}"
        )
    return tokenizer


def _token(backend: tokenizers.Tokenizer, named: Any) -> Iterator[int]:
    """Yield the id of a token that is given as text, or as a mapping with `content`."""
    content = named.get("content") if isinstance(named, dict) else named
    token = backend.token_to_id(content) if isinstance(content, str) else None
    if token is not None:
        yield token


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int]


# ---- model.lora_targets --------------------------------------------------------------------------


ALL_LINEAR = "all-linear"  # every linear layer except the head
MATRIX = ".weight"
IN_A_LAYER = re.compile(r"\.\d+\.")  # layers of the body are numbered; embedding and head are not


def names_in(targets: str) -> list[str]:
    """Return the module names in the comma-separated list `targets`."""
    return [name.strip() for name in targets.split(",")]


def refuse_unknown_targets(targets: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the modules that `targets` names are among the stored tensors of a model.

    Raises:
        ValueError: A module does not exist, or is not a linear layer of the body. The message is
            one line.
    """
    names, modules = names_in(targets), _modules(shapes)
    if names == [ALL_LINEAR]:
        return
    linear = sorted({module.rpartition(".")[2] for module, fits in modules.items() if fits})
    valid = f"valid: {ALL_LINEAR}, or some of {', '.join(linear)}"
    for name in names:
        found = [module for module in modules if _is_named(module, [name])]
        if not found:
            raise ValueError(f"model.lora_targets: no layer is called {name!r}; {valid}")
        if not all(modules[module] for module in found):
            raise ValueError(
                f"model.lora_targets: {name} is not a linear layer of the body; {valid}"
            )


def layers_named(targets: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the stored names of those linear layers of the body that `targets` selects."""
    names, modules = names_in(targets), _modules(shapes)
    return [module for module, fits in modules.items() if fits and _is_named(module, names)]


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """For each module that has weights, return True if it is a linear layer of the body."""
    return {
        name.removesuffix(MATRIX): len(shape) == 2 and IN_A_LAYER.search(name) is not None
        for name, shape in shapes.items()
        if name.endswith(MATRIX)
    }


def _is_named(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in names)
