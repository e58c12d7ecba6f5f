"""Warn when the KL of a trial leaves its band, and when the KL ends the trial."""

from __future__ import annotations

import logging
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import config_of, continued_file, label, read_rows
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE

logger = logging.getLogger(__name__)


class KLCallback(FailSafeCallback):
    """Compares `kl/reference_nats` with the limits in a trial's config.

    The callback does nothing for trials that do not measure the KL (`loss.kl_monitor`).

    - `callbacks.kl_band`: the callback warns when the KL rises above the band, or falls below the
      band after having been inside. The callback prints a line when the KL is back in the band.
    - `callbacks.kl_stop`: the callback reports that the KL ends a trial. The callback does not end
      the trial: the trial does so itself, after a last evaluation and a checkpoint.
    """

    def __init__(self) -> None:
        self._nats: dict[str, float] = {}  # trial -> kl/reference_nats of its last round

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Forget the last KL: the trial may start from an earlier round."""
        self._nats.pop(trial.trial_id, None)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Compare the KL of a row with the band and the limit."""
        if "kl/reference_nats" not in result:
            return
        round_, nats = result["training_iteration"], result["kl/reference_nats"]
        settings = config_of(trial).callbacks
        if settings.kl_band is not None:
            if trial.trial_id not in self._nats:
                self._nats[trial.trial_id] = nats_before(trial, round_)
            self._judge(trial, round_, self._nats[trial.trial_id], nats, *settings.kl_band)
        self._nats[trial.trial_id] = nats
        limit = settings.kl_stop
        if limit is not None and nats > limit:
            logger.warning(
                "%s ends after round %d: kl/reference_nats %.3g is above callbacks.kl_stop=%g",
                *(label(trial), round_, nats, limit),
            )

    def _judge(
        self, trial: Any, round_: int, before: float, nats: float, low: float, high: float
    ) -> None:
        place = _place(nats, low, high)
        if place == _place(before, low, high):
            return
        told = f"{label(trial)}, round {round_}: kl/reference_nats {nats:.3g} is"
        band = f"callbacks.kl_band [{low:g}, {high:g}]"
        if place == "inside":
            print(f"{told} in {band}", flush=True)
        else:
            logger.warning("%s %s %s", told, place, band)


def nats_before(trial: Any, round_: int) -> float:
    """Return the KL of the last round before `round_` in a trial's `result.json`.

    If there is no such round, return 0, the KL of the initial policy.
    """
    rows = read_rows(continued_file(trial, EXPR_RESULT_FILE)) if round_ > 1 else ()
    earlier = (row for row in rows if row["training_iteration"] < round_)
    return [0.0, *(r["kl/reference_nats"] for r in earlier if "kl/reference_nats" in r)][-1]


def _place(nats: float, low: float, high: float) -> str:
    """Return "below", "above" or "inside", the position of a KL relative to its band.

    The estimate of the KL can be negative, so no value counts as below if `low` is 0.
    """
    return "below" if low > 0 and nats < low else "above" if nats > high else "inside"
