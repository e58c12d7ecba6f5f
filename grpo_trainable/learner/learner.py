"""The learner (policy, optimizer, frozen reference), which turns scored groups into new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig, threads
from grpo_trainable.learner.advantages import critic_figures
from grpo_trainable.learner.gradient_steps import GradientSteps
from grpo_trainable.learner.kl_monitor import (
    Estimate,
    drift,
    drift_before_step,
    on_watched_rows,
    reference_nll,
    sampler_mismatch,
)
from grpo_trainable.learner.log_probs import BatchWithLogProbs, LogProbs, Reference
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
    """The results of a round's gradient steps. The defaults describe a round without steps."""

    steps: list[GradientStep] = field(default_factory=list)
    reference_nll: Estimate | None = None
    sampler_mismatch_nats: float | None = None
    teacher_nats: float | None = None
    kl: dict[str, Drift] = field(default_factory=dict)
    responses: ResponseFigures = field(default_factory=_no_responses)
    critic: CriticFigures | None = None


class Learner:
    """Takes k gradient steps per round and publishes snapshots of the policy.

    With `loss.advantage=gae`, the learner also trains a critic, which is never published.

    The learner holds the reference only if a setting needs the reference (`loss.kl_coef` or
    `loss.kl_monitor`) and the generators do not hold it (`resources.reference`).
    """

    CONCURRENT = ("progress",)

    def __init__(
        self,
        config: GRPOConfig,
        sender: WeightSender | None,
        clock: StageClock | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Build the learner in this process.

        Args:
            config: The trial's settings.
            sender: Publishes the weights. None: another rank publishes them.
            clock: The clock of another role in the same process. None: create a clock.
            ranks: All learners of the trial, including this one.
        """
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
        """Start over with a config that leaves placement, resources and transport unchanged."""
        self._context.clock.reset()
        self.close()
        # Free the memory of the old policy and optimizer before the new ones need it.
        del self.policy, self.reference, self.optimizer
        del self._teacher, self._state, self._log_probs, self._batches, self._steps
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
        untrained = policy.untrained()
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
        """Number of gradient steps that the policy has taken."""
        return self._state.version

    @property
    def round(self) -> int:
        """Number of rounds that the learner has finished."""
        return self._state.round

    def warm_up(self, prompt_tokens: int) -> None:
        """Run the operations that are slow the first time.

        These operations are one forward and one backward pass over a microbatch, the passes of the
        reference and of the teacher (if there are any), and one step of a throw-away optimizer.
        Each row of the microbatch has a prompt of `prompt_tokens` tokens and the longest possible
        response. The gradients are dropped; only loaded code and allocated memory remain.
        """
        with self._context.call():
            micro = largest_microbatch(self.config, prompt_tokens, self._end_ids)
            if isinstance(self.policy, ActingPolicy):
                micro = with_observations(micro, self.policy)
            micro = micro.to(self._context.device)
            # In a pass that the ranks share, every rank needs a microbatch. If the policy is
            # divided among the ranks, they would otherwise wait for a rank without a microbatch.
            shared = micro.select(torch.arange(micro.num_rows).repeat(self._ranks.size))
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
        """Take k gradient steps on the rollout batches of a round.

        A round has one batch, or k batches with `k_mode=fresh_batches`. Batches without groups have
        been left out. If no batch is left, the weights stay unchanged. Advantages are computed once
        per rollout batch, before the batch is split. Behaviour log-probs come from the sampler.

        Raises:
            RuntimeError: More than `optim.max_skipped_steps` consecutive steps had a loss or
                gradient that was not finite.
        """
        beta = self._state.kl_coefficient.value  # read before `_train` adjusts β for the next round
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
            reference_nll_nats=trained.reference_nll and trained.reference_nll.value,
            reference_nll_se=trained.reference_nll.se if trained.reference_nll else 0.0,
            sampler_mismatch_nats=trained.sampler_mismatch_nats,
            teacher_nats=trained.teacher_nats,
            kl=trained.kl,
            kl_coefficient=beta,
            responses=trained.responses,
            critic=trained.critic,
            at=now(),
            spans=spans,
        )

    def _train(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> _Trained:
        clock = self._context.clock
        if self._state.kl_coefficient.in_reward > 0 and self.reference is not None:
            with clock("reference"):  # rewards need the reference, and advantages need rewards
                rollout_batches = [self.reference.annotate(groups) for groups in rollout_batches]
        with clock("optimize"):
            made = [self._batches.batch(groups) for groups in rollout_batches]
            plan = list(step_rows(self.config, self.round, [batch.train_batch for batch in made]))
        teacher_nats = None
        if self._teacher is not None:
            with clock("reference"):
                made, teacher_nats = self._batches.taught(self._teacher, made)
        # Some of these log-probs belong to the policy before the round, so compute them before the
        # first gradient step. With k > 1, the later steps reuse them.
        with clock("reference"):
            batches = self._batches.with_log_probs(made, plan)
            nll = reference_nll(batches)
        with clock("optimize"):
            steps, batches = self._take_steps(batches, plan)
            self._state.kl_coefficient.after_round(batches)
        after, kl, mismatch = [None] * len(batches), {}, None
        with clock("reference"):
            if self.config.loss.kl_monitor:
                mismatch = sampler_mismatch(batches)
                after = on_watched_rows(
                    partial(self._log_probs.without_gradient, self.policy),
                    [batch.train_batch for batch in batches],
                    [batch.watched for batch in batches],
                )
                kl = drift(after, batches)
        return _Trained(
            steps=steps,
            reference_nll=nll,
            sampler_mismatch_nats=mismatch,
            teacher_nats=teacher_nats,
            kl=kl,
            responses=ResponseFigures(
                advantages=torch.cat(
                    [batch.estimated.of_responses(batch.groups) for batch in made]
                ).numpy(),
                policy_log_probs=_response_sums(after, batches),
                reference_log_probs=_response_sums([b.reference for b in batches], batches),
            ),
            critic=critic_figures(
                [batch.groups for batch in made], [batch.estimated for batch in made]
            ),
        )

    def _take_steps(
        self, batches: Sequence[BatchWithLogProbs], plan: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[GradientStep], list[BatchWithLogProbs]]:
        """Take the steps of the `plan`.

        Return the steps, and the batches with complete `start` log-probs.

        `start` holds log-probs of the policy before the round. The forward pass of the first step
        still uses that policy, so it computes `start` for the rows of the first step, and these
        rows need no separate pass. All later steps, and the KL of the first step, compare with the
        log-probs in `start`.

        Args:
            batches: The round's batches.
            plan: For each step, the index of a batch and the rows to train on.
        """
        (b, rows), *later = plan
        batches = list(batches)
        step, seen = self._steps.take(batches[b].select(rows).without_start())
        batches[b] = batches[b].with_start(rows, seen)
        steps = [self._with_kl(step, batches[b].select(rows), seen)]
        for b, rows in later:
            batch = batches[b].select(rows)
            step, seen = self._steps.take(batch)
            steps.append(self._with_kl(step, batch, seen))
        return steps, batches

    def _with_kl(self, step: GradientStep, batch: BatchWithLogProbs, seen: Tensor) -> GradientStep:
        """Add the KL to the step's figures, if the KL is monitored.

        The KL is that of the policy before the step.

        Args:
            step: The step.
            batch: The rows that the step trained on.
            seen: The log-probs that the step computed for these rows, (rows, S).
        """
        if not self.config.loss.kl_monitor:
            return step
        return replace(step, kl=drift_before_step(seen, batch))

    # ---- Weights -----------------------------------------------------------------------------

    def publish(self, needed_from: int = 0) -> Published:
        """Hand the weights to the transport, which takes a snapshot of them.

        Args:
            needed_from: Index of a round. Snapshots of rounds before it are released. The other
                snapshots may still be in use or in transit.
        """
        with self._context.call():
            with self._context.clock("sync"):
                weights, handle = self._weights(), None  # only the first rank gets a handle
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
        """Return a round's published snapshot, for transports that send it from the learner."""
        return cast("StagingSender", self._sender).staged(round_)

    def _weights(self) -> LiveWeights:
        """Return the weights to publish, without tensors if another rank publishes them."""
        dtype = getattr(torch, self.config.transport_dtype)
        tensors = {
            # Tensors of lower precision than float32 are sent unchanged.
            name: tensor.detach().to(dtype if tensor.dtype == torch.float32 else tensor.dtype)
            for name, tensor in self._ranks.weights(self.policy)
        }
        return LiveWeights(version=self.version, round=self.round, tensors=tensors)

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> LearnerState:
        """Return the learner's part of a checkpoint, as `TrainingState.gathered` does."""
        return self._state.gathered()

    def own_state(self) -> LearnerState:
        """Return this rank's part of the state, as `TrainingState.own` does."""
        return self._state.own()

    def rewind(self, state: LearnerState) -> None:
        """In the middle of a round, go back to an earlier `own_state`."""
        self.load_state(state)
        self.optimizer.drop_gradients()

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Write this learner's part of a checkpoint, as `TrainingState.write` does."""
        return self._state.write(directory, seen_by)

    def next_message(self) -> tuple[str, bytes] | None:
        """Return the next piece of a checkpoint, as `TrainingState.next_message` does."""
        return self._state.next_message()

    def read_state(
        self, directory: str, digests: Mapping[str, str], counters: dict[str, Any]
    ) -> bool:
        """Continue from the state in a checkpoint, as `TrainingState.read` does."""
        return self._state.read(Path(directory), digests, counters)

    def load_state(self, state: LearnerState) -> None:
        """Continue from a state, as `TrainingState.load` does."""
        self._state.load(state)

    def progress(self) -> int:
        """Return a count that changes with each microbatch and with each piece of a checkpoint."""
        return steps_done()

    def close(self) -> None:
        """Release all published snapshots."""
        if self._sender is not None:
            self._sender.close()


def _response_sums(
    log_probs: Sequence[Tensor | None], batches: Sequence[BatchWithLogProbs]
) -> np.ndarray | None:
    """Return each response's sum of log-probs, (N,); NaN for responses without a measured KL.

    Log-probs are 0 off the mask. Return None if a batch has no log-probs.
    """
    sums = []
    for values, batch in zip(log_probs, batches, strict=True):
        if values is None:
            return None
        of_rows = values.sum(dim=1)
        sums.append(of_rows if batch.watched is None else of_rows.where(batch.watched, torch.nan))
    return torch.cat(sums).cpu().numpy()
