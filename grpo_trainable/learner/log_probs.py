"""Log-probs of sampled tokens under the policies that a round compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.minibatches import microbatches
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.models.policy import ActingPolicy, NamedWeights, Policy
from grpo_trainable.models.scoring import response_states, state_log_probs
from grpo_trainable.models.store import build_any_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch, by_group, collate


class LogProbs:
    """Computes log-probs under the distribution from which responses are sampled."""

    def __init__(self, config: GRPOConfig, end_ids: Sequence[int], ranks: Ranks = ALONE) -> None:
        """Prepare the sampling distribution that a config describes.

        Args:
            config: The trial's settings.
            end_ids: The tokens that may end a response.
            ranks: The ranks that share the work of the passes without gradient.
        """
        self._config = config
        self._ranks = ranks
        self._end_ids = end_ids

    def with_entropy(self, model: NamedWeights, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropy, (B, S) each, in nats; 0 off the mask."""
        return self.of_states(model, states_of(model, batch), batch)

    def of_states(
        self, model: NamedWeights, states: Tensor, batch: TrainBatch
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropy from the hidden states (T, D) that `states_of` computed."""
        if isinstance(model, ActingPolicy):
            return self._of_actions(model, states, batch)
        assert isinstance(model, Policy), "there is no other kind of policy"
        return state_log_probs(
            model,
            states,
            batch.target_ids,
            batch.response_mask,
            temperature=self._config.rollout.temperature,
            min_new_tokens=self._config.rollout.min_new_tokens,
            end_ids=self._end_ids,
        )

    def _of_actions(
        self, model: ActingPolicy, states: Tensor, batch: TrainBatch
    ) -> tuple[Tensor, Tensor]:
        mask = batch.response_mask
        taken = batch.target_ids if batch.actions is None else batch.actions
        found = model.log_probs(states, taken[mask], self._config.rollout.temperature)
        rows = torch.zeros_like(batch.behaviour_log_probs)
        log_probs, entropy = (rows.masked_scatter(mask, values) for values in found)
        return log_probs, entropy

    @torch.no_grad()
    def without_gradient(self, model: NamedWeights, batch: TrainBatch) -> Tensor:
        """Return log-probs (B, S) in nats, computed in the same microbatches as a gradient step."""
        log_probs = torch.zeros_like(batch.behaviour_log_probs)
        for rows in microbatches(batch, self._config, self._ranks):
            micro = batch.select(rows)
            found, _ = self.with_entropy(model, micro)
            log_probs[rows, : found.shape[1]] = found.to(log_probs.dtype)
        return self._ranks.sum_(log_probs)


def states_of(model: NamedWeights, batch: TrainBatch) -> Tensor:
    """Return the hidden states (T, D) that predict the sampled tokens, row by row."""
    if isinstance(model, ActingPolicy):
        assert batch.observations is not None, "an acting policy needs observations"
        return model.hidden(batch.observations[batch.response_mask])
    assert isinstance(model, Policy), "there is no other kind of policy"
    return response_states(model, batch.input_ids, batch.response_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWithLogProbs:
    """A batch with log-probs of its tokens, (B, S) in nats, and other inputs of the loss.

    The policies behind these log-probs do not change during the round.
    """

    train_batch: TrainBatch
    # Mask of the tokens that were sampled with the weights from before the round, bool (B, S).
    own_tokens: Tensor
    # Mask of the rows on which the KL is measured, bool (B,). None if the KL is measured on all
    # rows.
    watched: Tensor | None = None
    # Log-probs under the reference policy, valid in the rows that `watched` selects. None if no
    # setting needs them.
    reference: Tensor | None = None
    # Log-probs under the policy before the round. None if the round's first gradient step computes
    # them. If only the KL needs them, they are valid only in the rows that `watched` selects.
    start: Tensor | None = None
    # Mask of the response tokens that the loss counts, bool (B, S). None if the loss counts all.
    counted: Tensor | None = None
    # Mask of the tokens that the loss treats differently from the others in this gradient step,
    # bool (B, S). None if the loss treats all tokens alike.
    selected: Tensor | None = None
    # The critic's values before the round, and its targets, (B, S). None if there is no critic.
    values: Tensor | None = None
    returns: Tensor | None = None

    def select(self, rows: Tensor) -> BatchWithLogProbs:
        """Return some of the rows, cut to the length of the longest selected row."""
        train_batch = self.train_batch.select(rows)
        width = train_batch.input_ids.shape[1]
        apart = ("train_batch", "own_tokens", "watched")
        others = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return BatchWithLogProbs(
            train_batch=train_batch,
            own_tokens=self.own_tokens[rows, :width],
            watched=None if self.watched is None else self.watched[rows],
            **{
                name: None if values is None else values[rows, :width]
                for name, values in others.items()
            },
        )

    def without_start(self) -> BatchWithLogProbs:
        """Return the batch without `start`, which the round's first gradient step computes."""
        return replace(self, start=None)

    def with_start(self, rows: Tensor, seen: Tensor) -> BatchWithLogProbs:
        """Return the batch with `start` filled in for some rows.

        Args:
            rows: The rows of the round's first gradient step.
            seen: The log-probs that this step computed for the rows, (rows, S).
        """
        start = self.start
        if start is None:
            start = torch.zeros_like(self.train_batch.behaviour_log_probs)
        else:
            start = start.clone()
        start[rows, : seen.shape[1]] = seen
        return replace(self, start=start)

    @property
    def loss_mask(self) -> Tensor:
        """Mask of the tokens that the loss counts, bool (B, S)."""
        return self.train_batch.response_mask if self.counted is None else self.counted


class Reference:
    """A frozen policy that computes log-probs of sampled tokens.

    This is the policy that the trial starts from, unless a different policy is passed in.
    """

    def __init__(
        self,
        config: GRPOConfig,
        tokenizer: Tokenizer,
        device: torch.device,
        policy: NamedWeights | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Freeze a policy.

        Args:
            config: The trial's settings.
            tokenizer: The tokenizer of the policy in training.
            device: The device of the policy.
            policy: A policy on the device. None: build the policy that the trial starts from.
            ranks: The ranks that hold the policy and share the work of its passes.
        """
        if policy is None:
            policy = build_any_policy(config.model, config.seed)[0].to(device)
        self.model = ranks.divide(policy.requires_grad_(False))
        self._device = device
        self._pad_id = tokenizer.pad_id
        self._log_probs = LogProbs(config, tokenizer.end_ids_with(config.rollout.stop), ranks)

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Return log-probs (B, S) in nats; 0 off the mask."""
        return self._log_probs.without_gradient(self.model, batch)

    def annotate(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with `reference_log_probs` filled in.

        All groups run through the model together. So, on one machine, all processes with the same
        number of threads compute the same bits for the same groups.
        """
        no_advantages = [torch.zeros(len(group.response_ids)) for group in groups]
        batch = collate(groups, no_advantages, self._pad_id).to(self._device)
        values = by_group(groups, self.log_probs(batch).cpu())
        return [
            replace(group, reference_log_probs=value)
            for group, value in zip(groups, values, strict=True)
        ]
