"""The learner: policy, optimizer and frozen reference. Scored groups in, new weights out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.actors.advantages import Estimated, advantage_estimator, critic_figures
from grpo_trainable.actors.critic import PREFIX, Critic, CriticStatistics
from grpo_trainable.actors.kl_coefficient import KLCoefficient
from grpo_trainable.actors.kl_monitor import KLMonitor, unseen_by_the_first_step
from grpo_trainable.actors.log_probs import LogProbs, Reference, ScoredBatch
from grpo_trainable.actors.minibatches import microbatches, step_rows
from grpo_trainable.actors.optimizer import PolicyOptimizer
from grpo_trainable.actors.process import RoleContext, keep_freed_memory
from grpo_trainable.actors.progress import steps_done
from grpo_trainable.actors.ranks import ALONE, Ranks
from grpo_trainable.actors.step_statistics import StepStatistics
from grpo_trainable.actors.teacher import build_teacher
from grpo_trainable.actors.user_functions import configured_loss, configured_selection
from grpo_trainable.algo import (
    compute_objective,
    loss_denominator,
    teacher_advantages,
    weights_bounded,
)
from grpo_trainable.checkpointing import LearnerFiles, write_learner_files
from grpo_trainable.checksums import checksum
from grpo_trainable.config import GRPOConfig, threads
from grpo_trainable.messages import (
    CriticFigures,
    Drift,
    GradientStep,
    LearnerState,
    Published,
    ResponseFigures,
    Updated,
)
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.store import build_trained_policy
from grpo_trainable.rollout import (
    LiveWeights,
    RolloutGroup,
    TrainBatch,
    as_rows,
    by_group,
    collate,
)
from grpo_trainable.stops import end_ids
from grpo_trainable.timers import StageClock, now
from grpo_trainable.weight_transfer import StagingSender, WeightSender

SELECTION = 2  # names the random draws of a loss that selects tokens


def _no_responses() -> ResponseFigures:
    return ResponseFigures(
        advantages=np.zeros(0, dtype=np.float32), policy_log_probs=None, reference_log_probs=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """What the gradient steps of a round leave to report; by default there were none."""

    steps: list[GradientStep] = field(default_factory=list)
    reference_nll_nats: float | None = None
    sampler_mismatch_nats: float | None = None
    teacher_nats: float | None = None
    kl: dict[str, Drift] = field(default_factory=dict)
    responses: ResponseFigures = field(default_factory=_no_responses)
    critic: CriticFigures | None = None


class Learner:
    """Takes k gradient steps a round and publishes snapshots of the policy.

    With `loss.advantage=gae` it trains a critic as well, which is never published.

    It keeps the reference only while something asks for it (`loss.kl_coef` or `loss.kl_monitor`)
    and the generators do not (`resources.reference`).
    """

    CONCURRENT = ("progress",)

    def __init__(
        self,
        config: GRPOConfig,
        sender: WeightSender | None,
        clock: StageClock | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`sender`: None where another rank publishes. `clock`: that of the process, when another
        role lives in it too. `ranks`: the learners among which this is one."""
        keep_freed_memory()
        r = config.resources
        colocated = config.placement == "colocated"
        self._context = RoleContext(
            threads=threads(r.worker_cpus if colocated else r.learner_cpus),
            gpus=r.worker_gpus if colocated else r.learner_gpus,
            clock=clock,
        )
        self._sender = sender
        self._ranks = ranks
        self._build(config)

    def reset(self, config: GRPOConfig) -> None:
        """Begins anew with a config of the same placement, resources and transport."""
        self._context.clock.reset()
        self.close()
        self._build(config)

    def _build(self, config: GRPOConfig) -> None:
        self.config = config
        model, tokenizer = build_trained_policy(config.model, config.seed)
        device, ranks = self._context.device, self._ranks
        self.policy = model.to(device)
        self._pad_id, self._end_ids = tokenizer.pad_id, end_ids(config, tokenizer)
        self._log_probs = LogProbs(config, self._end_ids, ranks)
        untrained = self.policy.without_adapters()
        self._reference_checksum = checksum((untrained or self.policy).weights())
        self.policy = ranks.divide(self.policy)
        self._parameters = self.policy.trained()
        here = config.reference_role == "learner"
        self.reference = Reference(config, tokenizer, device, untrained, ranks) if here else None
        self._teacher = build_teacher(config, tokenizer, device, ranks)
        self._critic = Critic(config, self.policy, device, ranks) if config.has_critic else None
        self._advantages = advantage_estimator(config, self.values)
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
        self._kl_coefficient = KLCoefficient(config.loss)
        self._select = configured_selection(config.loss)
        critic = {} if self._critic is None else self._critic.parameters
        self.optimizer = PolicyOptimizer(self._parameters, config, critic, ranks)
        self.round = 0

    @property
    def version(self) -> int:
        """Gradient steps that the policy has taken."""
        return self.optimizer.steps

    def warm_up(self, prompt_tokens: int) -> None:
        """Does once what is slow the first time: one microbatch forward and backward, each row with
        `prompt_tokens` and the longest response, and a step of a throw-away optimizer.

        Nothing of it remains but warm code and memory; the gradients are dropped.
        """
        with self._context.call():
            batch = self._made_up_batch(prompt_tokens)
            if self.reference is not None:
                self.reference.log_probs(batch)
            if self._teacher is not None:
                self._teacher.log_probs(batch)
            log_probs, _, values = self._forward(batch)
            (log_probs.sum() if values is None else log_probs.sum() + values.sum()).backward()
            self.optimizer.warm_up()
            self._context.clock.synchronize()
        self._context.clock.reset()

    def _made_up_batch(self, prompt_tokens: int) -> TrainBatch:
        """As many rows as a microbatch of this config has at most, each as long as can be."""
        rollout = self.config.rollout
        optim, length = self.config.optim, prompt_tokens + rollout.max_new_tokens - 1
        most = optim.microbatch
        if optim.microbatch_tokens is not None:
            most = max(1, optim.microbatch_tokens // length)
        shape = (min(most, rollout.prompts * rollout.group_size), length)
        # Any tokens but those that end a response, with which it may not begin. Rows differ from
        # their neighbours, so that packing finds nothing to share.
        one, other = islice((token for token in count() if token not in self._end_ids), 2)
        ids = torch.full(shape, one)
        ids[1::2] = other
        zeros = torch.zeros(shape)
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, prompt_tokens - 1 :] = True
        return TrainBatch(
            input_ids=ids,
            target_ids=ids,
            response_mask=mask,
            behaviour_log_probs=zeros,
            advantages=zeros,
        ).to(self._context.device)

    # ---- The round ---------------------------------------------------------------------------

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """k gradient steps on the rollout batches of a round: one batch, or k with `fresh_batches`,
        less those that have no group. Without any batch the weights stay as they are.

        Advantages are computed once per rollout batch, before any split. Behaviour log-probs are
        those of the sampler.

        Raises:
            RuntimeError: more than `optim.max_skipped_steps` steps in a row were not finite.
        """
        kl_coefficient = self._kl_coefficient.value
        with self._context.call():
            trained = self._train(rollout_batches) if rollout_batches else _Trained()
            self._ranks.settle()
            self.round += 1
            spans = self._context.clock.take()
        return Updated(
            round=self.round,
            version=self.version,
            steps=trained.steps,
            skipped_steps=self.optimizer.skipped,
            reference_nll_nats=trained.reference_nll_nats,
            sampler_mismatch_nats=trained.sampler_mismatch_nats,
            teacher_nats=trained.teacher_nats,
            kl=trained.kl,
            kl_coefficient=kl_coefficient,
            responses=trained.responses,
            critic=trained.critic,
            at=now(),
            spans=spans,
        )

    def _train(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> _Trained:
        clock = self._context.clock
        if self._kl_coefficient.in_reward > 0 and self.reference is not None:
            with clock("reference"):
                rollout_batches = [self.reference.annotate(groups) for groups in rollout_batches]
        with clock("optimize"):
            estimates = [self._estimate(groups) for groups in rollout_batches]
            batches = [
                self._collate(groups, estimated.advantages)
                for groups, estimated in zip(rollout_batches, estimates, strict=True)
            ]
            plan = list(step_rows(self.config, self.round, batches))
        teacher_nats = None
        if self._teacher is not None:
            with clock("reference"):
                batches, teacher_nats = self._taught(self._teacher, batches)
        # Before the first gradient step: with k > 1 the later steps reuse the answers.
        with clock("reference"):
            scored = self._scored(rollout_batches, batches, estimates, plan)
            nll = _mean_nll(scored)
        monitor = KLMonitor(scored) if self.config.loss.kl_monitor else None
        with clock("optimize"):
            steps = []
            for b, rows in plan:
                step, seen = self._gradient_step(scored[b].rows(rows))
                if monitor is not None:
                    step = replace(step, kl=monitor.before_step(b, rows, seen))
                steps.append(step)
            self._kl_coefficient.after_round(scored)
        policy, kl, mismatch = [], {}, None
        with clock("reference"):
            if monitor is not None:
                mismatch = monitor.sampler_mismatch()
                policy = [self._log_probs.without_gradient(self.policy, b) for b in batches]
                kl = monitor.after_round(policy)
        return _Trained(
            steps=steps,
            reference_nll_nats=nll,
            sampler_mismatch_nats=mismatch,
            teacher_nats=teacher_nats,
            kl=kl,
            responses=ResponseFigures(
                advantages=torch.cat(
                    [
                        estimated.of_responses(groups)
                        for groups, estimated in zip(rollout_batches, estimates, strict=True)
                    ]
                ).numpy(),
                policy_log_probs=_response_sums(policy),
                reference_log_probs=_response_sums([batch.reference for batch in scored]),
            ),
            critic=critic_figures(rollout_batches, estimates),
        )

    def _estimate(self, groups: Sequence[RolloutGroup]) -> Estimated:
        return self._advantages(groups, self._kl_coefficient.in_reward)

    def _taught(
        self, teacher: Reference, batches: Sequence[TrainBatch]
    ) -> tuple[list[TrainBatch], float]:
        """The batches whose tokens also answer for how likely the teacher finds them, and nats of a
        response from the policy that sampled to the teacher."""
        coefficient, taught = self.config.loss.teacher_coef, []
        nats = responses = 0.0
        for batch in batches:
            behaviour, mask = batch.behaviour_log_probs, batch.response_mask
            added = teacher_advantages(behaviour, teacher.log_probs(batch), mask)
            taught.append(replace(batch, advantages=batch.advantages + coefficient * added))
            nats -= float(added.sum())
            responses += int(mask.any(dim=1).sum())
        return taught, nats / max(responses, 1)

    def values(self, groups: Sequence[RolloutGroup]) -> list[Tensor]:
        """What the critic says of the states, (G, R) for each group."""
        assert self._critic is not None, "only gae asks for values"
        batch = self._collate(groups, [torch.zeros(len(group.response_ids)) for group in groups])
        return by_group(groups, self._critic.values(batch).cpu())

    def _collate(self, groups: Sequence[RolloutGroup], advantages: Sequence[Tensor]) -> TrainBatch:
        return collate(groups, advantages, self._pad_id).to(self._context.device)

    def _scored(
        self,
        rollout_batches: Sequence[Sequence[RolloutGroup]],
        batches: Sequence[TrainBatch],
        estimates: Sequence[Estimated],
        plan: Sequence[tuple[int, Tensor]],
    ) -> list[ScoredBatch]:
        """The batches under the reference, and under the policy before the round as far as that is
        asked for: by the importance weight for all of them, by the monitor for those that the first
        gradient step does not go through anyway."""
        scored = [
            ScoredBatch(
                batch=batch,
                reference=self._reference_log_probs(groups, batch),
                counted=self._counted(groups, batch),
                fresh=self._fresh(groups) if self.config.loss.kl_monitor else None,
                **self._critic_targets(groups, estimated),
            )
            for groups, batch, estimated in zip(rollout_batches, batches, estimates, strict=True)
        ]
        needed: Sequence[int] = ()
        if self.config.importance_cap is not None:
            needed = range(len(batches))
        elif self.config.loss.kl_monitor:
            needed = unseen_by_the_first_step(scored, plan)
        for b in needed:
            start = self._log_probs.without_gradient(self.policy, batches[b])
            scored[b] = replace(scored[b], start=start)
        return scored

    def _critic_targets(
        self, groups: Sequence[RolloutGroup], estimated: Estimated
    ) -> dict[str, Tensor]:
        """Values and returns of a rollout batch, (B, S); nothing without a critic."""
        if estimated.critic is None:
            return {}
        targets = {"values": estimated.critic.values, "returns": estimated.critic.returns}
        device = self._context.device
        return {name: as_rows(groups, rows).to(device) for name, rows in targets.items()}

    def _counted(self, groups: Sequence[RolloutGroup], batch: TrainBatch) -> Tensor | None:
        """The response tokens that the loss counts, (B, S); None for all."""
        if self.config.rollout.overlong != "filter":
            return None
        finished = torch.cat([group.finished for group in groups]).to(self._context.device)
        return batch.response_mask & finished.unsqueeze(1)

    def _reference_log_probs(
        self, groups: Sequence[RolloutGroup], batch: TrainBatch
    ) -> Tensor | None:
        """(B, S); None where nothing asks for the reference."""
        known = [group.reference_log_probs for group in groups]
        if self.config.reference_role is None:
            return None
        if all(values is not None for values in known):
            return as_rows(groups, cast("list[Tensor]", known)).to(self._context.device)
        assert self.reference is not None, "a generator made no reference pass"
        return self.reference.log_probs(batch)

    def _fresh(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """(B, S) bool: tokens that the weights sampled which the learner has now."""
        sampled = [g.response_mask & (g.token_versions == self.version) for g in groups]
        return as_rows(groups, sampled).to(self._context.device)

    def _gradient_step(self, scored: ScoredBatch) -> tuple[GradientStep, Tensor]:
        """The step, and the log-probs (B, S) that it saw: those of the policy before it."""
        config, batch = self.config, scored.batch
        denominator = loss_denominator(
            config.loss.aggregation, scored.loss_mask, config.rollout.max_new_tokens
        )
        scored = self._with_selected(scored)
        tokens = loss_denominator("token_mean", scored.loss_mask, config.rollout.max_new_tokens)
        seen = torch.zeros_like(batch.behaviour_log_probs)
        statistics, of_critic = StepStatistics(), CriticStatistics()
        for rows in microbatches(batch, config, self._ranks):
            micro = scored.rows(rows)
            mask, behaviour = micro.loss_mask, micro.batch.behaviour_log_probs
            log_probs, entropy, values = self._forward(micro.batch)
            old = self._old_log_probs(micro)
            loss, clipped = self._objective(
                log_probs,
                old,
                behaviour,
                micro.reference,
                micro.batch.advantages,
                mask,
                kl_coef=self._kl_coefficient.in_loss,
                denominator=denominator,
                selected=micro.selected,
            )
            bounded = self._weights_bounded(micro)
            statistics.add(loss, clipped, entropy, log_probs, old, mask, bounded)
            if self._critic is not None and values is not None:
                value_loss, clipped = self._critic.loss(values, micro, tokens)
                of_critic.add(value_loss, clipped, mask)
                loss = loss + self._critic.weight * value_loss
            loss.backward()
            seen[rows, : mask.shape[1]] = log_probs.detach().to(seen.dtype)
        statistics.sum_over(self._ranks)
        if self._critic is not None:
            of_critic.sum_over(self._ranks)
        taken = self.optimizer.step(statistics.loss + of_critic.loss)
        step = statistics.step(taken)
        if self._critic is not None:
            step = replace(step, critic=of_critic.step(taken))
        return step, self._ranks.sum_(seen)

    def _forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropy and values, (B, S) each; None without a critic."""
        if self._critic is None:
            return *self._log_probs.with_entropy(self.policy, batch), None
        states = self._critic.states(batch)
        values = self._critic.of_states(states, batch)
        if self._critic.shares_body:
            return *self._log_probs.of_states(self.policy, states, batch), values
        return *self._log_probs.with_entropy(self.policy, batch), values

    def _old_log_probs(self, scored: ScoredBatch) -> Tensor:
        """(B, S), of the policy that the ratio is taken to."""
        if self.config.importance_cap is None:
            return scored.batch.behaviour_log_probs
        assert scored.start is not None, "the importance weight needs the policy before the round"
        return scored.start

    def _weights_bounded(self, scored: ScoredBatch) -> Tensor | None:
        """The tokens whose importance weight is bounded, (B, S); None without such weights."""
        loss, cap = self.config.loss, self.config.importance_cap
        if cap is None:
            return None
        return weights_bounded(
            self._old_log_probs(scored),
            scored.batch.behaviour_log_probs,
            scored.loss_mask,
            cap,
            level=loss.importance_level,
            floor=loss.importance_floor,
        )

    def _with_selected(self, scored: ScoredBatch) -> ScoredBatch:
        """The rows of a gradient step with the tokens that the loss treats differently. A loss that
        does so needs a forward pass of its own, before the step is split into microbatches."""
        if self._select is None:
            return scored
        batch, optimizer = scored.batch, self.optimizer
        attempt = optimizer.steps + optimizer.skipped
        selected = self._select(
            self._log_probs.without_gradient(self.policy, batch),
            self._old_log_probs(scored),
            batch.advantages,
            scored.loss_mask,
            np.random.default_rng((self.config.seed, attempt, 0, 0, SELECTION)),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        return replace(scored, selected=selected)

    # ---- Weights -----------------------------------------------------------------------------

    def publish(self, needed_from: int = 0) -> Published:
        """Hands the weights to the transport, which takes a snapshot of them.

        Earlier snapshots of rounds before `needed_from` are given up; later ones are still in use
        or in transit.
        """
        with self._context.call():
            with self._context.clock("sync"):
                weights, handle = self._weights(), None  # of other ranks, its parts alone
                if self._sender is not None:
                    self._sender.release(needed_from)
                    handle = self._sender.publish(weights, self.policy.frozen())
            spans = self._context.clock.take()
        return Published(
            handle=handle,
            version=weights.version,
            round=weights.round,
            spans=spans,
        )

    def staged(self, round_: int) -> list[Tensor]:
        """The published snapshot of this round, for a transport that has the learner send it."""
        return cast("StagingSender", self._sender).staged(round_)

    def _weights(self) -> LiveWeights:
        """Without tensors where another rank publishes."""
        dtype = getattr(torch, self.config.transport_dtype)
        tensors = {
            # What is held in lower precision travels in it.
            name: tensor.detach().to(dtype if tensor.dtype == torch.float32 else tensor.dtype)
            for name, tensor in self._ranks.weights(self.policy)
        }
        return LiveWeights(version=self.version, round=self.round, tensors=tensors)

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> LearnerState:
        """Copies of policy, optimizer and counters, in main memory; without tensors on all ranks
        but the first."""
        gathered = self._ranks.gathered
        return LearnerState(
            policy=_copies(gathered(self._parameters)),
            optimizer=_copies(gathered(self._optimizer_tensors())),
            counters=self._counters(),
        )

    def own_state(self) -> LearnerState:
        """The same of what this rank holds, without a word to the others."""
        return LearnerState(
            policy=_copies(self._parameters.items()),
            optimizer=_copies(self._optimizer_tensors().items()),
            counters=self._counters(),
        )

    def rewind(self, state: LearnerState) -> None:
        """Goes back to `own_state` of before, in the middle of a round."""
        self.load_state(state)
        self.optimizer.drop_gradients()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Writes what a checkpoint has of this learner, as `write_learner_files` does."""
        ranks = self._ranks
        return write_learner_files(
            directory,
            seen_by,
            {
                "policy": ranks.held(self._parameters),
                "optimizer": ranks.held(self._optimizer_tensors()),
            },
            self._counters(),
            number=ranks.rank + 1,
            of=ranks.size,
        )

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has beside the policy, live: of the optimizer, and the critic."""
        return self.optimizer.tensors() | (self._critic.parameters if self._critic else {})

    def _counters(self) -> dict[str, Any]:
        return {
            **self.optimizer.counters(),
            **self._kl_coefficient.counters(),
            "round": self.round,
            "reference_checksum": self._reference_checksum,
        }

    def load_state(self, state: LearnerState) -> None:
        """Goes on from a state, with the settings of this learner.

        Raises:
            ValueError: the state is of another model, or was trained against another reference.
        """
        expected = state.counters["reference_checksum"]
        if expected != self._reference_checksum:
            raise ValueError(
                f"the checkpoint's reference policy has checksum {expected}, but the policy of "
                f"model.preset={self.config.model.preset}, model.path={self.config.model.path} "
                f"has {self._reference_checksum}; use the policy that the run started from"
            )
        copy_parameters(self._parameters, self._own(state.policy), source="checkpoint")
        self.optimizer.load_state(self._load_critic(state.optimizer), state.counters)
        self._kl_coefficient.load_counters(state.counters)
        self.round = state.counters["round"]
        self._ranks.settle()

    def _own(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of a policy's tensors."""
        own = self._parameters
        return {name: self._ranks.part(t, own.get(name, t)) for name, t in stored.items()}

    def _load_critic(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts the critic where `stored` was taken; returns what the optimizer goes on from."""
        if self._critic is not None and self._critic.load_state(stored):
            return stored
        of_policy = {name: v for name, v in stored.items() if not name.startswith(PREFIX)}
        anew = {n: v for n, v in self.optimizer.tensors().items() if n.startswith(PREFIX)}
        return of_policy | anew

    def progress(self) -> int:
        """A count that changes with each microbatch."""
        return steps_done()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


def _mean_nll(scored: Sequence[ScoredBatch]) -> float | None:
    """Nats of a response token under the reference; None without a reference."""
    known = [batch.reference for batch in scored if batch.reference is not None]
    if not known:
        return None
    tokens = sum(int(batch.batch.response_mask.sum()) for batch in scored)
    return -sum(float(log_probs.sum()) for log_probs in known) / tokens


def _response_sums(log_probs: Sequence[Tensor | None]) -> np.ndarray | None:
    """(N,) sums over each response; log-probs are 0 off the mask."""
    known = [values for values in log_probs if values is not None]
    if not known:
        return None
    return torch.cat([values.sum(dim=1) for values in known]).cpu().numpy()
