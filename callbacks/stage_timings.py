"""Where the time of every trial went: shares of each round, and totals at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callbacks.curves import Curves
from callbacks.survivor import Survivor
from callbacks.trial_files import label, restored_iteration, written_rows
from callbacks.verbosity import is_verbose

# In the order in which a round goes through them, which is how they are stacked.
STAGES = ("rollout", "reward", "optimize", "reference", "sync", "eval", "other")
IDLE = ("generator_idle", "learner_idle")


def stage_fractions(result: Mapping[str, Any]) -> dict[str, float]:
    """`time/<stage>_fraction` of one row: shares of the work of a round that add up to 1.

    Stages that overlap (lag >= 1) count in full, so these are shares of work, not of wall-clock.
    """
    seconds = {stage: float(result[f"time/{stage}_s"]) for stage in STAGES}
    total = sum(seconds.values()) or 1.0
    return {f"time/{stage}_fraction": value / total for stage, value in seconds.items()}


class StageTimingsCallback(Survivor):
    """Adds the shares to each row, keeps the seconds of every stage and round, and says at a
    trial's end what they came to."""

    def __init__(self) -> None:
        self.series = Curves(*STAGES, *IDLE, "device_hours")

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        missing = self.series.cut(trial.trial_id, restored_iteration(trial))
        for row in written_rows(trial, missing):
            self._keep(trial, row)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        result.update(stage_fractions(result))
        self._keep(trial, result)

    def _keep(self, trial: Any, row: Mapping[str, Any]) -> None:
        self.series.add(
            trial.trial_id,
            row["training_iteration"],
            *(row[f"time/{name}_s"] for name in (*STAGES, *IDLE)),
            row["cost/device_hours"],
        )

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if is_verbose(trial) and (totals := self.totals(trial.trial_id)):
            print(f"{label(trial):<18} {_line(totals)}", flush=True)

    def totals(self, trial_id: str) -> dict[str, float]:
        """Seconds of each stage over all rounds of a trial, and its device-hours; empty before its
        first round."""
        rows = self.series.rows(trial_id)
        if not rows:
            return {}
        names = self.series.columns[1:-1]
        sums = {name: sum(row[i + 1] for row in rows) for i, name in enumerate(names)}
        return {**sums, "device_hours": rows[-1][-1]}

    def get_state(self) -> dict[str, Any]:
        return self.series.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.series.set_state(state)


def _line(totals: Mapping[str, float]) -> str:
    stages = " ".join(f"{stage} {totals[stage]:.1f}" for stage in STAGES)
    return (
        f"seconds by stage: {stages}; waiting: generator {totals['generator_idle']:.1f}, "
        f"learner {totals['learner_idle']:.1f}; {totals['device_hours']:.4f} device-hours"
    )
