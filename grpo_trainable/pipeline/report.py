"""What a round reports: its metrics, and what else happened meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.pipeline.evaluation import Evaluation, HeldOut
from grpo_trainable.protocol.calls import OutOfBand
from grpo_trainable.protocol.messages import GradientStep, Loaded, Updated
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.versions import Sync, VersionChange
from grpo_trainable.telemetry.metrics import ActorSpan, stage_seconds
from grpo_trainable.telemetry.timers import Span, covered_seconds


@dataclass(kw_only=True)
class Counts:
    """Groups over the whole trial: requested = trained + dropped + waiting + in flight."""

    requested: int = 0
    redispatched: int = 0  # asked for once more, because their generator was lost
    trained: int = 0  # groups that were trained on at least once
    dropped_stale: int = 0
    dropped_reward: int = 0
    dropped_lost: int = 0
    dropped_zero_advantage: int = 0
    reward_errors: int = 0  # responses
    unverified: int = 0  # responses
    scored_responses: int = 0
    checkpoint_failures: int = 0
    skipped_rounds: int = 0  # rounds with nothing to train on
    short_batches: int = 0  # batches that resampling could not fill
    sampled_responses: int = 0  # responses in training groups
    sampled_tokens: int = 0
    completions: int = 0  # responses sampled to value states

    @property
    def dropped(self) -> int:
        return (
            self.dropped_stale
            + self.dropped_reward
            + self.dropped_lost
            + self.dropped_zero_advantage
        )

    def metrics(self) -> dict[str, float]:
        names = ("requested", "redispatched", "trained", "dropped", "reward_errors", "completions",
                 "unverified", "checkpoint_failures", "skipped_rounds", "short_batches",
                 "dropped_stale", "dropped_reward", "dropped_lost",
                 "dropped_zero_advantage")  # fmt: skip
        return {f"count/{name}": float(getattr(self, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What a round trained on, measured and has to tell. `Pipeline.run_round` returns it; a trial
    adds what it measures itself, its own spans and its notes."""

    round: int  # rounds trained so far
    last: bool  # the trial is over
    start: float  # seconds since 1970
    end: float
    metrics: dict[str, float]  # keys are those of `metrics.NAMES`
    groups: list[RolloutGroup]  # those trained on
    updated: Updated
    spans: list[ActorSpan]
    versions: list[VersionChange]
    evaluations: list[HeldOut]
    notes: list[str]  # what the user should hear of, in one line each


class Recorder:
    """Collects what happens until the round reports it, all by the clock of the trial's process."""

    def __init__(self, offsets: Mapping[str, float] | None = None) -> None:
        """`offsets`: actor -> seconds that its clock is ahead of ours, where that is known."""
        self._offsets = {} if offsets is None else offsets
        self._begin()

    def _begin(self) -> None:
        self.spans: list[ActorSpan] = []
        self.versions: list[VersionChange] = []
        self.evaluations: list[HeldOut] = []
        self.notes: list[str] = []  # what the user should hear of, in one line each
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
        """Return the report of a round that has trained on `groups`, and begin the next."""
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
        ahead_s = self._ahead_s(actor)
        self.spans += [ActorSpan(role, actor, span.earlier(ahead_s)) for span in spans]

    def handle_for(self, actor: str, handle: Any) -> Any:
        """A handle of our clock by that of the actor."""
        return handle.later(self._ahead_s(actor)) if isinstance(handle, OutOfBand) else handle

    def handle_of(self, actor: str, handle: Any) -> Any:
        """A handle of the actor's clock by ours."""
        return handle.later(-self._ahead_s(actor)) if isinstance(handle, OutOfBand) else handle

    def _ahead_s(self, actor: str) -> float:
        return self._offsets.get(actor, 0.0)

    def forget_transfers(self) -> None:
        """Forget how long everything took so far, and what has travelled."""
        self.spans, self.sync_bytes = [], 0

    def forget_spans(self, stage: str) -> None:
        """Drops what was recorded of a stage in this round."""
        self.spans = [item for item in self.spans if item.span.stage != stage]

    def note(self, text: str) -> None:
        """Tells the user something, in one line."""
        self.notes.append(text)

    def add_sync_bytes(self, count: int) -> None:
        self.sync_bytes += count

    def add_version(
        self, role: str, actor: str, answer: Updated | Loaded, sync: Sync | None = None
    ) -> None:
        """An actor has other weights; `sync` is how they came, None in the learner."""
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
    }


def update_metrics(updated: Updated, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Figures of the learner and of the `groups` trained on; a round without any has no gradient
    step either."""
    row = {
        "optim/skipped_steps": float(updated.skipped_steps),
        "version/learner": float(updated.version),
        "loss/kl_coef": updated.kl_coefficient,
    }
    if groups:
        row |= _step_metrics(updated.steps)
        row["reward/format_mean"] = _mean([group.format_mean for group in groups])
        row["reward/answer_mean"] = _mean([group.answer_mean for group in groups])
    if updated.reference_nll_nats is not None:
        row["response/reference_nll_nats"] = updated.reference_nll_nats
    if updated.sampler_mismatch_nats is not None:
        row["kl/sampler_mismatch_nats"] = updated.sampler_mismatch_nats
    if updated.teacher_nats is not None:
        row["kl/teacher_nats"] = updated.teacher_nats
    row |= _critic_metrics(updated)
    for other, drift in updated.kl.items():
        row[f"kl/{other}_nats"] = drift.k1
        row[f"kl/{other}_k3_nats"] = drift.k3
    return row


def _critic_metrics(updated: Updated) -> dict[str, float]:
    """Figures of a critic; means over the round's gradient steps where they are of a step."""
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
    """Means over a round's gradient steps, but for the largest ratio and the counts."""
    return {
        "loss/policy": _mean([step.loss for step in steps]),
        "loss/clip_fraction": _mean([step.clip_fraction for step in steps]),
        "loss/weights_bounded_fraction": _mean([step.weights_bounded_fraction for step in steps]),
        "loss/ratio_max": max(step.ratio_max for step in steps),
        "loss/bounded_tokens": float(sum(step.bounded_tokens for step in steps)),
        "policy/entropy_nats": _mean([step.entropy_nats for step in steps]),
        "optim/grad_norm": _mean([step.grad_norm for step in steps]),
        "optim/lr": steps[-1].lr,
    }


def time_metrics(
    spans: Sequence[ActorSpan], sync_bytes: int, start: float, end: float
) -> dict[str, float]:
    """Seconds of each stage between `start` and `end`, and what weights took on their way."""
    busy = [item.span for item in spans if item.span.stage != "idle"]
    row = stage_seconds(spans)
    row["time/step_s"] = end - start
    row["time/other_s"] = end - start - covered_seconds(busy, start, end)
    row["sync/bytes"] = float(sync_bytes)
    row["sync/gb_per_s"] = sync_bytes / 1e9 / max(row["time/sync_s"], 1e-9)
    return row


def _mean(values: Sequence[float]) -> float:
    """Sorted: several generators answer in any order, and a sum of floats depends on it."""
    return sum(sorted(values)) / len(values)
