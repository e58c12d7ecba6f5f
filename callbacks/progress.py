"""One plain line whenever a trial starts, has been evaluated, or ends."""

from __future__ import annotations

import time
from typing import Any

from ray.tune import Callback

STAGES = ("rollout", "reward", "optimize", "reference", "sync", "eval")


class ProgressCallback(Callback):
    """Prints to standard output; a line names arm, seed, round, rewards, speed and time left."""

    def __init__(self, total_trials: int) -> None:
        self._total = total_trials
        self._started: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._ended = 0

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._started[trial.trial_id] = time.time()
        self._print(trial, f"started (trial {len(self._started)} of {self._total})")

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if self._evaluated.get(trial.trial_id) == result["eval/round"]:
            return
        self._evaluated[trial.trial_id] = result["eval/round"]
        self._print(trial, progress_line(result, trial.config["rounds"]))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._ended += 1
        seconds = time.time() - self._started.get(trial.trial_id, time.time())
        self._print(trial, f"done in {seconds:.0f} s ({self._ended} of {self._total} trials)")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._print(trial, "failed")

    def _print(self, trial: Any, text: str) -> None:
        label = f"{trial.config['arm']}/{trial.config['seed']}"
        print(f"{time.strftime('%H:%M:%S')}  {label:<18} {text}", flush=True)


def progress_line(result: dict[str, Any], rounds: int) -> str:
    """`round 16/64 · held-out 0.52 · …` of one row."""
    round_ = result["training_iteration"]
    seconds = {stage: result[f"time/{stage}_s"] for stage in STAGES if stage != "eval"}
    total = sum(seconds.values()) or 1.0
    shares = " ".join(f"{stage} {value / total:.0%}" for stage, value in seconds.items())
    left = result["time_total_s"] / round_ * (rounds - round_)
    return (
        f"round {round_}/{rounds} · held-out {result['reward/eval_mean']:.3f} · "
        f"train {result['reward/train_mean']:.3f} · "
        f"{result['throughput/samples_per_s']:.0f} samples/s · lag {result['lag/max']:.0f} · "
        f"{shares} · {left:.0f} s left"
    )
