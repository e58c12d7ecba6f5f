"""Weights for vLLM: a backend for its weight-transfer API.

The backend hands a snapshot to vLLM within the same process. Any of our transports may have
delivered the snapshot. The backend needs neither a disk nor a second process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore

BACKEND = "grpo_trainable"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Renaming = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors. If none of them is a head, add the embedding as the head.

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


def send_weights(llm: LLM, weights: PolicyWeights, renamed: Renaming) -> None:
    """Make vLLM compute with a snapshot from its next step on.

    `renamed` gives tensors their names in `transformers`.

    Raises:
        RuntimeError: The snapshot arrived corrupted, or lacks a tensor of the model.
    """
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": weights, "renamed": renamed}})
    llm.finish_weight_update(weight_version=str(weights.version))


def register_backend() -> None:
    """Register our backend with vLLM's factory, once per process."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore
        WeightTransferEngineFactory,
    )
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class NothingToAgree(WeightTransferInitInfo):
        """Empty, because sender and receiver are the same process."""

    @dataclass
    class Snapshot(WeightTransferUpdateInfo):
        """A snapshot of weights, and the function that renames its tensors."""

        weights: PolicyWeights
        renamed: Renaming

    class InProcess(WeightTransferEngine[NothingToAgree, Snapshot]):
        """Passes the tensors of a snapshot to the model, which repacks them layer by layer."""

        init_info_cls, update_info_cls = NothingToAgree, Snapshot

        def init_transfer_engine(self, init_info: NothingToAgree) -> None:
            """Do nothing."""

        def start_weight_update(self) -> None:
            """Prepare the model for reloading."""
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Snapshot) -> None:
            """Load a snapshot into the model."""
            load_snapshot(self.model, update_info.weights, update_info.renamed)

        def finish_weight_update(self) -> None:
            """Repack the loaded weights."""
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Do nothing."""

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcess)


def load_snapshot(model: Any, weights: PolicyWeights, renamed: Renaming) -> None:
    """Load all weights of a snapshot into a vLLM model that is prepared for reloading.

    Raises:
        RuntimeError: The snapshot arrived corrupted, or has no value for some parameter.
    """
    source = f"weights version {weights.version}"
    arrived = storage_checksum(weights.tensors)
    if arrived != weights.checksum:
        raise RuntimeError(
            f"{source} arrived corrupted: checksum {arrived}, published {weights.checksum}"
        )
    loaded = model.load_weights(iter(untied(renamed(weights.tensors)).items()))
    without = sorted({name for name, _ in model.named_parameters()} - loaded)
    if without:
        raise RuntimeError(f"{source} have no value for {without[0]} of vLLM's model")
