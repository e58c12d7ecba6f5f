"""Log-probs of what was sampled, under the policies that a round compares."""

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
    """Computes log-probs under the law that a config's responses are sampled from."""

    def __init__(self, config: GRPOConfig, end_ids: Sequence[int], ranks: Ranks = ALONE) -> None:
        """`ranks`: those that share the passes without gradient."""
        self._config = config
        self._ranks = ranks
        self._end_ids = end_ids

    def with_entropy(self, model: NamedWeights, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, (B, S) each, in nats; 0 off the mask."""
        return self.of_states(model, states_of(model, batch), batch)

    def of_states(
        self, model: NamedWeights, states: Tensor, batch: TrainBatch
    ) -> tuple[Tensor, Tensor]:
        """The same from the `states_of` the batch, (T, D)."""
        if isinstance(model, ActingPolicy):
            return self._of_actions(model, states, batch)
        assert isinstance(model, Policy), "there is no other kind"
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
        """(B, S) in nats, computed in the microbatches of a gradient step."""
        log_probs = torch.zeros_like(batch.behaviour_log_probs)
        for rows in microbatches(batch, self._config, self._ranks):
            micro = batch.select(rows)
            found, _ = self.with_entropy(model, micro)
            log_probs[rows, : found.shape[1]] = found.to(log_probs.dtype)
        return self._ranks.sum_(log_probs)


def states_of(model: NamedWeights, batch: TrainBatch) -> Tensor:
    """Hidden states (T, D) of the positions that predict what was sampled, row by row."""
    if isinstance(model, ActingPolicy):
        assert batch.observations is not None, "an episode of control has them"
        return model.hidden(batch.observations[batch.response_mask])
    assert isinstance(model, Policy), "there is no other kind"
    return response_states(model, batch.input_ids, batch.response_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWithLogProbs:
    """A batch with the log-probs of its tokens, (B, S) in nats, under policies that stay as they
    are during the round, and what the loss of a gradient step has to know of them all."""

    train_batch: TrainBatch
    # The tokens that the weights before the round sampled themselves, bool (B, S).
    own_tokens: Tensor
    reference: Tensor | None = None  # those of the frozen first policy; None unless asked for
    # Those of the policy before the round; None where the round's first gradient step shows them.
    start: Tensor | None = None
    # The response tokens that the loss counts, bool (B, S); None: all.
    counted: Tensor | None = None
    # The tokens that the loss treats differently in this gradient step, bool (B, S); None where it
    # treats all alike.
    selected: Tensor | None = None
    # What a critic is trained on: its values before the round, and what was earned instead, (B, S);
    # None without a critic.
    values: Tensor | None = None
    returns: Tensor | None = None

    def select(self, rows: Tensor) -> BatchWithLogProbs:
        """Some of the rows, cut to their own longest row."""
        train_batch = self.train_batch.select(rows)
        width = train_batch.input_ids.shape[1]
        apart = ("train_batch", "own_tokens")
        others = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return BatchWithLogProbs(
            train_batch=train_batch,
            own_tokens=self.own_tokens[rows, :width],
            **{
                name: None if values is None else values[rows, :width]
                for name, values in others.items()
            },
        )

    def without_start(self) -> BatchWithLogProbs:
        """The batch for the round's first step, which itself computes `start`."""
        return replace(self, start=None)

    def with_start(self, rows: Tensor, seen: Tensor) -> BatchWithLogProbs:
        """The batch with what the round's first step has `seen` of these rows, (rows, S)."""
        start = self.start
        if start is None:
            start = torch.zeros_like(self.train_batch.behaviour_log_probs)
        else:
            start = start.clone()
        start[rows, : seen.shape[1]] = seen
        return replace(self, start=start)

    @property
    def loss_mask(self) -> Tensor:
        """The tokens that the loss counts, bool (B, S)."""
        return self.train_batch.response_mask if self.counted is None else self.counted


class Reference:
    """A policy that is never trained and gives log-probs of what was sampled.

    It is the one that the config starts from, or one that is given.
    """

    def __init__(
        self,
        config: GRPOConfig,
        tokenizer: Tokenizer,
        device: torch.device,
        policy: NamedWeights | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`policy`: on the device; None: the one that the config starts from is built. `ranks`:
        those that hold it and share its passes."""
        if policy is None:
            policy = build_any_policy(config.model, config.seed)[0].to(device)
        self.model = ranks.divide(policy.requires_grad_(False))
        self._device = device
        self._pad_id = tokenizer.pad_id
        self._log_probs = LogProbs(config, tokenizer.end_ids_with(config.rollout.stop), ranks)

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """(B, S), in nats; 0 off the mask."""
        return self._log_probs.without_gradient(self.model, batch)

    def annotate(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups of one chunk with their `reference_log_probs`.

        They run through the model together, so the same chunk gives the same bits in any
        process on a machine, with as many threads.
        """
        no_advantages = [torch.zeros(len(group.response_ids)) for group in groups]
        batch = collate(groups, no_advantages, self._pad_id).to(self._device)
        values = by_group(groups, self.log_probs(batch).cpu())
        return [
            replace(group, reference_log_probs=value)
            for group, value in zip(groups, values, strict=True)
        ]
