"""Settings derived from the LoRA adapters that training starts from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_trainable.config.parsing import started_in
from grpo_trainable.config.schema import CHECKS
from grpo_trainable.config.values import ConfigError, shown
from grpo_trainable.models.hf.json_files import (
    ADAPTER_CONFIG,
    SHARDS,
    WEIGHTS,
    is_hub_id,
    lora_alpha,
    read_json,
)

_LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets")


def with_adapter(data: Mapping[str, Any], base_dir: str | None = None) -> dict[str, Any]:
    """Return a copy of nested settings, completed from the LoRA adapters that they name.

    If `model.path` is a directory of adapters, that directory becomes `model.adapter`, and the
    model to which the adapters belong becomes `model.path`. Missing LoRA settings are taken from
    adapter_config.json. If no setting is missing, the file is not read.

    Args:
        data: Nested settings.
        base_dir: Base directory for relative paths in adapter_config.json. None means the directory
            in which Ray was started.

    Raises:
        ConfigError: The file cannot be read, contradicts a given setting, or names a model that
            this machine does not have.
    """
    model = data.get("model")
    if not isinstance(model, Mapping):
        return dict(data)
    key, base, directory = "model.adapter", model.get("path"), model.get("adapter")
    complete = all(model.get(name) is not None for name in _LORA_SETTINGS)
    if directory is None and isinstance(base, str) and _is_adapter(base):
        key, directory, base = "model.path", base, None
    elif base is None or complete or not isinstance(directory, str):
        return dict(data)  # nothing to fill in, or a mistake that a check reports later
    told = f"{key}={directory}"
    config = _adapter_config(told, directory)
    found = _lora_settings(told, config)
    for name, value in found.items():
        if model.get(name) not in (None, CHECKS[f"model.{name}"].default, value):
            raise ConfigError(
                f"model.{name}={shown(model[name])}: must be {shown(value)}, as in the adapters "
                f"{directory}; leave model.{name} out"
            )
    if base is None:
        named = config.get("base_model_name_or_path")
        base = _base_of(told, directory, named, started_in() if base_dir is None else base_dir)
    return {**data, "model": {**model, "path": base, "adapter": directory, **found}}


def _is_adapter(directory: str) -> bool:
    """Return True if a directory holds adapters but not the weights of a whole model."""
    there = [os.path.isfile(os.path.join(directory, name)) for name in (WEIGHTS, SHARDS)]
    return os.path.isfile(os.path.join(directory, ADAPTER_CONFIG)) and not any(there)


def _adapter_config(told: str, directory: str) -> dict[str, Any]:
    try:
        return read_json(Path(directory) / ADAPTER_CONFIG)
    except ValueError as error:
        raise ConfigError(f"{told}: {error}") from None


def _lora_settings(told: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `_LORA_SETTINGS` for adapters with this adapter_config.json."""
    alpha, targets = lora_alpha(config), config.get("target_modules")
    if (
        alpha is None
        or not (isinstance(targets, list) and targets)
        or not all(isinstance(name, str) for name in targets)
    ):
        raise ConfigError(
            f"{told}: {ADAPTER_CONFIG} must give r, lora_alpha, and target_modules as a list of "
            "names"
        )
    values = (config["r"], alpha, ",".join(sorted(targets)))
    return dict(zip(_LORA_SETTINGS, values, strict=True))


def _base_of(told: str, directory: str, named: Any, base_dir: str) -> str:
    """Return the model that adapters belong to: a directory on this machine, or a hub id."""
    if isinstance(named, str):
        path = os.path.abspath(os.path.join(base_dir, os.path.expanduser(named)))
        if os.path.isdir(path):
            return path
        if is_hub_id(named):
            return named
    raise ConfigError(
        f"{told}: holds LoRA adapters for the model {named or 'none'}, which this machine does not "
        f"have; set model.path to that model, and model.adapter={directory}"
    )
