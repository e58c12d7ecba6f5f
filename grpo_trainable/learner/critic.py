"""The critic: what a state is worth, learned beside the policy. It never leaves the learner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from grpo_trainable.algo import aggregate, value_loss
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.log_probs import BatchWithLogProbs, states_of
from grpo_trainable.learner.minibatches import microbatches
from grpo_trainable.learner.optimizer import StepTaken
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.policy import NamedWeights
from grpo_trainable.models.store import build_any_trained_policy
from grpo_trainable.protocol.messages import CriticStep
from grpo_trainable.protocol.rollout import TrainBatch

PREFIX = "critic/"  # begins the names of its tensors in a checkpoint, and of no policy's parameter


class ValueHead(nn.Module):
    """One number for each hidden state, in float32 whatever the body computes in. T positions, D
    width.

    It begins at 0: a critic that knows nothing yet leaves the returns as they are.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Values (T,) of hidden states (T, D)."""
        return hidden_TD.float() @ self.weight + self.bias


def trained_body(policy: NamedWeights) -> dict[str, Tensor]:
    """The parameters that training changes and hidden states depend on, by name: all but a head
    that is a matrix of its own."""
    head = policy.head_weight
    places = sum(p is head for _, p in policy.named_parameters(remove_duplicate=False))
    tied = places > 1
    return {name: p for name, p in policy.trained().items() if tied or p is not head}


class Critic:
    """A head for values, on the body of the policy or on one of its own (`critic.body`), which
    begins as the policy does."""

    def __init__(
        self, config: GRPOConfig, policy: NamedWeights, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        """`ranks`: those that share its passes; each of them has it whole."""
        self._config = config
        self._ranks = ranks
        self._policy = policy
        self._own: NamedWeights | None = None
        if config.critic.body == "own":
            self._own = build_any_trained_policy(config.model, config.seed)[0].to(device)
        self._head = ValueHead(policy.head_weight.shape[1]).to(device)
        self.parameters = self._trained()

    def _trained(self) -> dict[str, Tensor]:
        """What its own learning rate trains, by name. A body that it shares is the policy's."""
        head = {f"{PREFIX}head.{name}": p for name, p in self._head.named_parameters()}
        body = {} if self._own is None else trained_body(self._own)
        return head | {f"{PREFIX}body.{name}": p for name, p in body.items()}

    @property
    def shares_body(self) -> bool:
        return self._own is None

    # ---- Values ------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """What the states before the response tokens are worth, (B, S), 0 off the mask; computed in
        the microbatches of a gradient step."""
        values = torch.zeros_like(batch.behaviour_log_probs)
        for rows in microbatches(batch, self._config, self._ranks):
            micro = batch.select(rows)
            values[rows, : micro.input_ids.shape[1]] = self.of_states(self.states(micro), micro)
        return self._ranks.sum_(values)

    def states(self, batch: TrainBatch) -> Tensor:
        """The hidden states (T, D) that the head is put on."""
        body = self._policy if self._own is None else self._own
        return states_of(body, batch)

    def of_states(self, states: Tensor, batch: TrainBatch) -> Tensor:
        """Values (B, S) from `states` of the batch."""
        values = torch.zeros_like(batch.behaviour_log_probs)
        return values.masked_scatter(batch.response_mask, self._head(states))

    # ---- Training ----------------------------------------------------------------------------

    def loss(
        self, values: Tensor, batch: BatchWithLogProbs, tokens: float
    ) -> tuple[Tensor, Tensor]:
        """This microbatch's share of the mean loss of a token, a scalar, and the tokens that were
        clipped, (B, S); `tokens` is how many the gradient step has."""
        assert batch.values is not None, "the round begins with the critic's values"
        assert batch.returns is not None, "the round begins with the critic's values"
        mask = batch.loss_mask
        loss, clipped = value_loss(
            values, batch.values, batch.returns, mask, clip=self._config.critic.clip or None
        )
        return aggregate(loss, mask, "token_mean", tokens), clipped

    @property
    def weight(self) -> float:
        """What the value loss counts beside the policy's. With a body of its own nothing but the
        critic sees its gradient, whose size AdamW makes nothing of."""
        return self._config.critic.coef if self.shares_body else 1.0

    # ---- Checkpoints -------------------------------------------------------------------------

    def load_state(self, state: Mapping[str, Tensor]) -> bool:
        """Goes on from a state, and returns whether it had such a critic; where it had none, as
        after PBT has changed the advantage, the critic begins anew."""
        if not self.parameters.keys() <= state.keys():
            return False
        stored = {name: state[name] for name in self.parameters}
        copy_parameters(self.parameters, stored, source="checkpoint's critic")
        return True


class CriticStatistics:
    """Sums of one gradient step of a critic."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._tokens = self._clipped = 0

    @torch.no_grad()
    def add(self, loss: Tensor, clipped: Tensor, mask: Tensor) -> None:
        """Adds a microbatch: `loss` is its share of the step's, the others are (B, S)."""
        self.loss += float(loss)
        self._tokens += int(mask.sum())
        self._clipped += int((clipped & mask).sum())

    def sum_over(self, ranks: Ranks) -> None:
        """Makes these the sums over all ranks."""
        own = torch.tensor([self.loss, self._tokens, self._clipped], dtype=torch.float64)
        self.loss, tokens, clipped = ranks.sum_(own).tolist()
        self._tokens, self._clipped = int(tokens), int(clipped)

    def step(self, taken: StepTaken) -> CriticStep:
        return CriticStep(
            loss=self.loss,
            clip_fraction=self._clipped / max(self._tokens, 1),
            grad_norm=taken.critic_grad_norm,
        )
