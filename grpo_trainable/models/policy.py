"""What the learner, scoring and engines know of a policy.

B rows, S positions, D width of the hidden states, V vocabulary; T steps of episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor, nn


class NamedWeights(nn.Module, ABC):
    """A policy of any kind as its weights: what is trained, published, held and written by name."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The weights of the last matrix; its columns are as many as a hidden state has numbers."""
        raise NotImplementedError

    def layers(self) -> Sequence[nn.Module]:
        """The repeated layers, in order: what is gathered at a time where ranks hold a policy
        between them. None by default: then it is gathered as a whole."""
        return ()

    # ---- Tensors by name ---------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Everything that an engine samples with, by name, a tied head once.

        These are the live parameters. Only a policy with adapters makes new tensors, into which
        they are merged, under the names that the model has without them.
        """
        return dict(self.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        """The live parameters that gradient steps change, by name: `weights`, or adapters."""
        return self.weights()

    def frozen(self) -> Collection[str]:
        """The names in `weights` of what training never changes."""
        return [name for name, tensor in self.weights().items() if not tensor.requires_grad]

    def without_adapters(self) -> NamedWeights | None:
        """The policy before any training, in the same memory; None where training overwrites it."""
        return None


class Policy(NamedWeights):
    """A causal language model that ends in one matrix: logits are hidden states times its head.

    Rows are padded on the right. No position sees a later one, so padding needs no mask.
    """

    context_length: int  # tokens of a prompt and its response together, at most
    vocab_size: int  # V, the rows of the head; a tokenizer may have fewer tokens
    head_fp32: bool = True  # whether the head of a body in lower precision computes in float32

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

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Hidden states (T, D) of ids (B, S) at the T positions of `wanted`, bool (B, S), row by
        row.

        Raises:
            ValueError: S is longer than the context.
        """
        return self.hidden_states(input_ids)[wanted]

    @abstractmethod
    def pack_rows(self) -> None:
        """Has `states_at` compute each token once (models/packing.py).

        Raises:
            ValueError: the architecture cannot, in one line.
        """

    @abstractmethod
    def checkpoint_gradients(self) -> None:
        """Has each layer compute its activations again in the backward pass."""

    def head_operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (…, D) and head (V, D), in the precision in which they are multiplied.

        The product and everything after it is at least float32 (`widened`).
        """
        if not self.head_fp32:
            return hidden_states, self.head_weight
        return widened(hidden_states), widened(self.head_weight)

    def refuse_too_long(self, length: int) -> None:
        if length > self.context_length:
            raise ValueError(f"{length} tokens do not fit the context of {self.context_length}")


class ActingPolicy(NamedWeights):
    """A policy that acts on what it observes in an environment, by a law of actions of its own."""

    @property
    @abstractmethod
    def observation_shape(self) -> tuple[int, ...]:
        """The shape of one observation."""

    @property
    @abstractmethod
    def action_numbers(self) -> int:
        """Numbers of a continuous action; 0 where actions are discrete."""

    @abstractmethod
    def hidden(self, observations: Tensor) -> Tensor:
        """Hidden states (T, D) of observations (T, …)."""

    @abstractmethod
    def log_probs(
        self, hidden_TD: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy (T,) in nats of actions that were taken: (T,) int64, or numbers (T,
        `action_numbers`). The entropy carries no gradient."""


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 where its precision is lower."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
