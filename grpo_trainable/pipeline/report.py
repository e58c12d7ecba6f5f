"""The report of a round: its metrics, and a record of everything else that happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.pipeline.evaluation import Evaluation, HeldOut
from grpo_trainable.protocol.calls import OutOfBand
from grpo_trainable.protocol.messages import GradientStep, Loaded, Updated
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.versions import Sync, VersionChange
from grpo_trainable.tasks.task import USAGE
from grpo_trainable.telemetry.metrics import (
    EVAL_PART_FIRST,
    EVAL_PART_MEAN,
    ActorSpan,
    named_metrics,
    stage_seconds,
)
from grpo_trainable.telemetry.stages import shares_of_work
from grpo_trainable.telemetry.timers import Span, covered_seconds


@dataclass(kw_only=True)
class Counts:
    """Counts over the whole trial.

    Each field counts prompts, unless its name or comment says otherwise. Each requested prompt
    becomes one group: requested = trained + dropped + waiting + in flight.
    """

    requested: int = 0
    redispatched: int = 0  # requested again because their generator was lost
    requeued: int = 0  # given up because a round waited for them, and drawn again
    trained: int = 0  # trained on at least once
    dropped_stale: int = 0
    dropped_reward: int = 0
    dropped_lost: int = 0
    dropped_zero_advantage: int = 0
    dropped_straggler: int = 0
    reward_errors: int = 0  # counts responses
    unverified: int = 0  # counts responses
    scored_responses: int = 0
    checkpoint_failures: int = 0
    skipped_rounds: int = 0  # rounds without a group to train on
    short_batches: int = 0  # rollout batches that resampling could not fill
    sampled_responses: int = 0  # responses in training groups
    sampled_tokens: int = 0
    completions: int = 0  # responses sampled to estimate values of states
    # Calls to a judge, for training and evaluations (`USAGE` in `grpo_trainable/tasks/task.py`).
    judge_calls: int = 0
    judge_retries: int = 0
    judge_cached: int = 0
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0

    @property
    def dropped(self) -> int:
        """Number of prompts dropped for any reason."""
        return (
            self.dropped_stale
            + self.dropped_reward
            + self.dropped_lost
            + self.dropped_zero_advantage
            + self.dropped_straggler
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        names = ("requested", "redispatched", "requeued", "trained", "dropped", "reward_errors",
                 "completions", "unverified", "checkpoint_failures", "skipped_rounds",
                 "short_batches", "dropped_stale", "dropped_reward", "dropped_lost",
                 "dropped_zero_advantage", "dropped_straggler")  # fmt: skip
        if self.judge_calls or self.judge_cached:
            names += tuple(f"judge_{name}" for name in USAGE)
        return {f"count/{name}": float(getattr(self, name)) for name in names}

    def add_usage(self, usage: Mapping[str, int]) -> None:
        """Add `usage` to the counts of calls to a judge."""
        for name, count in usage.items():
            setattr(self, f"judge_{name}", getattr(self, f"judge_{name}") + count)


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """The result of a round: the groups it trained on, its metrics, and a record of what happened.

    `Pipeline.run_round` returns the report. A trial adds its own measurements, spans and notes.
    """

    round: int  # number of rounds of training so far
    last: bool  # True if no round follows
    start: float  # seconds since 1970
    end: float
    metrics: dict[str, float]  # keyed by the names in `metrics.NAMES`
    groups: list[RolloutGroup]  # the groups that the round trained on
    updated: Updated
    spans: list[ActorSpan]
    versions: list[VersionChange]
    evaluations: list[HeldOut]
    notes: list[str]  # notes for the user, one line each


class Recorder:
    """Collects spans, version changes, evaluations and notes until the round reports them.

    All times are given by the clock of the trial's process.
    """

    def __init__(self, offsets: Mapping[str, float] | None = None) -> None:
        """Create an empty record.

        Args:
            offsets: Actor -> number of seconds by which its clock is ahead of the trial's. For an
                actor without an entry, the value is 0.
        """
        self._offsets = {} if offsets is None else offsets
        self._begin()

    def _begin(self) -> None:
        self.spans: list[ActorSpan] = []
        self.versions: list[VersionChange] = []
        self.evaluations: list[HeldOut] = []
        self.notes: list[str] = []  # notes for the user, one line each
        self.sync_bytes = 0

    def report(
        self,
        updated: Updated,
        groups: list[RolloutGroup],
        metrics: dict[str, float],
        *,
        start: float,
        end: float,
        last: bool,
    ) -> RoundReport:
        """Return the report of a round that has trained on `groups`, and start an empty record."""
        report = RoundReport(
            round=updated.round,
            last=last,
            start=start,
            end=end,
            metrics=metrics,
            groups=groups,
            updated=updated,
            spans=self.spans,
            versions=sorted(self.versions, key=lambda change: change.at),
            evaluations=self.evaluations,
            notes=self.notes,
        )
        self._begin()
        return report

    def add_spans(self, role: str, actor: str, spans: Sequence[Span]) -> None:
        """Add an actor's spans, converted to the trial's clock."""
        ahead_s = self._ahead_s(actor)
        self.spans += [ActorSpan(role, actor, span.earlier(ahead_s)) for span in spans]

    def handle_for(self, actor: str, handle: Any) -> Any:
        """Convert the time in a handle from the trial's clock to the actor's."""
        return handle.later(self._ahead_s(actor)) if isinstance(handle, OutOfBand) else handle

    def handle_of(self, actor: str, handle: Any) -> Any:
        """Convert the time in a handle from the actor's clock to the trial's."""
        return handle.later(-self._ahead_s(actor)) if isinstance(handle, OutOfBand) else handle

    def _ahead_s(self, actor: str) -> float:
        return self._offsets.get(actor, 0.0)

    def forget_transfers(self) -> None:
        """Forget all spans and the number of bytes transferred so far."""
        self.spans, self.sync_bytes = [], 0

    def forget_spans(self, stage: str) -> None:
        """Forget the spans of a stage in this round."""
        self.spans = [item for item in self.spans if item.span.stage != stage]

    def note(self, text: str) -> None:
        """Add a one-line note for the user."""
        self.notes.append(text)

    def add_sync_bytes(self, count: int) -> None:
        """Add to the number of bytes transferred."""
        self.sync_bytes += count

    def add_version(
        self, role: str, actor: str, answer: Updated | Loaded, sync: Sync | None = None
    ) -> None:
        """Record that an actor has new weights.

        Args:
            role: "generator" or "learner".
            actor: The actor's name.
            answer: The actor's answer, which contains the version and the time.
            sync: A description of how the weights arrived; None for the learner.
        """
        self.versions.append(
            VersionChange(
                at=answer.at - self._ahead_s(actor),
                role=role,
                actor=actor,
                version=answer.version,
                weights_round=answer.round,
                sync=sync,
            )
        )


# ---- Metrics -----------------------------------------------------------------------------------


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of the latest evaluation."""
    return {
        "reward/eval_mean": evaluation.mean,
        "reward/eval_first": evaluation.first,
        "eval/round": float(evaluation.round),
        "eval/unscored": float(evaluation.unscored),
        **{
            f"eval/{label}/{name}": value
            for label, figures in evaluation.tasks.items()
            for name, value in figures.items()
        },
        **named_metrics(EVAL_PART_MEAN, evaluation.parts),
        **named_metrics(EVAL_PART_FIRST, evaluation.parts_first),
    }


