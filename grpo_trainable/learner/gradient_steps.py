"""One gradient step: the objective, microbatch by microbatch, and then the optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo import (
    bounded_tokens,
    compute_objective,
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

SELECTION = 2  # names the random draws of a loss that selects tokens


class GradientSteps:
    """Takes the gradient steps of a policy, and of the critic beside it."""

    def __init__(
        self,
        config: GRPOConfig,
        state: TrainingState,
        log_probs: LogProbs,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`state` is what the steps change; `ranks` share the rows of each step.

        Raises:
            PluginError: the loss is a function of the user's that cannot be loaded, or fails its
                trial.
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
        """Takes a step; returns it with the log-probs (B, S) that it saw, which are those of the
        policy before it.

        Raises:
            RuntimeError: more than `optim.max_skipped_steps` steps in a row were not finite.
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
        step = statistics.step(taken)
        if critic is not None:
            step = replace(step, critic=of_critic.step(taken))
        return step, self._ranks.sum_(seen)

    def _policy_loss(
        self, micro: BatchWithLogProbs, denominator: float, statistics: StepStatistics
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs and the critic's values of a microbatch, (B, S) each, and its share of the
        policy's loss, a scalar, which `statistics` take in."""
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
        """Log-probs, entropy and values, (B, S) each; None without a critic."""
        policy, critic = self._state.policy, self._state.critic
        if critic is None:
            return *self._log_probs.with_entropy(policy, batch), None
        states = critic.states(batch)
        values = critic.of_states(states, batch)
        if critic.shares_body:
            return *self._log_probs.of_states(policy, states, batch), values
        return *self._log_probs.with_entropy(policy, batch), values

    def _old_log_probs(self, batch: BatchWithLogProbs, present: Tensor) -> Tensor:
        """(B, S), of the policy that the ratio is taken to; `present`: of the one in training.

        With importance weights it is the policy before the round. Without, it is the policy that
        sampled; where that is the policy before the round, by the learner's own computation: an
        engine may round otherwise, and a bfloat16 body rounds by more than some losses clip at.
        """
        # Only the round's first step has rows without: its policy is the one before the round.
        start = present if batch.start is None else batch.start
        if self._config.importance_cap is not None:
            return start
        behaviour = batch.train_batch.behaviour_log_probs
        if self._config.ratio_sees_sampler:
            return behaviour
        return torch.where(batch.own_tokens, start, behaviour)

    def _weights_bounded(self, batch: BatchWithLogProbs, start: Tensor) -> Tensor | None:
        """The tokens whose importance weight is bounded, (B, S); None without such weights.

        `start`: log-probs of the policy before the round, (B, S).
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
        """The rows of a gradient step with the tokens that the loss treats differently. A loss that
        does so needs a forward pass of its own, before the step is split into microbatches."""
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


# ---- What a gradient step saw, summed over its microbatches --------------------------------------


class StepStatistics:
    """Sums of one gradient step, which become its `GradientStep`."""

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
        """Adds a microbatch: `loss` is its share of the step's, all others are (B, S).

        `weights_bounded`: the tokens whose importance weight was bounded; None without weights.
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
        """Makes these the sums over all ranks."""
        largest = torch.zeros(ranks.size, dtype=torch.float64)  # one a rank; a sum keeps NaN
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

    def step(self, taken: StepTaken) -> GradientStep:
        """The whole step, its KL still unmeasured."""
        tokens = max(self._tokens, 1)
        return GradientStep(
            loss=self.loss,
            grad_norm=taken.grad_norm,
            entropy_nats=self._entropy / tokens,
            clip_fraction=self._clipped / tokens,
            weights_bounded_fraction=self._weights_bounded / tokens,
            ratio_max=float(torch.stack(self._ratio_max).max()),  # NaN if one is
            bounded_tokens=self._bounded,
            ratio_counts=tuple(self._ratio_counts.tolist()),
            lr=taken.lr,
            skipped=taken.skipped,
            kl={},
        )


def _count_ratios(ratio: Tensor) -> np.ndarray:
    """Finite ratios between the `RATIO_EDGES`; those beyond count in the outermost bins."""
    finite = ratio[ratio.isfinite()].cpu().numpy()
    return np.histogram(finite.clip(RATIO_EDGES[0], RATIO_EDGES[-1]), RATIO_EDGES)[0]
