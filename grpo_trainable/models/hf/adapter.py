"""A directory of LoRA adapters in the format of `peft`: checks, reading and writing.

Importing this module imports neither torch nor peft, so that the launcher can check adapters before
it starts anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable.models.hf.directory import ALL_LINEAR, MATRIX, layers_named, names_in
from grpo_trainable.models.hf.json_files import ADAPTER_CONFIG, lora_alpha, read_json
from grpo_trainable.models.safetensors_header import tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"  # older versions of peft write this file instead of WEIGHTS
# The name of a matrix in WEIGHTS, and its name among the parameters of a model with adapters.
STORED = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
LIVE = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
# Values of `init_lora_weights` that leave the weights of the model itself unchanged.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def adapter_files(directory: Path) -> dict[str, Path]:
    """Return, by name, the files from which adapters are read."""
    return {name: directory / name for name in (ADAPTER_CONFIG, WEIGHTS)}


# ---- Checks --------------------------------------------------------------------------------------


def check_adapter(
    directory: Path,
    rank: int,
    alpha: float | None,
    targets: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Check adapters as far as possible without reading their tensors.

    Args:
        directory: The directory of the adapters.
        rank: The setting `model.lora_rank`.
        alpha: The setting `model.lora_alpha`.
        targets: The setting `model.lora_targets`.
        shapes: Shapes of the model's stored tensors, keyed by the names of the tensors.

    Raises:
        ValueError: A file is missing or damaged, the adapters are not plain LoRA, or they do not
            fit the model. The message is one line that begins with the directory.
    """
    _refuse_other_kinds(directory)
    adapted = _adapted_layers(directory, rank)
    _refuse_other_alpha(directory, 2.0 * rank if alpha is None else alpha)
    for layer, shape in adapted.items():
        own = shapes.get(f"{layer}{MATRIX}", shape)
        if own != shape:
            raise ValueError(
                f"{directory}: the adapter of {layer} is for a matrix of the shape {shape}, but "
                f"the model's matrix has the shape {own}; set model.path to the model "
                "that the adapters belong to"
            )
    named = layers_named(targets, shapes)
    without = [layer for layer in named if layer not in adapted]
    if without and adapted.keys() <= set(named):
        raise ValueError(
            f"{directory}: has no adapter for {without[0]}; adapters can be trained only if they "
            "cover all layers that their target_modules name"
        )


def _refuse_other_kinds(directory: Path) -> None:
    """Check that the adapters are plain LoRA, stored in the safetensors format."""
    config = read_json(directory / ADAPTER_CONFIG)
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    if kind != "LORA":
        raise ValueError(f"{directory}: has adapters of the kind {kind}; valid: LORA")
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{directory}: init_lora_weights={start} changes the weights of the model; save the "
            "adapters as plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    if config.get("alpha_pattern") or config.get("alora_invocation_tokens"):
        raise ValueError(f"{directory}: the adapters are not plain LoRA with one lora_alpha")
    if not (directory / WEIGHTS).is_file():
        pickle = f" ({PICKLE} is a pickle, which runs code when it is read)"
        raise ValueError(
            f"{directory}: no {WEIGHTS} here{pickle if (directory / PICKLE).is_file() else ''}"
        )


def _refuse_other_alpha(directory: Path, alpha: float) -> None:
    """Check that the adapters were trained with `alpha`, which sets their scale in the trial."""
    own = lora_alpha(read_json(directory / ADAPTER_CONFIG))
    if own is None:
        raise ValueError(f"{directory}: {ADAPTER_CONFIG} must give r and lora_alpha")
    if own != alpha:
        raise ValueError(
            f"{directory}: the adapters were trained with a lora_alpha of {own}, not {alpha}; "
            "leave model.lora_alpha out"
        )


def _adapted_layers(directory: Path, rank: int) -> dict[str, tuple[int, int]]:
    """Return the shape of the adapted matrix of each layer, (outputs, inputs)."""
    shapes = tensor_shapes(directory / WEIGHTS)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        stored = STORED.fullmatch(name)
        if stored is None or len(shape) != 2:
            raise ValueError(
                f"{directory}: {WEIGHTS} contains {name}, but plain LoRA has only the matrices "
                "lora_A and lora_B of linear layers"
            )
        found.setdefault(stored[1], {})[stored[2]] = shape
    for layer, matrices in found.items():
        if matrices.keys() != {"A", "B"} or not matrices["A"][0] == matrices["B"][1] == rank:
            raise ValueError(f"{directory}: {layer} must have lora_A and lora_B of the rank {rank}")
    return {layer: (own["B"][0], own["A"][1]) for layer, own in found.items()}


# ---- Reading and writing -------------------------------------------------------------------------


def load_adapter(directory: Path) -> dict[str, Tensor]:
    """Return the adapters in float32, under the names of a model's parameters.

    Raises:
        ValueError: The file cannot be read. The message is one line.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{directory / WEIGHTS}: not a readable safetensors file ({error})"
        ) from error
    return {STORED.sub(r"\1.lora_\2.default.weight", name): t.float() for name, t in stored.items()}


def write_adapter(
    directory: Path,
    adapters: Mapping[str, Tensor],
    *,
    base: str,
    rank: int,
    alpha: float,
    targets: str,
    dtype: torch.dtype,
) -> None:
    """Write adapters so that `peft.PeftModel.from_pretrained` loads them.

    Args:
        directory: Existing directory.
        adapters: The adapters, under the names of a model's parameters.
        base: Directory or hub id of the model that the adapters belong to.
        rank: Rank of the adapters.
        alpha: Numerator of the scale alpha / rank.
        targets: The setting `model.lora_targets`.
        dtype: Type of the stored tensors.
    """
    from safetensors.torch import save_file

    layers = {LIVE.sub(r"\1", name) for name in adapters}
    names = names_in(targets)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": (
            sorted({layer.rpartition(".")[2] for layer in layers})
            if names == [ALL_LINEAR]
            else names
        ),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        LIVE.sub(r"base_model.model.\1.lora_\2.weight", name): tensor.to(dtype).contiguous()
        for name, tensor in adapters.items()
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
