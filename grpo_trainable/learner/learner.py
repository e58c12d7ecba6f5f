"""The learner: policy, optimizer and frozen reference. Scored groups in, new weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig, threads
from grpo_trainable.learner.advantages import critic_figures
from grpo_trainable.learner.gradient_steps import GradientSteps
from grpo_trainable.learner.kl_monitor import KLMonitor
from grpo_trainable.learner.log_probs import LogProbs, Reference, ScoredBatch
from grpo_trainable.learner.minibatches import largest_microbatch, step_rows, with_observations
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.learner.round_batches import RoundBatches
from grpo_trainable.learner.teacher import build_teacher
from grpo_trainable.learner.training_state import TrainingState
from grpo_trainable.models.policy import ActingPolicy
from grpo_trainable.models.store import build_any_trained_policy
from grpo_trainable.protocol.checksums import checksum
from grpo_trainable.protocol.messages import (
    CriticFigures,
    Drift,
    GradientStep,
    LearnerState,
    Published,
    ResponseFigures,
    Updated,
)
from grpo_trainable.protocol.rollout import LiveWeights, RolloutGroup
from grpo_trainable.protocol.weight_transfer import StagingSender, WeightSender
from grpo_trainable.storage.checkpointing import LearnerFiles
from grpo_trainable.telemetry.actor_process import RoleContext, keep_freed_memory
from grpo_trainable.telemetry.progress import steps_done
from grpo_trainable.telemetry.timers import StageClock, now


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
        model, tokenizer = build_any_trained_policy(
            config.model, config.seed, adapters_apart=config.adapters_apart
        )
        device, ranks = self._context.device, self._ranks
        policy = model.to(device)
        self._end_ids = tokenizer.end_ids_with(config.rollout.stop)
        self._log_probs = LogProbs(config, self._end_ids, ranks)
        untrained = policy.without_adapters()
        reference_checksum = checksum((untrained or policy).weights())
        self.policy = ranks.divide(policy)
        here = config.reference_role == "learner"
        self.reference = Reference(config, tokenizer, device, untrained, ranks) if here else None
        self._teacher = build_teacher(config, tokenizer, device, ranks)
        self._state = TrainingState(config, self.policy, device, reference_checksum, ranks)
        self.optimizer = self._state.optimizer
        self._batches = RoundBatches(
            config,
            self._state,
            self._log_probs,
            self.reference,
            pad_id=tokenizer.pad_id,
            device=device,
        )
        self._steps = GradientSteps(config, self._state, self._log_probs, device, ranks)

    @property
    def version(self) -> int:
        """Gradient steps that the policy has taken."""
        return self._state.version

    @property
    def round(self) -> int:
        """Rounds that the policy was trained in."""
        return self._state.round

    def warm_up(self, prompt_tokens: int) -> None:
        """Does once what is slow the first time: one microbatch forward and backward, each row with
        `prompt_tokens` and the longest response, and a step of a throw-away optimizer.

        Nothing of it remains but warm code and memory; the gradients are dropped.
        """
        with self._context.call():
            micro = largest_microbatch(self.config, prompt_tokens, self._end_ids)
            if isinstance(self.policy, ActingPolicy):
                micro = with_observations(micro, self.policy)
            micro = micro.to(self._context.device)
            # Every rank needs a microbatch of a pass that they share: where they hold a policy
            # between them, one without any would be waited for.
            shared = micro.rows(torch.arange(micro.num_rows).repeat(self._ranks.size))
            if self.reference is not None:
                self.reference.log_probs(shared)
            if self._teacher is not None:
                self._teacher.log_probs(shared)
            log_probs, _, values = self._steps.forward(micro)
            (log_probs.sum() if values is None else log_probs.sum() + values.sum()).backward()
            self.optimizer.warm_up()
            self._context.clock.synchronize()
        self._context.clock.reset()

    # ---- The round ---------------------------------------------------------------------------

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """k gradient steps on the rollout batches of a round: one batch, or k with `fresh_batches`,
        less those that have no group. Without any batch the weights stay as they are.

        Advantages are computed once per rollout batch, before any split. Behaviour log-probs are
        those of the sampler.

        Raises:
            RuntimeError: more than `optim.max_skipped_steps` steps in a row were not finite.
        """
        kl_coefficient = self._state.kl_coefficient.value
        with self._context.call():
            trained = self._train(rollout_batches) if rollout_batches else _Trained()
            self._ranks.settle()
            self._state.round += 1
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
        clock, kl_coefficient = self._context.clock, self._state.kl_coefficient
        if kl_coefficient.in_reward > 0 and self.reference is not None:
            with clock("reference"):
                rollout_batches = [self.reference.annotate(groups) for groups in rollout_batches]
        with clock("optimize"):
            batches = [self._batches.batch(groups) for groups in rollout_batches]
            plan = list(step_rows(self.config, self.round, [batch.rows for batch in batches]))
        teacher_nats = None
        if self._teacher is not None:
            with clock("reference"):
                batches, teacher_nats = self._batches.taught(self._teacher, batches)
        # The scores are made before the first gradient step: with k > 1 the later steps reuse them.
        with clock("reference"):
            scored = self._batches.scored(batches, plan)
            nll = _mean_nll(scored)
        monitor = KLMonitor(scored) if self.config.loss.kl_monitor else None
        with clock("optimize"):
            steps = []
            for b, rows in plan:
                # The first step's own forward pass is that of the policy before the round.
                first = not steps
                step, seen = self._steps.take(scored[b].rows(rows, with_start=not first))
                if first:
                    scored[b] = scored[b].with_start(rows, seen)
                if monitor is not None:
                    step = replace(step, kl=monitor.before_step(b, rows, seen))
                steps.append(step)
            kl_coefficient.after_round(scored)
        policy, kl, mismatch = [], {}, None
        with clock("reference"):
            if monitor is not None:
                mismatch = monitor.sampler_mismatch()
                policy = [
                    self._log_probs.without_gradient(self.policy, batch.rows) for batch in batches
                ]
                kl = monitor.after_round(policy)
        return _Trained(
            steps=steps,
            reference_nll_nats=nll,
            sampler_mismatch_nats=mismatch,
            teacher_nats=teacher_nats,
            kl=kl,
            responses=ResponseFigures(
                advantages=torch.cat(
                    [batch.estimated.of_responses(batch.groups) for batch in batches]
                ).numpy(),
                policy_log_probs=_response_sums(policy),
                reference_log_probs=_response_sums([batch.reference for batch in scored]),
            ),
            critic=critic_figures(
                [batch.groups for batch in batches], [batch.estimated for batch in batches]
            ),
        )

    # ---- Weights -----------------------------------------------------------------------------

    def publish(self, needed_from: int = 0) -> Published:
        """Hands the weights to the transport, which takes a snapshot of them.

        Earlier snapshots of rounds before `needed_from` are given up; later ones are still in use
        or in transit.
        """
        with self._context.call():
            with self._context.clock("sync"):
                weights, handle = self._weights(), None  # other ranks have their parts alone
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
        """The weights as they are published; without tensors where another rank publishes."""
        dtype = getattr(torch, self.config.transport_dtype)
        tensors = {
            # What is held in lower precision travels in it.
            name: tensor.detach().to(dtype if tensor.dtype == torch.float32 else tensor.dtype)
            for name, tensor in self._ranks.weights(self.policy)
        }
        return LiveWeights(version=self.version, round=self.round, tensors=tensors)

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> LearnerState:
        """What a checkpoint keeps, as `TrainingState.gathered` says."""
        return self._state.gathered()

    def own_state(self) -> LearnerState:
        """What this rank holds of it, as `TrainingState.own` says."""
        return self._state.own()

    def rewind(self, state: LearnerState) -> None:
        """Goes back to `own_state` of before, in the middle of a round."""
        self.load_state(state)
        self.optimizer.drop_gradients()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Writes what a checkpoint has of this learner, as `TrainingState.write` does."""
        return self._state.write(directory, seen_by)

    def next_message(self) -> tuple[str, bytes] | None:
        """Return what `write` could not write in parts, as `TrainingState.next_message` does."""
        return self._state.next_message()

    def read_state(
        self, directory: str, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> bool:
        """Goes on from the state in a checkpoint, as `TrainingState.read` says."""
        return self._state.read(Path(directory), digests, counters)

    def load_state(self, state: LearnerState) -> None:
        """Goes on from a state, as `TrainingState.load` says."""
        self._state.load(state)

    def progress(self) -> int:
        """A count that changes with each microbatch, and with each piece of a checkpoint."""
        return steps_done()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


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
