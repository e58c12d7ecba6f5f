"""The learner: policy, optimizer and frozen reference. Scored groups in, new weights out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.actors.log_probs import LogProbs, Reference, microbatches
from grpo_trainable.actors.process import Desk, keep_freed_memory
from grpo_trainable.actors.progress import steps_done
from grpo_trainable.algo import (
    ADVANTAGES,
    LOSSES,
    bounded_tokens,
    loss_denominator,
    masked_sum,
    objective,
    sequence_kl,
    token_ratio,
)
from grpo_trainable.checksums import checksum
from grpo_trainable.config import GRPOConfig, threads
from grpo_trainable.messages import (
    Drift,
    GradientStep,
    LearnerState,
    Published,
    ResponseFigures,
    Updated,
)
from grpo_trainable.metrics import RATIO_EDGES
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.store import build_policy
from grpo_trainable.rollout import (
    LiveWeights,
    RolloutGroup,
    TrainBatch,
    as_rows,
    collate,
)
from grpo_trainable.timers import StageClock, now
from grpo_trainable.weight_transfer import StagingSender, WeightSender


class Learner:
    """Takes k gradient steps a round and publishes snapshots of the policy.

    It keeps the reference only while something asks for it (`loss.kl_coef` or `loss.kl_monitor`)
    and the generators do not (`resources.reference`).
    """

    CONCURRENT = ("progress",)

    def __init__(
        self, config: GRPOConfig, sender: WeightSender, clock: StageClock | None = None
    ) -> None:
        """`clock`: that of the process, when another role lives in it too."""
        keep_freed_memory()
        r = config.resources
        colocated = config.placement == "colocated"
        self._desk = Desk(
            threads=threads(r.worker_cpus if colocated else r.learner_cpus),
            gpus=r.worker_gpus if colocated else r.learner_gpus,
            clock=clock,
        )
        self._sender = sender
        self._build(config)

    def reset(self, config: GRPOConfig) -> None:
        """Begins anew with a config of the same placement, resources and transport."""
        self._desk.clock.reset()
        self._sender.close()
        self._build(config)

    def _build(self, config: GRPOConfig) -> None:
        self.config = config
        model, tokenizer = build_policy(config.model.preset, config.model.path, config.seed)
        self.policy = model.to(self._desk.device)
        self._pad_id, self._eos_id = tokenizer.pad_id, tokenizer.eos_id
        self._log_probs = LogProbs(config, tokenizer.eos_id)
        self._parameters = unique_parameters(self.policy)
        self._reference_checksum = checksum(self._parameters)
        self._objective = partial(
            objective,
            loss=LOSSES[config.loss.type],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            importance_cap=config.loss.importance_cap,
            kl_coef=config.loss.kl_coef,
            kl_estimator=config.loss.kl_estimator,
            aggregation=config.loss.aggregation,
        )
        here = config.reference_role == "learner"
        self.reference = Reference(config, self._desk.device) if here else None
        self.optimizer = _optimizer(self.policy.parameters(), config)
        self.version = 0
        self.round = 0
        self._skipped_steps = 0
        self._skipped_in_a_row = 0

    def warm_up(self, prompt_tokens: int) -> None:
        """Does once what is slow the first time: one microbatch forward and backward, each row with
        `prompt_tokens` and the longest response, and a step of the optimizer.

        Nothing of it remains but warm code and memory. The gradients are dropped, and the optimizer
        is another one, with a single number as its parameter: neither a copy of a large policy nor
        moments for it are made. Those of the policy are still allocated by its first step.
        """
        with self._desk.call():
            batch = self._made_up_batch(prompt_tokens)
            if self.reference is not None:
                self.reference.log_probs(batch)
            log_probs, _ = self._log_probs.with_entropy(self.policy, batch)
            log_probs.sum().backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.optim.grad_clip)
            self.optimizer.zero_grad()
            number = torch.nn.Parameter(torch.zeros(1, device=self._desk.device))
            number.grad = torch.ones_like(number)
            _optimizer([number], self.config).step()
            self._desk.clock.synchronize()
        self._desk.clock.reset()

    def _made_up_batch(self, prompt_tokens: int) -> TrainBatch:
        """As many rows as a microbatch of this config has at most, each as long as can be."""
        rollout = self.config.rollout
        rows = min(self.config.optim.microbatch, rollout.prompts * rollout.group_size)
        shape = (rows, prompt_tokens + rollout.max_new_tokens - 1)
        # Any token but end-of-text, which a response may not begin with.
        ids = torch.full(shape, int(self._eos_id == 0))
        zeros = torch.zeros(shape)
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, prompt_tokens - 1 :] = True
        return TrainBatch(
            input_ids=ids,
            target_ids=ids,
            response_mask=mask,
            behaviour_log_probs=zeros,
            advantages=zeros,
        ).to(self._desk.device)

    # ---- The round ---------------------------------------------------------------------------

    def update(self, rollout_batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        """k gradient steps on the rollout batches of a round: one, or k with `fresh_batches`, less
        those that have no group. Without any, the round is over with the weights as they are.

        Advantages are computed once per rollout batch, before any split. Behaviour log-probs are
        those of the sampler.

        Raises:
            RuntimeError: more than `optim.max_skipped_steps` steps in a row were not finite.
        """
        if not rollout_batches:
            return self._skip_round()
        monitor = self.config.loss.kl_monitor
        with self._desk.call():
            clock = self._desk.clock
            with clock("optimize"):
                advantages = [self._advantages(groups) for groups in rollout_batches]
                batches = [
                    self._collate(groups, values)
                    for groups, values in zip(rollout_batches, advantages, strict=True)
                ]
                plan = list(self._plan(batches))
            # The reference runs before the first gradient step: with k > 1 the later steps reuse
            # its answer.
            with clock("reference"):
                references = [
                    self._reference_log_probs(groups, batch)
                    for groups, batch in zip(rollout_batches, batches, strict=True)
                ]
                nll = self._reference_nll(batches, references)
                start = self._start_log_probs(batches, plan)
            with clock("optimize"):
                steps = []
                for b, rows in plan:
                    batch = batches[b].rows(rows)
                    step, seen = self._gradient_step(
                        batch, _rows(references[b], rows, batch), _rows(start.get(b), rows, batch)
                    )
                    if monitor:
                        if b not in start:
                            # The first step saw its whole batch under the policy before the round.
                            start[b] = _scatter_rows(seen, rows, batches[b])
                        others = {
                            "reference": [_rows(references[b], rows, batch)],
                            "previous": [_rows(start[b], rows, batch)],
                            "behaviour": [batch.behaviour_log_probs],
                        }
                        step = replace(step, kl=_drift([batch], [seen], others))
                    steps.append(step)
            with clock("reference"):
                policy: list[Tensor] = []
                kl = {}
                if monitor:
                    policy = [
                        self._log_probs.without_gradient(self.policy, batch) for batch in batches
                    ]
                    others = {
                        "reference": references,
                        "previous": [start[b] for b in range(len(batches))],
                        "behaviour": [batch.behaviour_log_probs for batch in batches],
                    }
                    kl = _drift(batches, policy, others)
            self.round += 1
            spans = clock.take()
        return Updated(
            round=self.round,
            version=self.version,
            steps=steps,
            skipped_steps=self._skipped_steps,
            reference_nll_nats=nll,
            kl=kl,
            responses=ResponseFigures(
                advantages=torch.cat([values.flatten() for values in advantages]).numpy(),
                policy_log_probs=_response_sums(policy),
                reference_log_probs=_response_sums(references),
            ),
            at=now(),
            spans=spans,
        )

    def _skip_round(self) -> Updated:
        with self._desk.call():
            self.round += 1
            spans = self._desk.clock.take()
        nothing = ResponseFigures(
            advantages=np.zeros(0, dtype=np.float32),
            policy_log_probs=None,
            reference_log_probs=None,
        )
        return Updated(
            round=self.round,
            version=self.version,
            steps=[],
            skipped_steps=self._skipped_steps,
            reference_nll_nats=None,
            kl={},
            responses=nothing,
            at=now(),
            spans=spans,
        )

    def publish(self, needed_from: int = 0) -> Published:
        """Hands the weights to the transport, which takes a snapshot. Of earlier ones those from
        the round `needed_from` on are still in use, or on their way."""
        with self._desk.call():
            with self._desk.clock("sync"):
                weights = self._weights()
                self._sender.release(needed_from)
                handle = self._sender.publish(weights, self._frozen())
            spans = self._desk.clock.take()
        return Published(
            handle=handle,
            version=weights.version,
            round=weights.round,
            spans=spans,
        )

    def _frozen(self) -> list[str]:
        return [n for n, p in self._parameters.items() if not p.requires_grad]

    def staged(self, round_: int) -> list[Tensor]:
        """The published snapshot of this round, for a transport that has the learner send it."""
        return cast("StagingSender", self._sender).staged(round_)

    def _weights(self) -> LiveWeights:
        dtype = getattr(torch, self.config.transport_dtype)
        tensors = {name: p.detach().to(dtype) for name, p in self._parameters.items()}
        return LiveWeights(version=self.version, round=self.round, tensors=tensors)

    def _advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """(groups, G)"""
        rewards = torch.stack([group.rewards for group in groups])
        advantage = ADVANTAGES[self.config.loss.advantage]
        return advantage(rewards, eps=self.config.loss.advantage_eps)

    def _collate(self, groups: Sequence[RolloutGroup], advantages: Tensor) -> TrainBatch:
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

    def _gradient_step(
        self, batch: TrainBatch, reference: Tensor | None, start: Tensor | None
    ) -> tuple[GradientStep, Tensor]:
        """Also the log-probs (B, S) that the step saw: those of the policy before it. `start`: of
        the policy at the start of the round, where the importance weight asks for them."""
        config = self.config
        lr = self._learning_rate()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        tokens = int(batch.response_mask.sum())
        denominator = loss_denominator(
            config.loss.aggregation, batch.response_mask, config.rollout.max_new_tokens
        )
        loss = entropy = 0.0
        seen = torch.zeros_like(batch.behaviour_log_probs)
        ratio_max = []
        clipped = bounded = 0
        ratio_counts = np.zeros(len(RATIO_EDGES) - 1, dtype=np.int64)
        for rows in microbatches(batch, config.optim.microbatch):
            micro = batch.rows(rows)
            mask, behaviour = micro.response_mask, micro.behaviour_log_probs
            log_probs, token_entropy = self._log_probs.with_entropy(self.policy, micro)
            old = behaviour
            if config.loss.importance_cap is not None:
                assert start is not None
                old = start[rows, : mask.shape[1]]
            micro_loss, was_clipped = self._objective(
                log_probs,
                old,
                behaviour,
                None if reference is None else reference[rows, : mask.shape[1]],
                micro.advantages,
                mask,
                denominator=denominator,
            )
            micro_loss.backward()
            with torch.no_grad():
                loss += float(micro_loss)
                entropy += float(masked_sum(token_entropy, mask))
                clipped += int((was_clipped & mask).sum())
                ratio = token_ratio(log_probs, old, mask)
                ratio_max.append(ratio.max())
                bounded += int(bounded_tokens(log_probs, old, mask).sum())
                ratio_counts += _count_ratios(ratio[mask])
                seen[rows, : mask.shape[1]] = log_probs
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.optim.grad_clip)
        )
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        self._finish_step(skipped)
        step = GradientStep(
            loss=loss,
            grad_norm=grad_norm,
            entropy_nats=entropy / max(tokens, 1),
            clip_fraction=clipped / max(tokens, 1),
            ratio_max=float(torch.stack(ratio_max).max()),  # NaN if one is
            bounded_tokens=bounded,
            ratio_counts=tuple(ratio_counts.tolist()),
            lr=lr,
            skipped=skipped,
            kl={},
        )
        return step, seen

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

    def _reference_log_probs(
        self, groups: Sequence[RolloutGroup], batch: TrainBatch
    ) -> Tensor | None:
        """(B, S); None without a reference."""
        match self.config.reference_role:
            case None:
                return None
            case "learner":
                assert self.reference is not None
                return self.reference.log_probs(batch)
        known = [group.reference_log_probs for group in groups]
        assert all(values is not None for values in known), "a generator made no reference pass"
        return as_rows(groups, cast("list[Tensor]", known)).to(self._desk.device)

    def _start_log_probs(
        self, batches: Sequence[TrainBatch], plan: Sequence[tuple[int, Tensor]]
    ) -> dict[int, Tensor]:
        """Of the policy before the round, (B, S) for each batch: all of them where the importance
        weight needs them; for monitoring alone none that the first gradient step runs through as a
        whole."""
        if self.config.loss.importance_cap is not None:
            needed = range(len(batches))
        elif self.config.loss.kl_monitor:
            first, rows = plan[0]
            covered = first if len(rows) == batches[first].num_rows else None
            needed = [b for b in range(len(batches)) if b != covered]
        else:
            needed = []
        return {b: self._log_probs.without_gradient(self.policy, batches[b]) for b in needed}

    def _reference_nll(
        self, batches: Sequence[TrainBatch], references: Sequence[Tensor | None]
    ) -> float | None:
        if self.config.reference_role is None:
            return None
        tokens = sum(int(batch.response_mask.sum()) for batch in batches)
        total = sum(float(log_probs.sum()) for log_probs in references if log_probs is not None)
        return -total / tokens

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> LearnerState:
        optimizer = {}
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                optimizer[f"{name}/{key}"] = value.detach().cpu().clone()
        return LearnerState(
            policy={
                name: parameter.detach().cpu().clone()
                for name, parameter in self._parameters.items()
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
        copy_parameters(self._parameters, state.policy, source="checkpoint")
        for name, parameter in self._parameters.items():
            prefix = f"{name}/"
            self.optimizer.state[parameter] = {
                key.removeprefix(prefix): _stored_like(parameter, value)
                for key, value in state.optimizer.items()
                if key.startswith(prefix)
            }
        self.version = state.counters["version"]
        self.round = state.counters["round"]
        self._skipped_steps = state.counters["skipped_steps"]
        self._skipped_in_a_row = state.counters["skipped_in_a_row"]

    def progress(self) -> int:
        """Another number after each microbatch."""
        return steps_done()

    def close(self) -> None:
        self._sender.close()


def _stored_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy on the parameter's device; a moment lies in memory as its parameter does, which the
    fused optimizer takes for granted."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _rows(log_probs: Tensor | None, rows: Tensor, batch: TrainBatch) -> Tensor | None:
    """`log_probs` of a whole batch, for the rows of a gradient step on `batch`, which is as wide as
    these need."""
    return None if log_probs is None else log_probs[rows, : batch.input_ids.shape[1]]


def _drift(
    batches: Sequence[TrainBatch],
    policy: Sequence[Tensor],
    others: Mapping[str, Sequence[Tensor | None]],
) -> dict[str, Drift]:
    """KL from the policy to the others; log-probs are (B, S) for each batch."""
    masks = [batch.response_mask for batch in batches]
    # Every batch counts by its responses.
    weights = [int(mask.any(dim=1).sum()) for mask in masks]
    drift = {}
    for name, log_probs in others.items():
        values = {}
        for estimator in ("k1", "k3"):
            total = 0.0
            for ours, theirs, mask, weight in zip(policy, log_probs, masks, weights, strict=True):
                assert theirs is not None  # who monitors has a reference
                kl = sequence_kl(ours.double(), theirs.double(), mask, estimator)
                total += weight * float(kl)
            values[estimator] = total / max(sum(weights), 1)
        drift[name] = Drift(**values)
    return drift


def _optimizer(parameters: Iterable[torch.nn.Parameter], config: GRPOConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.optim.lr,
        betas=config.optim.betas,
        weight_decay=config.optim.weight_decay,
        fused=True,
    )


def _scatter_rows(log_probs: Tensor, rows: Tensor, batch: TrainBatch) -> Tensor:
    """`log_probs` of the rows of a gradient step at their places in the whole batch (B, S)."""
    placed = torch.zeros_like(batch.behaviour_log_probs)
    placed[rows, : log_probs.shape[1]] = log_probs
    return placed


def _response_sums(log_probs: Sequence[Tensor | None]) -> np.ndarray | None:
    """(N,) sums over each response; log-probs are 0 off the mask."""
    known = [values for values in log_probs if values is not None]
    if not known:
        return None
    return torch.cat([values.sum(dim=1) for values in known]).cpu().numpy()


def _count_ratios(ratio: Tensor) -> np.ndarray:
    """Finite values between the `RATIO_EDGES`; what lies beyond counts in the outermost bins."""
    finite = ratio[ratio.isfinite()].cpu().numpy()
    return np.histogram(finite.clip(RATIO_EDGES[0], RATIO_EDGES[-1]), RATIO_EDGES)[0]
