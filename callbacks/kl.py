"""KL of every trial: its curve, a warning when it leaves its band, the reason when it ends one."""

from __future__ import annotations

import logging
from typing import Any

from callbacks.curves import Curves
from callbacks.survivor import Survivor
from callbacks.trial_files import config_of, label, restored_iteration, written_rows
from grpo_trainable.metrics import KL_TO

logger = logging.getLogger(__name__)

COLUMNS = tuple(f"kl/{other}_{unit}" for other in KL_TO for unit in ("nats", "k3_nats"))


class KLCallback(Survivor):
    """Follows `kl/*` of trials that measure it (`loss.kl_monitor`).

    `callbacks.kl_band` of a trial's config is judged by `kl/reference_nats`: a warning when it
    rises above the band, or falls below it after having been inside, and a line when it is back.
    `callbacks.kl_stop` is enforced by the trial itself, so that its last evaluation and checkpoint
    still follow; this callback says that it happened.
    """

    def __init__(self) -> None:
        self.curves = Curves(*COLUMNS)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        missing = self.curves.cut(trial.trial_id, restored_iteration(trial))
        for row in written_rows(trial, missing):
            self._keep(trial, row)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "kl/reference_nats" not in result:
            return
        round_, nats = result["training_iteration"], result["kl/reference_nats"]
        settings = config_of(trial).callbacks
        if settings.kl_band is not None:
            self._judge(trial, round_, nats, *settings.kl_band)
        self._keep(trial, result)
        limit = settings.kl_stop
        if limit is not None and nats > limit:
            logger.warning(
                "%s ends after round %d: kl/reference_nats %.3g is above callbacks.kl_stop=%g",
                *(label(trial), round_, nats, limit),
            )

    def _keep(self, trial: Any, row: dict[str, Any]) -> None:
        if "kl/reference_nats" in row:
            values = (row[name] for name in COLUMNS)
            self.curves.add(trial.trial_id, row["training_iteration"], *values)

    def _judge(self, trial: Any, round_: int, nats: float, low: float, high: float) -> None:
        _, before_nats, *_ = self.curves.last(trial.trial_id) or (0, 0.0)  # the first policy's is 0
        place = _place(nats, low, high)
        if place == _place(before_nats, low, high):
            return
        told = f"{label(trial)}, round {round_}: kl/reference_nats {nats:.3g} is"
        band = f"callbacks.kl_band [{low:g}, {high:g}]"
        if place == "inside":
            print(f"{told} in {band}", flush=True)
        else:
            logger.warning("%s %s %s", told, place, band)

    def get_state(self) -> dict[str, Any]:
        return {"curves": self.curves.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.curves.set_state(state["curves"])


def _place(nats: float, low: float, high: float) -> str:
    """Of a KL and its band; k1 is signed: with low = 0 nothing is below."""
    return "below" if low > 0 and nats < low else "above" if nats > high else "inside"
