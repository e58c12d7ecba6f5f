"""Weights for vLLM, through its weight-transfer API.

Any of our transports may have delivered a snapshot to this process, in main memory or on a GPU. If
vLLM's model is in this process too, the model reads the tensors where they are. Otherwise vLLM's
own queue carries them to the worker processes, through main memory. `worker.py` is the receiving
end. The transfer needs neither a disk nor a second process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Renaming = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors. If they do not include a head, add the embedding as the head.

    vLLM packs the head for its matrix product, and does not update the packed copy of a tied head
    (vLLM 0.32). vLLM therefore gets an untied model.

    Raises:
        ValueError: The tensors include neither a head nor an embedding. The message is one line.
    """
    if HEAD in tensors:
        return dict(tensors)
    if EMBEDDING not in tensors:
        raise ValueError(
            f"the model has neither {HEAD} nor {EMBEDDING}, which could replace the head"
        )
    return {HEAD: tensors[EMBEDDING], **tensors}


def send_weights(
    llm: LLM, weights: PolicyWeights, renamed: Renaming, *, leaves_process: bool = False
) -> None:
    """Make vLLM compute with a snapshot, beginning with vLLM's next step.

    Args:
        llm: vLLM.
        weights: The snapshot.
        renamed: Function that gives tensors their names in `transformers`.
        leaves_process: True if worker processes hold the model.

    Raises:
        RuntimeError: The snapshot arrived corrupted, or lacks a tensor of the model.
    """
    refuse_torn(weights)
    if leaves_process:
        in_main_memory = {name: tensor.cpu() for name, tensor in weights.tensors.items()}
        weights = replace(weights, tensors=in_main_memory)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": weights, "renamed": renamed}})
    llm.finish_weight_update(weight_version=str(weights.version))


def refuse_torn(weights: PolicyWeights) -> None:
    """Compare the checksum of a snapshot's tensors with the checksum that was published.

    Raises:
        RuntimeError: The snapshot arrived corrupted.
    """
    arrived = storage_checksum(weights.tensors)
    if arrived != weights.checksum:
        raise RuntimeError(
            f"weights version {weights.version} arrived corrupted: checksum {arrived}, published "
            f"{weights.checksum}"
        )


def load_snapshot(model: Any, weights: PolicyWeights, renamed: Renaming) -> None:
    """Load all weights of a snapshot into a vLLM model that is prepared for reloading.

    Raises:
        RuntimeError: The snapshot has no value for some parameter.
    """
    loaded = model.load_weights(iter(untied(renamed(weights.tensors)).items()))
    without = sorted({name for name, _ in model.named_parameters()} - loaded)
    if without:
        raise RuntimeError(
            f"weights version {weights.version} have no value for {without[0]} of vLLM's model"
        )
