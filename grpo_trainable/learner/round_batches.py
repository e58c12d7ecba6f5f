"""From scored groups to the batches of a round, and all that its gradient steps need to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from grpo_trainable.algo import teacher_advantages
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.advantages import Estimated, advantage_estimator
from grpo_trainable.learner.log_probs import LogProbs, Reference, ScoredBatch
from grpo_trainable.learner.training_state import TrainingState
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch, as_rows, by_group, collate

Groups = Sequence[RolloutGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBatch:
    """A rollout batch of the round: its groups, their advantages, and both as rows."""

    groups: Groups
    estimated: Estimated
    rows: TrainBatch


class RoundBatches:
    """Makes batches, and scores them under the policies that stay as they are during a round."""

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
        """`reference`: None where the groups bring its log-probs, or nothing asks for them.

        Raises:
            PluginError: the advantage is a function of the user's that cannot be loaded, or fails
                its trial.
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
        """The advantages of a rollout batch, computed once, before any split; and its rows."""
        estimated = self.estimate(groups)
        rows = self.collate(groups, estimated.advantages)
        return RoundBatch(groups=groups, estimated=estimated, rows=rows)

    def estimate(self, groups: Groups) -> Estimated:
        """The advantages of a rollout batch."""
        return self._advantages(groups, self._state.kl_coefficient.in_reward)

    def collate(self, groups: Groups, advantages: Sequence[Tensor]) -> TrainBatch:
        """The rows of a rollout batch, on the device."""
        return collate(groups, advantages, self._pad_id).to(self._device)

    def values(self, groups: Groups) -> list[Tensor]:
        """What the critic says of the states, (G, R) for each group."""
        assert self._state.critic is not None, "only gae asks for values"
        batch = self.collate(groups, [torch.zeros(len(group.response_ids)) for group in groups])
        return by_group(groups, self._state.critic.values(batch).cpu())

    def taught(
        self, teacher: Reference, batches: Sequence[RoundBatch]
    ) -> tuple[list[RoundBatch], float]:
        """The batches whose tokens also answer for how likely the teacher finds them, and nats of a
        response from the policy that sampled to the teacher."""
        coefficient, taught = self._config.loss.teacher_coef, []
        nats = responses = 0.0
        for batch in batches:
            rows = batch.rows
            behaviour, mask = rows.behaviour_log_probs, rows.response_mask
            added = teacher_advantages(behaviour, teacher.log_probs(rows), mask)
            with_teacher = replace(rows, advantages=rows.advantages + coefficient * added)
            taught.append(replace(batch, rows=with_teacher))
            nats -= float(added.sum())
            responses += int(mask.any(dim=1).sum())
        return taught, nats / max(responses, 1)

    # ---- Scores ------------------------------------------------------------------------------

    def scored(
        self, batches: Sequence[RoundBatch], plan: Sequence[tuple[int, Tensor]]
    ) -> list[ScoredBatch]:
        """The batches under the reference, and where somebody reads it under the policy before the
        round, but for the batch that the first gradient step goes through as a whole. `plan`:
        `step_rows`' of the round."""
        scored = [
            ScoredBatch(
                batch=batch.rows,
                reference=self._reference_log_probs(batch),
                counted=self._counted(batch),
                fresh=self._fresh(batch.groups),
                **self._critic_targets(batch),
            )
            for batch in batches
        ]
        config, fresh = self._config, any(bool(own.fresh.any()) for own in scored)
        is_read = config.importance_cap is not None or config.loss.kl_monitor
        is_read = is_read or (fresh and not config.ratio_sees_sampler)
        for b in _unseen_by_the_first_step(scored, plan) if is_read else ():
            start = self._log_probs.without_gradient(self._state.policy, batches[b].rows)
            scored[b] = replace(scored[b], start=start)
        return scored

    def _critic_targets(self, batch: RoundBatch) -> dict[str, Tensor]:
        """Values and returns of a rollout batch, (B, S); nothing without a critic."""
        critic = batch.estimated.critic
        if critic is None:
            return {}
        targets = {"values": critic.values, "returns": critic.returns}
        return {name: self._as_rows(batch.groups, found) for name, found in targets.items()}

    def _counted(self, batch: RoundBatch) -> Tensor | None:
        """The response tokens that the loss counts, (B, S); None for all."""
        if self._config.rollout.overlong != "filter":
            return None
        finished = torch.cat([group.finished for group in batch.groups]).to(self._device)
        return batch.rows.response_mask & finished.unsqueeze(1)

    def _reference_log_probs(self, batch: RoundBatch) -> Tensor | None:
        """(B, S); None where nothing asks for the reference."""
        known = [group.reference_log_probs for group in batch.groups]
        if self._config.reference_role is None:
            return None
        if all(values is not None for values in known):
            return self._as_rows(batch.groups, cast("list[Tensor]", known))
        assert self._reference is not None, "a generator made no reference pass"
        return self._reference.log_probs(batch.rows)

    def _fresh(self, groups: Groups) -> Tensor:
        """Which tokens the learner's present weights have sampled, bool (B, S).

        In flight a row goes on from what older weights have cached of it, so it is fresh as a whole
        or not at all.
        """
        fresh = [g.response_mask & (g.token_versions == self._state.version) for g in groups]
        if self._config.weight_update == "in_flight":
            wholes = [(own | ~g.response_mask).all(1) for own, g in zip(fresh, groups, strict=True)]
            fresh = [own & whole[:, None] for own, whole in zip(fresh, wholes, strict=True)]
        return self._as_rows(groups, fresh)

    def _as_rows(self, groups: Groups, values: Sequence[Tensor]) -> Tensor:
        """The groups' values (G, R) as rows (B, S) on the device."""
        return as_rows(groups, values).to(self._device)


def _unseen_by_the_first_step(
    batches: Sequence[ScoredBatch], plan: Sequence[tuple[int, Tensor]]
) -> list[int]:
    """Indices of the batches that the first gradient step does not go through as a whole, which
    would show the policy before the round on them; `plan` is `step_rows`' of the round."""
    first, rows = plan[0]
    whole = len(rows) == batches[first].batch.num_rows
    return [b for b in range(len(batches)) if not (whole and b == first)]
