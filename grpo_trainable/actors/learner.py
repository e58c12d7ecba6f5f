"""The learner: policy, optimizer and frozen reference. Scored groups in, new weights out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.actors.process import Desk, keep_freed_memory
from grpo_trainable.algo import (
    ADVANTAGES,
    KL_ESTIMATORS,
    LOSSES,
    aggregate,
    clipped_tokens,
    loss_denominator,
    masked_sum,
    token_ratio,
)
from grpo_trainable.config import GRPOConfig, threads
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import build_policy
from grpo_trainable.rollout import (
    PolicyWeights,
    RolloutGroup,
    TrainBatch,
    checksum,
    collate,
)
from grpo_trainable.timers import Span, now


class WeightSender(Protocol):
    """What the learner needs of a transport."""

    def publish(self, weights: PolicyWeights) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """What one optimizer step saw. Sums and means run over the whole step."""

    loss: float
    grad_norm: float
    entropy_nats: float  # mean per response token
    clip_fraction: float  # of response tokens
    ratio_max: float
    lr: float
    skipped: bool  # loss or gradient was not finite: nothing was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """One round trained."""

    round: int  # rounds trained so far
    version: int
    steps: list[GradientStep]
    skipped_steps: int  # so far
    reference_nll_nats: float | None  # per response token; None without a reference
    at: float  # seconds since 1970
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A snapshot is out. `handle` is the transport's."""

    handle: Any
    version: int
    round: int
    checksum: str
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a checkpoint keeps of the learner."""

    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: dict[str, Any] = field(default_factory=dict)


class Learner:
    """Takes k gradient steps a round and publishes snapshots of the policy.

    The reference is the policy as built from the config, before any training; it exists only
    while something asks for it (`loss.kl_coef` or `loss.kl_monitor`).
    """

    def __init__(self, config: GRPOConfig, sender: WeightSender) -> None:
        keep_freed_memory()
        r = config.resources
        colocated = config.placement == "colocated"
        self._desk = Desk(
            threads=threads(r.worker_cpus if colocated else r.learner_cpus),
            gpus=r.worker_gpus if colocated else r.learner_gpus,
        )
        self.config = config
        self._sender = sender
        model, tokenizer = build_policy(config.model.preset, config.model.path, config.seed)
        self.policy = model.to(self._desk.device)
        self._pad_id, self._eos_id = tokenizer.pad_id, tokenizer.eos_id
        self._reference_checksum = checksum(unique_parameters(self.policy))
        self.reference = None
        if config.loss.kl_coef > 0 or config.loss.kl_monitor:
            reference, _ = build_policy(config.model.preset, config.model.path, config.seed)
            self.reference = reference.to(self._desk.device).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.optim.lr,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        self.version = 0
        self.round = 0
        self._skipped_steps = 0
        self._skipped_in_a_row = 0

    # ---- The round ---------------------------------------------------------------------------

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """k gradient steps on the rollout batches of a round: one, or k with `fresh_batches`.

        Advantages are computed once per rollout batch, before any split. Behaviour log-probs are
        those of the sampler.

        Raises:
            RuntimeError: more than `optim.max_skipped_steps` steps in a row were not finite.
        """
        with self._desk.call():
            clock = self._desk.clock
            with clock("optimize"):
                batches = [self._collate(groups) for groups in rollout_batches]
            # The reference runs before the first gradient step: with k > 1 the later steps reuse
            # its answer.
            with clock("reference"):
                references = [self._reference_log_probs(batch) for batch in batches]
                nll = self._reference_nll(batches, references)
            with clock("optimize"):
                steps = []
                for b, rows in self._plan(batches):
                    reference = references[b]
                    steps.append(
                        self._gradient_step(
                            batches[b].rows(rows), None if reference is None else reference[rows]
                        )
                    )
            self.round += 1
            spans = clock.take()
        return Updated(
            round=self.round,
            version=self.version,
            steps=steps,
            skipped_steps=self._skipped_steps,
            reference_nll_nats=nll,
            at=now(),
            spans=spans,
        )

    def publish(self) -> Published:
        """Hands a snapshot to the transport."""
        with self._desk.call():
            with self._desk.clock("sync"):
                weights = self.weights()
                handle = self._sender.publish(weights)
            spans = self._desk.clock.take()
        return Published(
            handle=handle,
            version=weights.version,
            round=weights.round,
            checksum=weights.checksum,
            spans=spans,
        )

    def weights(self) -> PolicyWeights:
        """A copy: the next gradient step must not reach weights already published."""
        tensors = {
            name: parameter.detach().clone()
            for name, parameter in unique_parameters(self.policy).items()
        }
        return PolicyWeights(
            version=self.version, round=self.round, checksum=checksum(tensors), tensors=tensors
        )

    def _collate(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        rewards = torch.stack([group.rewards for group in groups])
        advantage = ADVANTAGES[self.config.loss.advantage]
        advantages = advantage(rewards, eps=self.config.loss.advantage_eps)
        return collate(groups, list(advantages), self._pad_id).to(self._desk.device)

    def _plan(self, batches: Sequence[TrainBatch]) -> Iterator[tuple[int, Tensor]]:
        """(which batch, which of its rows) of each gradient step."""
        k, k_mode = self.config.k, self.config.k_mode
        if k_mode == "fresh_batches":
            yield from ((b, torch.arange(batch.num_rows)) for b, batch in enumerate(batches))
            return
        (batch,) = batches
        if k_mode == "same_batch":
            yield from ((0, torch.arange(batch.num_rows)) for _ in range(k))
            return
        group_size = self.config.rollout.group_size
        rows = torch.arange(batch.num_rows).view(-1, group_size)
        epochs = self.config.optim.epochs
        for epoch in range(epochs):
            rng = np.random.default_rng((self.config.seed, self.round, epoch))
            order = torch.from_numpy(rng.permutation(len(rows)))
            for part in order.tensor_split(k // epochs):
                if len(part):
                    yield 0, rows[part].flatten()

    def _gradient_step(self, batch: TrainBatch, reference: Tensor | None) -> GradientStep:
        config = self.config
        lr = self._learning_rate()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        tokens = int(batch.response_mask.sum())
        denominator = loss_denominator(
            config.loss.aggregation, batch.response_mask, config.rollout.max_new_tokens
        )
        clip = {"clip_low": config.loss.clip, "clip_high": config.clip_high}
        loss_fn = LOSSES[config.loss.type]
        loss = entropy = clipped = 0.0
        ratios = []
        for rows in _microbatches(batch, config.optim.microbatch):
            micro = batch.rows(rows)
            mask, advantages = micro.response_mask, micro.advantages
            log_probs, token_entropy = self._log_probs(self.policy, micro)
            old = micro.behaviour_log_probs
            token_loss = loss_fn(log_probs, old, advantages, mask, **clip)
            if config.loss.kl_coef > 0:
                assert reference is not None
                estimate = KL_ESTIMATORS[config.loss.kl_estimator]
                reference_micro = reference[rows, : mask.shape[1]]
                token_loss = token_loss + config.loss.kl_coef * estimate(
                    log_probs, reference_micro, mask
                )
            micro_loss = aggregate(token_loss, mask, config.loss.aggregation, denominator)
            micro_loss.backward()
            with torch.no_grad():
                loss += float(micro_loss)
                entropy += float(masked_sum(token_entropy, mask))
                was_clipped = clipped_tokens(
                    config.loss.type, log_probs, old, advantages, mask, **clip
                )
                clipped += float(masked_sum(was_clipped.expand_as(mask).float(), mask))
                ratios.append(token_ratio(log_probs, old, mask).max())
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.optim.grad_clip)
        )
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        self._finish_step(skipped)
        return GradientStep(
            loss=loss,
            grad_norm=grad_norm,
            entropy_nats=entropy / max(tokens, 1),
            clip_fraction=clipped / max(tokens, 1),
            ratio_max=float(torch.stack(ratios).max()),  # NaN if one is
            lr=lr,
            skipped=skipped,
        )

    def _finish_step(self, skipped: bool) -> None:
        if skipped:
            self._skipped_steps += 1
            self._skipped_in_a_row += 1
        else:
            self.optimizer.step()
            self.version += 1
            self._skipped_in_a_row = 0
        self.optimizer.zero_grad()
        if self._skipped_in_a_row > self.config.optim.max_skipped_steps:
            raise RuntimeError(
                f"{self._skipped_in_a_row} gradient steps in a row had a loss or gradient that "
                f"is not finite (optim.max_skipped_steps={self.config.optim.max_skipped_steps}); "
                "lower optim.lr or look at the rewards"
            )

    def _learning_rate(self) -> float:
        """A pure function of the step number: no scheduler state to lose."""
        config = self.config
        if config.optim.schedule == "constant":
            return config.optim.lr
        done = min(1.0, self.version / (config.rounds * config.k))
        if config.optim.schedule == "linear":
            return config.optim.lr * (1 - done)
        return config.optim.lr * (1 + math.cos(math.pi * done)) / 2

    def _log_probs(self, model: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy (B, S) under the law that responses are sampled from."""
        return response_log_probs(
            model,
            batch.input_ids,
            batch.target_ids,
            batch.response_mask,
            temperature=self.config.rollout.temperature,
            min_new_tokens=self.config.rollout.min_new_tokens,
            eos_id=self._eos_id,
        )

    @torch.no_grad()
    def _reference_log_probs(self, batch: TrainBatch) -> Tensor | None:
        if self.reference is None:
            return None
        log_probs = torch.zeros_like(batch.behaviour_log_probs)
        for rows in _microbatches(batch, self.config.optim.microbatch):
            micro = batch.rows(rows)
            log_probs[rows, : micro.input_ids.shape[1]] = self._log_probs(self.reference, micro)[0]
        return log_probs

    def _reference_nll(
        self, batches: Sequence[TrainBatch], references: Sequence[Tensor | None]
    ) -> float | None:
        if self.reference is None:
            return None
        tokens = sum(int(batch.response_mask.sum()) for batch in batches)
        total = sum(float(log_probs.sum()) for log_probs in references if log_probs is not None)
        return -total / tokens

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> LearnerState:
        optimizer = {}
        for name, parameter in unique_parameters(self.policy).items():
            for key, value in self.optimizer.state[parameter].items():
                optimizer[f"{name}/{key}"] = value.detach().cpu().clone()
        return LearnerState(
            policy={
                name: parameter.detach().cpu().clone()
                for name, parameter in unique_parameters(self.policy).items()
            },
            optimizer=optimizer,
            counters={
                "version": self.version,
                "round": self.round,
                "skipped_steps": self._skipped_steps,
                "skipped_in_a_row": self._skipped_in_a_row,
                "reference_checksum": self._reference_checksum,
            },
        )

    def load_state(self, state: LearnerState) -> None:
        """
        Raises:
            ValueError: the state is of another model, or was trained against another reference.
        """
        expected = state.counters["reference_checksum"]
        if expected != self._reference_checksum:
            raise ValueError(
                f"the checkpoint's reference policy has checksum {expected}, the one that "
                f"model.preset={self.config.model.preset}, model.path={self.config.model.path} "
                f"give has {self._reference_checksum}"
            )
        copy_parameters(self.policy, state.policy, source="checkpoint")
        for name, parameter in unique_parameters(self.policy).items():
            prefix = f"{name}/"
            self.optimizer.state[parameter] = {
                key.removeprefix(prefix): value.to(parameter.device, copy=True)
                for key, value in state.optimizer.items()
                if key.startswith(prefix)
            }
        self.version = state.counters["version"]
        self.round = state.counters["round"]
        self._skipped_steps = state.counters["skipped_steps"]
        self._skipped_in_a_row = state.counters["skipped_in_a_row"]

    def close(self) -> None:
        """Nothing of the learner outlives its process."""


def _microbatches(batch: TrainBatch, size: int) -> Iterator[Tensor]:
    """Rows of each microbatch, long rows with long ones: padding is wasted work."""
    position = torch.arange(batch.response_mask.shape[1], device=batch.response_mask.device)
    lengths = (batch.response_mask * position).amax(dim=1)
    order = torch.sort(lengths, stable=True).indices
    yield from order.split(size)
