"""The critic, which learns state values alongside the policy and never leaves the learner."""

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

# The names of the critic's tensors in a checkpoint begin with this prefix. Names of policy
# parameters never begin with it.
PREFIX = "critic/"


class ValueHead(nn.Module):
    """Maps each hidden state to a value, in float32 regardless of the body's dtype.

    The weights start at 0, so an untrained critic predicts 0 for every state. Shapes: T positions,
    D width.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Return the values (T,) of hidden states (T, D)."""
        return hidden_TD.float() @ self.weight + self.bias


def trained_body(policy: NamedWeights) -> dict[str, Tensor]:
    """Return, by name, the trained parameters that hidden states depend on.

    These are all trained parameters except an untied head.
    """
    head = policy.head_weight
    places = sum(p is head for _, p in policy.named_parameters(remove_duplicate=False))
    tied = places > 1
    return {name: p for name, p in policy.trained().items() if tied or p is not head}


class Critic:
    """A value head on the policy's body, or on a separate body with the same initial weights.

    The setting `critic.body` chooses between the two.
    """

    def __init__(
        self, config: GRPOConfig, policy: NamedWeights, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        """Build a critic for a policy.

        Args:
            config: The trial's settings.
            policy: The policy in training.
            device: The device of the critic's parameters.
            ranks: The ranks that share the work of the critic's passes. Each rank holds the whole
                critic.
        """
        self._config = config
        self._ranks = ranks
        self._policy = policy
        self._own: NamedWeights | None = None
        if config.critic.body == "own":
            self._own = build_any_trained_policy(config.model, config.seed)[0].to(device)
        self._head = ValueHead(policy.head_weight.shape[1]).to(device)
        self.parameters = self._trained()

    def _trained(self) -> dict[str, Tensor]:
        """Return, by name, the parameters that use the critic's learning rate.

        A shared body belongs to the policy, so it is left out.
        """
        head = {f"{PREFIX}head.{name}": p for name, p in self._head.named_parameters()}
        body = {} if self._own is None else trained_body(self._own)
        return head | {f"{PREFIX}body.{name}": p for name, p in body.items()}

    @property
    def shares_body(self) -> bool:
        """True if the critic uses the policy's body."""
        return self._own is None

    # ---- Values ------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """Return the values of the states before the response tokens, (B, S); 0 off the mask.

        The values are computed in the same microbatches as a gradient step.
        """
        values = torch.zeros_like(batch.behaviour_log_probs)
        for rows in microbatches(batch, self._config, self._ranks):
            micro = batch.select(rows)
            values[rows, : micro.input_ids.shape[1]] = self.of_states(self.states(micro), micro)
        return self._ranks.sum_(values)

    def states(self, batch: TrainBatch) -> Tensor:
        """Return the hidden states that the head reads, (T, D)."""
        body = self._policy if self._own is None else self._own
        return states_of(body, batch)

    def of_states(self, states: Tensor, batch: TrainBatch) -> Tensor:
        """Return the values (B, S) of a batch from its hidden `states`."""
        values = torch.zeros_like(batch.behaviour_log_probs)
        return values.masked_scatter(batch.response_mask, self._head(states))

    # ---- Training ----------------------------------------------------------------------------

    def loss(
        self, values: Tensor, batch: BatchWithLogProbs, tokens: float
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's share of the mean token loss, and a mask (B, S) of clipped tokens.

        Args:
            values: The current values, (B, S).
            batch: The microbatch, with its returns and with the values computed before the round.
            tokens: Number of tokens in the gradient step.
        """
        assert batch.values is not None, "the critic's values must be computed first"
        assert batch.returns is not None, "the critic's values must be computed first"
        mask = batch.loss_mask
        loss, clipped = value_loss(
            values, batch.values, batch.returns, mask, clip=self._config.critic.clip or None
        )
        return aggregate(loss, mask, "token_mean", tokens), clipped

    @property
    def weight(self) -> float:
        """Weight of the value loss relative to the policy loss.

        With a separate body, the weight is 1. A different weight would have no effect, because only
        the critic gets this gradient, and AdamW's steps do not depend on the gradient's scale.
        """
        return self._config.critic.coef if self.shares_body else 1.0

    # ---- Checkpoints -------------------------------------------------------------------------

    def load_state(self, state: Mapping[str, Tensor]) -> bool:
        """If the state contains a matching critic, restore the critic and return True.

        Otherwise, return False. The critic then starts from scratch, for example after PBT has
        changed `loss.advantage`.
        """
        if not self.parameters.keys() <= state.keys():
            return False
        stored = {name: state[name] for name in self.parameters}
        copy_parameters(self.parameters, stored, source="checkpoint's critic")
        return True


class CriticStatistics:
    """Sums over one gradient step of a critic. The method `step` turns them into a `CriticStep`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._tokens = self._clipped = 0

    @torch.no_grad()
    def add(self, loss: Tensor, clipped: Tensor, mask: Tensor) -> None:
        """Add a microbatch.

        Args:
            loss: The microbatch's share of the step's loss, a scalar.
            clipped: Mask of the clipped tokens, (B, S).
            mask: Mask of the tokens that count, (B, S).
        """
        self.loss += float(loss)
        self._tokens += int(mask.sum())
        self._clipped += int((clipped & mask).sum())

    def sum_over(self, ranks: Ranks) -> None:
        """Replace this rank's sums with sums over all ranks."""
        own = torch.tensor([self.loss, self._tokens, self._clipped], dtype=torch.float64)
        self.loss, tokens, clipped = ranks.sum_(own).tolist()
        self._tokens, self._clipped = int(tokens), int(clipped)

    def step(self, taken: StepTaken) -> CriticStep:
        """Return the figures of the whole step."""
        return CriticStep(
            loss=self.loss,
            clip_fraction=self._clipped / max(self._tokens, 1),
            grad_norm=taken.critic_grad_norm,
        )
