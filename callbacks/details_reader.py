"""The base of callbacks that write down the details of a round."""

from __future__ import annotations

from typing import Any

from callbacks.fail_safe import FailSafeCallback
from grpo_trainable.details import DETAILS, RoundDetails


class DetailsReader(FailSafeCallback):
    """Hands on the details of each row; rows of a plain `GRPOTrainable` have none."""

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        details: RoundDetails | None = result.get(DETAILS)
        if details is not None:
            self.on_details(trial, result["training_iteration"], details)

    def on_details(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        raise NotImplementedError
