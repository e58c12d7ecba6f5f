"""One gradient step: the gradient of each microbatch, then a step of the optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo import (
    bounded_tokens,
    compute_objective,
    effective_sample_fraction,
    loss_denominator,
    masked_sum,
    token_ratio,
    weights_bounded,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.critic import CriticStatistics
from grpo_trainable.learner.log_probs import BatchWithLogProbs, LogProbs
from grpo_trainable.learner.minibatches import microbatches
from grpo_trainable.learner.optimizer import StepTaken
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.learner.training_state import TrainingState
from grpo_trainable.learner.user_functions import configured_loss, configured_selection
from grpo_trainable.protocol.messages import GradientStep
from grpo_trainable.protocol.rollout import TrainBatch
from grpo_trainable.telemetry.metrics import RATIO_EDGES

# If a loss selects tokens with random draws, this is the last number of the draws' seed.
SELECTION = 2


class GradientSteps:
    """Takes the gradient steps of a policy, and of its critic if there is one."""

    def __init__(
        self,
        config: GRPOConfig,
        state: TrainingState,
        log_probs: LogProbs,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prepare the configured loss.

        Args:
            config: The trial's settings.
            state: The state that the steps change.
            log_probs: Computes log-probs of the policy.
            device: The device on which a user-defined loss is tried.
            ranks: The ranks among which the rows of each step are divided.

        Raises:
            PluginError: A user-defined loss cannot be loaded or fails its test call.
        """
        self._config = config
        self._state = state
        self._log_probs = log_probs
        self._ranks = ranks
        self._objective = partial(
            compute_objective,
            loss=configured_loss(config.loss, device),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            importance_cap=config.importance_cap,
            importance_level=config.loss.importance_level,
            importance_rule=config.loss.importance_rule,
            importance_floor=config.loss.importance_floor,
            kl_estimator=config.loss.kl_estimator,
            aggregation=config.loss.aggregation,
        )
        self._select = configured_selection(config.loss)

    def take(self, batch: BatchWithLogProbs) -> tuple[GradientStep, Tensor]:
        """Take a step, and return it together with log-probs (B, S) of the policy before the step.

        Raises:
            RuntimeError: More than `optim.max_skipped_steps` consecutive steps had a loss or
                gradient that was not finite.
        """
        config, critic = self._config, self._state.critic
        denominator = loss_denominator(
            config.loss.aggregation, batch.loss_mask, config.rollout.max_new_tokens
        )
        batch = self._with_selected(batch)
        tokens = loss_denominator("token_mean", batch.loss_mask, config.rollout.max_new_tokens)
        seen = torch.zeros_like(batch.train_batch.behaviour_log_probs)
        statistics, of_critic = StepStatistics(), CriticStatistics()
        for rows in microbatches(batch.train_batch, config, self._ranks):
            micro = batch.select(rows)
            log_probs, values, loss = self._policy_loss(micro, denominator, statistics)
            if critic is not None and values is not None:
                value_loss, clipped = critic.loss(values, micro, tokens)
                of_critic.add(value_loss, clipped, micro.loss_mask)
                loss = loss + critic.weight * value_loss
            loss.backward()
            seen[rows, : log_probs.shape[1]] = log_probs.detach().to(seen.dtype)
        statistics.sum_over(self._ranks)
        if critic is not None:
            of_critic.sum_over(self._ranks)
        taken = self._state.optimizer.step(statistics.loss + of_critic.loss)
        seen = self._ranks.sum_(seen)
        behaviour = batch.train_batch.behaviour_log_probs
        ess_fraction = effective_sample_fraction(seen, behaviour, batch.loss_mask)
        step = statistics.step(taken, ess_fraction)
        if critic is not None:
            step = replace(step, critic=of_critic.step(taken))
        return step, seen

    def _policy_loss(
        self, micro: BatchWithLogProbs, denominator: float, statistics: StepStatistics
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute a microbatch's share of the policy loss, and add it to `statistics`.

        Returns:
            Log-probs (B, S), the critic's values (B, S) or None, and the loss, a scalar.
        """
        log_probs, entropy, values = self.forward(micro.train_batch)
        mask, old = micro.loss_mask, self._old_log_probs(micro, log_probs.detach())
        loss, clipped = self._objective(
            log_probs,
            old,
            micro.train_batch.behaviour_log_probs,
            micro.reference,
            micro.train_batch.advantages,
            mask,
            kl_coef=self._state.kl_coefficient.in_loss,
            denominator=denominator,
            selected=micro.selected,
        )
        bounded = self._weights_bounded(micro, old)
        statistics.add(loss, clipped, entropy, log_probs, old, mask, bounded)
        return log_probs, values, loss

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropy and the critic's values, (B, S) each.

        Without a critic, the values are None.
        """
        policy, critic = self._state.policy, self._state.critic
        if critic is None:
            return *self._log_probs.with_entropy(policy, batch), None
        states = critic.states(batch)
        values = critic.of_states(states, batch)
        if critic.shares_body:
            return *self._log_probs.of_states(policy, states, batch), values
        return *self._log_probs.with_entropy(policy, batch), values

    def _old_log_probs(self, batch: BatchWithLogProbs, present: Tensor) -> Tensor:
        """Return log-probs (B, S) of the policy whose probability is the ratio's denominator.

        With importance weights, this is the policy before the round. Otherwise, it is the policy
        that sampled the token. If the policy before the round sampled the token, the learner's
        log-prob replaces the sampler's, unless the ratio must show the difference between sampler
        and learner (`ratio_sees_sampler`). The two log-probs differ because an engine may round
        differently from the learner. With a bfloat16 body, the rounding error exceeds the clip
        range of some losses.

        Args:
            batch: The rows.
            present: Log-probs of the policy in training, (B, S).
        """
        # Only the rows of the round's first gradient step have no `start`. In that step, the policy
        # in training is still the policy before the round.
        start = present if batch.start is None else batch.start
        if self._config.importance_cap is not None:
            return start
        behaviour = batch.train_batch.behaviour_log_probs
        if self._config.ratio_sees_sampler:
            return behaviour
        return torch.where(batch.own_tokens, start, behaviour)

    def _weights_bounded(self, batch: BatchWithLogProbs, start: Tensor) -> Tensor | None:
        """Return a mask (B, S) of the tokens with a bounded importance weight.

        Without importance weights, return None.

        Args:
            batch: The rows.
            start: Log-probs of the policy before the round, (B, S).
        """
        loss, cap = self._config.loss, self._config.importance_cap
        if cap is None:
            return None
        return weights_bounded(
            start,
            batch.train_batch.behaviour_log_probs,
            batch.loss_mask,
            cap,
            level=loss.importance_level,
            floor=loss.importance_floor,
        )

    def _with_selected(self, batch: BatchWithLogProbs) -> BatchWithLogProbs:
        """Mark the tokens that the loss treats differently from the others in this gradient step.

        A loss that selects tokens needs a forward pass over the whole step before the step is split
        into microbatches. For other losses, return the batch unchanged.
        """
        if self._select is None:
            return batch
        optimizer = self._state.optimizer
        attempt = optimizer.steps + optimizer.skipped
        present = self._log_probs.without_gradient(self._state.policy, batch.train_batch)
        selected = self._select(
            present,
            self._old_log_probs(batch, present),
            batch.train_batch.advantages,
            batch.loss_mask,
            np.random.default_rng((self._config.seed, attempt, 0, 0, SELECTION)),
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )
        return replace(batch, selected=selected)


# ---- Statistics of a gradient step, summed over its microbatches ---------------------------------


class StepStatistics:
    """Sums over one gradient step. The method `step` turns them into a `GradientStep`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._entropy = 0.0
        self._tokens = self._clipped = self._bounded = self._weights_bounded = 0
        self._ratio_max: list[Tensor] = []
        self._ratio_counts = np.zeros(len(RATIO_EDGES) - 1, dtype=np.int64)

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        clipped: Tensor,
        entropy: Tensor,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        weights_bounded: Tensor | None,
    ) -> None:
        """Add a microbatch.

        Args:
            loss: The microbatch's share of the step's loss, a scalar.
            clipped: Mask of the clipped tokens, (B, S).
            entropy: Entropy of the policy, (B, S).
            log_probs: Log-probs of the policy in training, (B, S).
            old_log_probs: Log-probs in the ratio's denominator, (B, S).
            mask: Mask of the tokens that the loss counts, (B, S).
            weights_bounded: Mask of the tokens with a bounded importance weight, (B, S), or None.
        """
        self.loss += float(loss)
        self._entropy += float(masked_sum(entropy, mask))
        self._tokens += int(mask.sum())
        self._clipped += int((clipped & mask).sum())
        self._bounded += int(bounded_tokens(log_probs, old_log_probs, mask).sum())
        if weights_bounded is not None:
            self._weights_bounded += int(weights_bounded.sum())
        ratio = token_ratio(log_probs, old_log_probs, mask)
        self._ratio_max.append(ratio.max())
        self._ratio_counts += _count_ratios(ratio[mask])

    def sum_over(self, ranks: Ranks) -> None:
        """Replace this rank's sums with sums over all ranks."""
        # Each rank fills only its own entry, so the sum holds the maxima of all ranks. A
        # maximum that is NaN stays NaN.
        largest = torch.zeros(ranks.size, dtype=torch.float64)
        if self._ratio_max:
            largest[ranks.rank] = torch.stack(self._ratio_max).max()
        own = [self.loss, self._entropy, self._tokens, self._clipped, self._bounded]
        own += [self._weights_bounded, *self._ratio_counts.tolist()]
        summed = ranks.sum_(torch.cat([torch.tensor(own, dtype=torch.float64), largest]))
        self.loss, self._entropy, *counted = summed[: len(own)].tolist()
        counts = list(map(int, counted))
        self._tokens, self._clipped, self._bounded, self._weights_bounded = counts[:4]
        self._ratio_counts = np.array(counts[4:])
        self._ratio_max = [summed[len(own) :].max()]

    def step(self, taken: StepTaken, ess_fraction: float) -> GradientStep:
        """Return the figures of the whole step, without its KL."""
        tokens = max(self._tokens, 1)
        return GradientStep(
            loss=self.loss,
            grad_norm=taken.grad_norm,
            entropy_nats=self._entropy / tokens,
            clip_fraction=self._clipped / tokens,
            weights_bounded_fraction=self._weights_bounded / tokens,
            ratio_max=float(torch.stack(self._ratio_max).max()),  # NaN if any ratio is NaN
            bounded_tokens=self._bounded,
            ratio_counts=tuple(self._ratio_counts.tolist()),
            lr=taken.lr,
            ess_fraction=ess_fraction,
            skipped=taken.skipped,
            kl={},
        )


def _count_ratios(ratio: Tensor) -> np.ndarray:
    """Count the finite ratios that fall into each bin of `RATIO_EDGES`.

    Ratios below the first edge or above the last edge count in the outermost bins.
    """
    finite = ratio[ratio.isfinite()].cpu().numpy()
    return np.histogram(finite.clip(RATIO_EDGES[0], RATIO_EDGES[-1]), RATIO_EDGES)[0]
