"""Show how a trial spent its time, as totals at the trial's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import continued_file, is_verbose, label, read_rows
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.telemetry.stages import IDLE_SIDES, STAGES


class StageTimingsCallback(FailSafeCallback):
    """Prints the total seconds of every stage at the end of a verbose trial."""

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Print the totals of a verbose trial."""
        if is_verbose(trial) and (totals := stage_totals(trial)):
            print(f"{label(trial):<18} {_line(totals)}", flush=True)


def stage_totals(trial: Any) -> dict[str, float]:
    """Return a trial's device-hours, and its seconds in each stage, in waiting and in saving.

    The totals cover all rounds in the trial's `result.json`. Before the first round, the result is
    empty.
    """
    totals: dict[str, float] = {}
    for row in read_rows(continued_file(trial, EXPR_RESULT_FILE)):
        for name in (*STAGES, *IDLE_SIDES, "checkpoint"):
            totals[name] = totals.get(name, 0.0) + row.get(f"time/{name}_s", 0.0)
        totals["device_hours"] = row["cost/device_hours"]  # this metric is already a total
    return totals


def _line(totals: Mapping[str, float]) -> str:
    stages = " ".join(f"{stage} {totals[stage]:.1f}" for stage in STAGES if totals[stage])
    return (
        f"seconds by stage: {stages}; between rounds: checkpoints {totals['checkpoint']:.1f}; "
        f"waiting: generator {totals['generator_idle']:.1f}, "
        f"learner {totals['learner_idle']:.1f}; {totals['device_hours']:.4f} device-hours"
    )
