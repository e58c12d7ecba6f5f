"""What the learner, scoring and engines know of a language model.

B rows, S positions, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Policy(nn.Module, ABC):
    """A causal language model that ends in one matrix, its head: logits are hidden states @ headᵀ.

    Rows are padded on the right: since no position sees a later one, padding needs no mask.
    """

    context_length: int  # tokens of a prompt and its response together, at most
    vocab_size: int  # V, the rows of the head; a tokenizer may have fewer tokens
    head_dtype: torch.dtype = torch.float32  # in which logits are computed

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""

    @abstractmethod
    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Hidden states (B, S, D) of ids (B, S), normalised and ready for the head.

        Raises:
            ValueError: S is longer than the context.
        """

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The float32 logits (…, V) of hidden states (…, D)."""
        weight = self.head_weight.to(self.head_dtype)
        return F.linear(hidden_states.to(self.head_dtype), weight).float()

    # ---- Tensors by name ---------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Everything that an engine samples with, by name, a tied head once.

        Of a model that is trained or sampled as it is, these are the live parameters; with adapters
        they are new tensors into which the adapters are merged, under the names that the model has
        without adapters.
        """
        return dict(self.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        """The live parameters that gradient steps change, by name: all `weights`, or adapters."""
        return self.weights()

    def frozen(self) -> Collection[str]:
        """The names in `weights` of what training never changes."""
        return [name for name, tensor in self.weights().items() if not tensor.requires_grad]

    def without_adapters(self) -> Policy | None:
        """This policy as it was before any training, sharing its memory; None where training
        overwrites that."""
        return None
