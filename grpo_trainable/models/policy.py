"""The interface of a policy, for the learner, for scoring and for engines.

B rows, S positions, D width of the hidden states, V size of the vocabulary, T steps of episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor, nn


class NamedWeights(nn.Module, ABC):
    """A policy of any kind, as a set of named weights.

    The names identify the tensors that are trained, published, loaded and saved.
    """

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The weights of the last matrix.

        The matrix has one column for each component of a hidden state.
        """
        raise NotImplementedError

    def layers(self) -> Sequence[nn.Module]:
        """Return the repeated layers, in order.

        If the policy is divided among learner ranks, they gather one layer at a time. The default
        has no layers, so the policy is gathered as a whole.
        """
        return ()

    # ---- Tensors by name ---------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return, by name, every tensor that an engine samples with.

        A tied head appears once. The tensors are the live parameters, unless the policy merges
        adapters into its weights. A policy that merges adapters returns new, merged tensors under
        the names that the model has without adapters.
        """
        return dict(self.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        """Return, by name, the live parameters that gradient steps change.

        These are the tensors of `weights`, or only the adapters if the policy has adapters.
        """
        return self.weights()

    def frozen(self) -> Collection[str]:
        """Return the names of the tensors in `weights` that training never changes."""
        return [name for name, tensor in self.weights().items() if not tensor.requires_grad]

    def untrained(self) -> NamedWeights | None:
        """Return the untrained policy, or None if training overwrites it.

        The untrained policy shares memory with this policy.
        """
        return None


class Policy(NamedWeights):
    """A causal language model with a linear head: its logits are hidden states times the head.

    Rows are padded on the right. No position sees a later position, so padding needs no mask.
    """

    context_length: int  # maximum number of tokens of a prompt plus its response
    vocab_size: int  # V, the number of rows of the head; a tokenizer may have fewer tokens
    head_fp32: bool = True  # compute the head in float32 even if the body has lower precision

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The weights of the output head, (V, D)."""

    @abstractmethod
    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) of ids (B, S), normalised and ready for the head.

        Raises:
            ValueError: S is longer than the context.
        """

    def states_at(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the hidden states (T, D) of ids (B, S) at the positions of `wanted`, bool (B, S).

        T is the number of these positions. The states are in the order of the rows.

        Raises:
            ValueError: S is longer than the context.
        """
        return self.hidden_states(input_ids)[wanted]

    @abstractmethod
    def pack_rows(self) -> None:
        """Make `states_at` process a token only once if several rows share it (models/packing.py).

        Raises:
            ValueError: The architecture does not support packing. The message is one line.
        """

    @abstractmethod
    def checkpoint_gradients(self) -> None:
        """Make each layer recompute its activations in the backward pass."""

    def head_operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states (…, D) and head (V, D), in the precision that their product uses.

        The logits, and everything computed from them, are at least float32 (`widened`).
        """
        if not self.head_fp32:
            return hidden_states, self.head_weight
        return widened(hidden_states), widened(self.head_weight)

    def refuse_too_long(self, length: int) -> None:
        """Raise a ValueError if `length` tokens exceed the context."""
        if length > self.context_length:
            raise ValueError(f"{length} tokens do not fit the context of {self.context_length}")


class ActingPolicy(NamedWeights):
    """A policy that acts on observations of an environment, with its own action distribution."""

    @property
    @abstractmethod
    def observation_shape(self) -> tuple[int, ...]:
        """The shape of one observation."""

    @property
    @abstractmethod
    def action_numbers(self) -> int:
        """Number of components of a continuous action; 0 for discrete actions."""

    @abstractmethod
    def hidden(self, observations: Tensor) -> Tensor:
        """Return the hidden states (T, D) of observations (T, …)."""

    @abstractmethod
    def log_probs(
        self, hidden_TD: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of the actions taken, (T,), and entropies, (T,), both in nats.

        Discrete actions are (T,) int64, and continuous actions are (T, `action_numbers`). The
        entropy carries no gradient.
        """


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor, converted to float32 if its precision is lower."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
