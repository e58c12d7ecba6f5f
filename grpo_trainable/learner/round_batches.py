"""The batches of a round, made from scored groups, with all inputs of the gradient steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from grpo_trainable.algo import teacher_advantages
from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.learner.advantages import Estimated, advantage_estimator
from grpo_trainable.learner.kl_monitor import on_watched_rows, watched_rows
from grpo_trainable.learner.log_probs import BatchWithLogProbs, LogProbs, Reference
from grpo_trainable.learner.training_state import TrainingState
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch, as_rows, by_group, collate

Groups = Sequence[RolloutGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBatch:
    """A rollout batch of the round: its groups, their advantages, and the rows to train on."""

    groups: Groups
    estimated: Estimated
    train_batch: TrainBatch


class RoundBatches:
    """Makes batches with log-probs under the policies that do not change during a round."""

    def __init__(
        self,
        config: GRPOConfig,
        state: TrainingState,
        log_probs: LogProbs,
        reference: Reference | None,
        *,
        pad_id: int,
        device: torch.device,
    ) -> None:
        """Prepare the configured estimator of advantages.

        Args:
            config: The trial's settings.
            state: The policy in training, its critic and the counters.
            log_probs: Computes log-probs of the policy.
            reference: The reference policy. None if the groups already contain its log-probs, or if
                no setting needs them.
            pad_id: The token that pads the rows.
            device: The device of the rows.

        Raises:
            PluginError: A user-defined advantage cannot be loaded or fails its test call.
        """
        self._config = config
        self._state = state
        self._log_probs = log_probs
        self._reference = reference
        self._pad_id = pad_id
        self._device = device
        self._advantages = advantage_estimator(config, self.values)

    # ---- Rows --------------------------------------------------------------------------------

    def batch(self, groups: Groups) -> RoundBatch:
        """Return a rollout batch with its rows.

        The batch's advantages are computed only here, before the batch is split.
        """
        estimated = self.estimate(groups)
        train_batch = self.collate(groups, estimated.advantages)
        return RoundBatch(groups=groups, estimated=estimated, train_batch=train_batch)

    def estimate(self, groups: Groups) -> Estimated:
        """Return the advantages of a rollout batch."""
        return self._advantages(groups, self._state.kl_coefficient.in_reward)

    def collate(self, groups: Groups, advantages: Sequence[Tensor]) -> TrainBatch:
        """Return the rows of a rollout batch, on the device."""
        return collate(groups, advantages, self._pad_id).to(self._device)

    def values(self, groups: Groups) -> list[Tensor]:
        """Return the critic's values of the states, (G, R) for each group."""
        assert self._state.critic is not None, "only loss.advantage=gae needs values"
        batch = self.collate(groups, [torch.zeros(len(group.response_ids)) for group in groups])
        return by_group(groups, self._state.critic.values(batch).cpu())

    def taught(
        self, teacher: Reference, batches: Sequence[RoundBatch]
    ) -> tuple[list[RoundBatch], float]:
        """Add the teacher's advantages to the advantages of the batches' tokens.

        Returns:
            The batches, and the KL from the sampler to the teacher, in nats per response.
        """
        coefficient, taught = self._config.loss.teacher_coef, []
        nats = responses = 0.0
        for batch in batches:
            old = batch.train_batch
            behaviour, mask = old.behaviour_log_probs, old.response_mask
            added = teacher_advantages(behaviour, teacher.log_probs(old), mask)
            new = replace(old, advantages=old.advantages + coefficient * added)
            taught.append(replace(batch, train_batch=new))
            nats -= float(added.sum())
            responses += int(mask.any(dim=1).sum())
        return taught, nats / max(responses, 1)

    # ---- Log-probs ---------------------------------------------------------------------------

    def with_log_probs(
        self, batches: Sequence[RoundBatch], plan: Sequence[tuple[int, Tensor]]
    ) -> list[BatchWithLogProbs]:
        """Return the batches with the log-probs that the gradient steps need.

        The steps need log-probs under the reference and, with some settings, log-probs under the
        policy before the round. For a batch that the first gradient step processes as a whole,
        log-probs under the policy before the round are left out, because that step computes them.
        Log-probs that only the KL needs are computed only for the watched rows, on which the KL is
        measured.

        Args:
            batches: The round's batches.
            plan: The result of `step_rows` for the round.
        """
        config, rows = self._config, [batch.train_batch for batch in batches]
        watched = watched_rows(
            rows,
            [len(group.response_ids) for batch in batches for group in batch.groups],
            schedule.monitored_responses(config),
            seed=config.seed,
            round_=self._state.round,
        )
        reference = self._reference_log_probs(batches, watched)
        found = [
            BatchWithLogProbs(
                train_batch=batch.train_batch,
                watched=watched[b],
                reference=reference[b],
                counted=self._counted(batch),
                own_tokens=self._own_tokens(batch.groups),
                **self._critic_targets(batch),
            )
            for b, batch in enumerate(batches)
        ]
        unseen = _unseen_by_the_first_step(found, plan)
        if self._start_is_read(found):
            for b in unseen:
                found[b] = replace(found[b], start=self._start(rows[b]))
        elif config.loss.kl_monitor and unseen:
            start = on_watched_rows(self._start, rows, watched)
            found = [replace(found[b], start=start[b]) for b in range(len(found))]
        return found

    def _start(self, batch: TrainBatch) -> Tensor:
        """Return log-probs (B, S) under the policy before the round."""
        return self._log_probs.without_gradient(self._state.policy, batch)

    def _start_is_read(self, batches: Sequence[BatchWithLogProbs]) -> bool:
        """Return True if all rows need log-probs under the policy before the round.

        The loss may need them. The KL between sampler and learner also needs them, because it is
        measured on every token for which both used the same weights. The KL to the policy
        before the round needs them only for the watched rows, on which that KL is measured.
        """
        config = self._config
        watches_all = config.loss.kl_monitor and all(batch.watched is None for batch in batches)
        if config.importance_cap is not None or watches_all:
            return True
        any_own = any(bool(batch.own_tokens.any()) for batch in batches)
        return any_own and (config.loss.kl_monitor or not config.ratio_sees_sampler)

    def _critic_targets(self, batch: RoundBatch) -> dict[str, Tensor]:
        """Return the critic's values and returns as rows, (B, S) each, or {} without a critic."""
        critic = batch.estimated.critic
        if critic is None:
            return {}
        targets = {"values": critic.values, "returns": critic.returns}
        return {name: self._as_rows(batch.groups, found) for name, found in targets.items()}

    def _counted(self, batch: RoundBatch) -> Tensor | None:
        """Return a mask (B, S) of the response tokens that the loss counts; None if all count."""
        if self._config.rollout.overlong != "filter":
            return None
        finished = torch.cat([group.finished for group in batch.groups]).to(self._device)
        return batch.train_batch.response_mask & finished.unsqueeze(1)

    def _reference_log_probs(
        self, batches: Sequence[RoundBatch], watched: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return log-probs under the reference, (B, S) for each batch.

        They are valid in the rows on which the KL is measured. If no setting needs them, return
        None for each batch.
        """
        if self._config.reference_role is None:
            return [None] * len(batches)
        known = [[group.reference_log_probs for group in batch.groups] for batch in batches]
        if all(values is not None for own in known for values in own):
            return [
                self._as_rows(batch.groups, cast("list[Tensor]", own))
                for batch, own in zip(batches, known, strict=True)
            ]
        assert self._reference is not None, "a generator computed no log-probs under the reference"
        rows = [batch.train_batch for batch in batches]
        return on_watched_rows(self._reference.log_probs, rows, watched)

    def _own_tokens(self, groups: Groups) -> Tensor:
        """Return a mask (B, S) of the tokens sampled with the learner's current weights.

        With `weight_update=in_flight`, a row that began with older weights keeps the key-value
        cache that these older weights computed. So no token of that row is in the mask, not even a
        token that was sampled with the current weights.
        """
        own = [g.response_mask & (g.token_versions == self._state.version) for g in groups]
        if self._config.weight_update == "in_flight":
            wholes = [(mask | ~g.response_mask).all(1) for mask, g in zip(own, groups, strict=True)]
            own = [mask & whole[:, None] for mask, whole in zip(own, wholes, strict=True)]
        return self._as_rows(groups, own)

    def _as_rows(self, groups: Groups, values: Sequence[Tensor]) -> Tensor:
        """Return the groups' values (G, R) as rows (B, S) on the device."""
        return as_rows(groups, values).to(self._device)


def _unseen_by_the_first_step(
    batches: Sequence[BatchWithLogProbs], plan: Sequence[tuple[int, Tensor]]
) -> list[int]:
    """Return the indices of the batches that the first gradient step does not process as a whole.

    If the first step processes a batch as a whole, that step also computes the batch's log-probs
    under the policy before the round.

    Args:
        batches: The round's batches.
        plan: The result of `step_rows` for the round.
    """
    first, rows = plan[0]
    whole = len(rows) == batches[first].train_batch.num_rows
    return [b for b in range(len(batches)) if not (whole and b == first)]
