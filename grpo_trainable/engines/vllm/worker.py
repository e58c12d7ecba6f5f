"""The receiving end of the weight transfer, in every process that holds a part of vLLM's model.

In each of these processes, vLLM looks up the class that `process.EXTENSION` names. This lookup
registers our backend, before vLLM builds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_trainable.engines.vllm.process import BACKEND, EXTENSION
from grpo_trainable.engines.vllm.transfer import Renaming, load_snapshot
from grpo_trainable.protocol.rollout import PolicyWeights


class _Unextended:
    """Adds nothing to vLLM's worker."""


def __getattr__(name: str) -> Any:
    if name != EXTENSION.rpartition(".")[2]:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    register_backend()
    return _Unextended


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

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class NothingToAgree(WeightTransferInitInfo):
        """Empty, because snapshots come from the process of the engine."""

    @dataclass
    class Snapshot(WeightTransferUpdateInfo):
        """A snapshot of weights, and the function that renames its tensors."""

        weights: PolicyWeights
        renamed: Renaming

    class SnapshotEngine(WeightTransferEngine[NothingToAgree, Snapshot]):
        """Passes the tensors of a snapshot to the model, which repacks them layer by layer.

        A tensor may be in main memory or on a GPU. The model copies its part of the tensor.
        """

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

    WeightTransferEngineFactory.register_engine(BACKEND, SnapshotEngine)