def update_metrics(updated: Updated, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return metrics of the learner and of the `groups` that it trained on.

    A round without groups has no gradient steps and therefore no metrics of gradient steps.
    """
    row = {
        "optim/skipped_steps": float(updated.skipped_steps),
        "version/learner": float(updated.version),
        "loss/kl_coef": updated.kl_coefficient,
    }
    if groups:
        row |= _step_metrics(updated.steps)
        row["reward/answer_mean"] = _mean([group.answer_mean for group in groups])
        formats = [mean for group in groups if (mean := group.format_mean) is not None]
        if formats:
            row["reward/format_mean"] = _mean(formats)
    if updated.reference_nll_nats is not None:
        row["response/reference_nll_nats"] = updated.reference_nll_nats
        row["response/reference_nll_nats_se"] = updated.reference_nll_se
    if updated.sampler_mismatch_nats is not None:
        row["kl/sampler_mismatch_nats"] = updated.sampler_mismatch_nats
    if updated.teacher_nats is not None:
        row["kl/teacher_nats"] = updated.teacher_nats
    row |= _critic_metrics(updated)
    for other, drift in updated.kl.items():
        row[f"kl/{other}_nats"] = drift.k1
        row[f"kl/{other}_nats_se"] = drift.k1_se
        row[f"kl/{other}_k3_nats"] = drift.k3
        row[f"kl/{other}_k3_nats_se"] = drift.k3_se
    return row


def _critic_metrics(updated: Updated) -> dict[str, float]:
    """Return metrics of the critic. Metrics of gradient steps are means over the round's steps."""
    figures, steps = updated.critic, [step.critic for step in updated.steps if step.critic]
    if figures is None or not steps:
        return {}
    row = {
        "critic/loss": _mean([step.loss for step in steps]),
        "critic/clip_fraction": _mean([step.clip_fraction for step in steps]),
        "critic/grad_norm": _mean([step.grad_norm for step in steps]),
        "critic/value_mean": figures.value_mean,
        "critic/return_mean": figures.return_mean,
    }
    if figures.explained_variance is not None:
        row["critic/explained_variance"] = figures.explained_variance
    return row


def _step_metrics(steps: Sequence[GradientStep]) -> dict[str, float]:
    """Return metrics of a round's gradient steps.

    The metrics are means over the steps, with three exceptions: the ratio is the maximum over the
    steps, the number of bounded tokens is the sum, and the learning rate is the last step's.
    """
    return {
        "loss/policy": _mean([step.loss for step in steps]),
        "loss/clip_fraction": _mean([step.clip_fraction for step in steps]),
        "loss/weights_bounded_fraction": _mean([step.weights_bounded_fraction for step in steps]),
        "loss/ratio_max": max(step.ratio_max for step in steps),
        "loss/bounded_tokens": float(sum(step.bounded_tokens for step in steps)),
        "off_policy/ess_fraction": _mean([step.ess_fraction for step in steps]),
        "policy/entropy_nats": _mean([step.entropy_nats for step in steps]),
        "optim/grad_norm": _mean([step.grad_norm for step in steps]),
        "optim/lr": steps[-1].lr,
    }


def time_metrics(
    spans: Sequence[ActorSpan], sync_bytes: int, start: float, end: float
) -> dict[str, float]:
    """Return each stage's seconds and its share of the round, and transfers' size and speed.

    Args:
        spans: The spans of all actors.
        sync_bytes: Bytes of weights that were transferred.
        start: When the round began, in seconds since 1970.
        end: When the round ended.
    """
    busy = [item.span for item in spans if item.span.stage != "idle"]
    row = stage_seconds(spans)
    row["time/step_s"] = end - start
    row["time/other_s"] = end - start - covered_seconds(busy, start, end)
    row |= {f"time/{stage}_fraction": share for stage, share in shares_of_work(row).items()}
    row["sync/bytes"] = float(sync_bytes)
    row["sync/gb_per_s"] = sync_bytes / 1e9 / max(row["time/sync_s"], 1e-9)
    return row


def _mean(values: Sequence[float]) -> float:
    """Return the mean of values. Sort the values first, because a float sum depends on order."""
    return sum(sorted(values)) / len(values)
