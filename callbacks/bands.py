"""Warn when the KL, the length or the text of a trial's responses leaves its band.

A band is the range in which a figure of a trial should stay. `BANDS` lists the built-in bands.
`callbacks.kl_band` adds another band for the KL.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import config_of, continued_file, label, read_rows
from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.config.conditions import CONTROL
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.telemetry.metrics import SE, TRUNCATED_ABOVE

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

# A band compares the mean of the latest rounds with the mean of the first rounds. Each mean covers
# at least this many responses and rounds, because the mean of a few responses is noisy.
RESPONSES = 128
ROUNDS = 2

# The KL is estimated from a sample of the responses. It counts as outside its band only if its
# whole interval is outside. The interval is the estimate plus or minus this number of standard
# errors.
STANDARD_ERRORS = 2.0
KL = "kl/reference_nats"


# ---- The built-in bands ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Band:
    """The range in which a figure of a trial should stay.

    Each limit is a function of the start: the figure's mean over the first rounds.
    """

    figure: str  # the name of the figure, in words
    value: Callable[[Row], float | None]  # None if a row lacks the figure
    form: str  # format of a value
    high: Callable[[float], float]
    low: Callable[[float], float] = lambda start: -math.inf
    told: str  # the band in words, with `{start}` and `{high}` in place of their values
    advice: str
    judges: Callable[[GRPOConfig], bool]  # True for trials in which leaving the band is a bad sign

    def warning(self, latest: float, start: float) -> str | None:
        """Return a warning if the mean `latest` is outside the band, or None if it is inside."""
        if self.low(start) <= latest <= self.high(start):
            return None
        high = self.form.format(self.high(start))
        told = self.told.format(start=self.form.format(start), high=high)
        return (
            f"{self.figure} is {self.form.format(latest)}, outside its band ({told}); {self.advice}"
        )


def _kl_per_token(row: Row) -> float | None:
    """Return the lower end of the interval around a row's KL, divided by the tokens per response.

    Because the lower end counts, a sampling error alone causes no warning. Rows written by an
    earlier version of this package have no standard error, because that version measured all
    responses.
    """
    nats, tokens = row.get(KL), row.get("response/length_mean")
    return None if nats is None or not tokens else (nats - _margin(row)) / tokens


def _standard_error(row: Row) -> float:
    return row.get(f"{KL}{SE}", 0.0)


def _margin(row: Row) -> float:
    """Return half the width of the interval around a row's KL."""
    return STANDARD_ERRORS * _standard_error(row)


def _answers_once(config: GRPOConfig) -> bool:
    """Return False if responses are episodes. Episodes may change completely."""
    return config.task.name != CONTROL and not config.env.plays


BANDS = (
    Band(
        figure="KL per token",
        value=_kl_per_token,
        form="at least {:.2g} nats",
        high=lambda start: 0.5,
        told="at most 0.5 nats",
        advice="lower optim.lr or set loss.kl_coef",
        judges=_answers_once,
    ),
    Band(
        figure="response length",
        value=lambda row: row.get("response/length_mean"),
        form="{:.0f} tokens",
        high=lambda start: 2 * start,
        low=lambda start: start / 2,
        told="half to twice the {start} of the first rounds",
        advice="read rollouts/*.parquet",
        judges=lambda config: _answers_once(config) and config.task.length_penalty == 0,
    ),
    Band(
        figure="share of truncated responses",
        value=lambda row: row.get("response/truncated_fraction"),
        form="{:.0%}",
        # If many responses are already truncated in round 1, `_tell_of_limit` prints a line.
        high=lambda start: start + 0.25,
        told="at most {high}",
        advice="raise rollout.max_new_tokens if the reward needs the end of a response",
        judges=_answers_once,
    ),
    Band(
        figure="share of repeated text",
        value=lambda row: row.get("response/repeated_fraction"),
        form="{:.0%}",
        high=lambda start: start + 0.1,
        told="at most 10 points above the {start} of the first rounds",
        advice="read rollouts/*.parquet, and lower optim.lr if the text has collapsed",
        judges=_answers_once,
    ),
)


class Watch:
    """Judges one figure of a trial, and warns at most once."""

    def __init__(self, band: Band, rounds: int) -> None:
        """Start without any rows.

        Args:
            band: The band of the figure.
            rounds: Number of rounds in each mean.
        """
        self._band, self._rounds = band, rounds
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=rounds)
        self._warned = False

    def take(self, row: Row) -> str | None:
        """Add the row of the next round, and return a warning if the figure has left its band."""
        value = self._band.value(row)
        if value is None or self._warned:
            return None
        if len(self._first) < self._rounds:
            self._first.append(value)
            return None
        self._latest.append(value)
        if len(self._latest) < self._rounds:
            return None
        warning = self._band.warning(fmean(self._latest), fmean(self._first))
        self._warned = warning is not None
        return warning


def watches_of(config: GRPOConfig) -> list[Watch]:
    """Return a `Watch` for each band that applies to a trial."""
    rounds = max(ROUNDS, -(-RESPONSES // schedule.responses_per_round(config)))
    return [Watch(band, rounds) for band in BANDS if band.judges(config)]


# ---- The callback ------------------------------------------------------------------------------


class BandsCallback(FailSafeCallback):
    """Compares each trial's rows with the trial's bands.

    - `BANDS`: the callback warns at most once for each band of a trial.
    - `rollout.max_new_tokens`: if more than a quarter of the responses of the first round are
      truncated, the callback prints a line. This line is not a warning, because a low limit may be
      intended.
    - `callbacks.kl_band`: the callback warns when `kl/reference_nats` rises above the band, or
      falls below the band after having been inside. If the band begins at 0, a value far below 0
      counts as above the band. The callback prints a line when the KL returns to the band. The KL
      has left the band only if its interval, the estimate ± two standard errors, is entirely
      outside. The KL has returned only if the estimate itself is in the band.
    - `callbacks.kl_stop`: the callback reports that a trial ends because its KL is above this
      limit. The callback does not end the trial. The trial itself stops, after a last evaluation
      and a checkpoint.
    """

    def __init__(self) -> None:
        # Trial id -> the position of the KL relative to `callbacks.kl_band` in the last round.
        self._places: dict[str, str] = {}
        self._watches: dict[str, list[Watch]] = {}

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Forget the trial's rows, because the trial may start again from an earlier round."""
        self._places.pop(trial.trial_id, None)
        self._watches.pop(trial.trial_id, None)

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Compare a row with the trial's bands and limits."""
        config, round_ = config_of(trial), result["training_iteration"]
        if trial.trial_id not in self._watches:
            self._take_earlier(trial, config, round_)
        for watch in self._watches[trial.trial_id]:
            if warning := watch.take(result):
                logger.warning("%s, round %d: %s", label(trial), round_, warning)
        if round_ == 1 and _answers_once(config):
            _tell_of_limit(label(trial), config, result)
        if KL in result:
            before = self._places[trial.trial_id]
            place = _place(config, result, before)
            self._places[trial.trial_id] = place
            _judge_kl(label(trial), config, result, before, place)

    def _take_earlier(self, trial: Any, config: GRPOConfig, round_: int) -> None:
        """Read the rows before `round_` from a trial's `result.json`, without giving warnings."""
        watches = watches_of(config)
        place = _place(config, {KL: 0.0}, "inside")  # the KL of the initial policy
        for row in read_rows(continued_file(trial, EXPR_RESULT_FILE)) if round_ > 1 else ():
            if row["training_iteration"] < round_:
                for watch in watches:
                    watch.take(row)
                place = _place(config, row, place) if KL in row else place
        self._watches[trial.trial_id], self._places[trial.trial_id] = watches, place

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles callbacks with the experiment. After a resume, the rows are read again.
        return {"_places": {}, "_watches": {}}


def _tell_of_limit(trial: str, config: GRPOConfig, row: Row) -> None:
    """Print a line if many responses of the first round are truncated."""
    share = row.get("response/truncated_fraction", 0.0)
    if share > TRUNCATED_ABOVE:
        limit = config.rollout.max_new_tokens
        print(
            f"{trial}, round 1: rollout.max_new_tokens={limit} cuts off {share:.0%} of the "
            "responses; raise this limit if the reward needs the end of a response",
            flush=True,
        )


def _judge_kl(trial: str, config: GRPOConfig, row: Row, before: str, place: str) -> None:
    """Report if the KL has left or entered `callbacks.kl_band`, or if it ends the trial."""
    band, limit = config.callbacks.kl_band, config.callbacks.kl_stop
    round_, nats = row["training_iteration"], row[KL]
    if band is not None and place != before:
        se = _standard_error(row)
        estimated = f" ± {se:.2g}" if se else ""  # the same form as in the live table
        told = f"{trial}, round {round_}: kl/reference_nats {nats:.3g}{estimated} is"
        named = f"callbacks.kl_band [{band[0]:g}, {band[1]:g}]"
        if place == "inside":
            print(f"{told} in {named}", flush=True)
        elif nats < 0 and place == "above":
            logger.warning(
                "%s far below 0: the policy has moved far from the weights that sampled the "
                "responses, outside %s",
                *(told, named),
            )
        else:
            logger.warning("%s %s %s", told, place, named)
    if limit is not None and nats > limit:
        logger.warning(
            "%s ends after round %d: kl/reference_nats %.3g is above callbacks.kl_stop=%g",
            *(trial, round_, nats, limit),
        )


def _place(config: GRPOConfig, row: Row, before: str) -> str:
    """Return "below", "above" or "inside", the position of a row's KL relative to its band.

    If the KL is outside the band but its interval reaches into the band, return `before`, the
    position in the previous row. So sampling errors near a limit of the band cause no messages.
    Without a band, every KL is inside. The estimate of the KL can be negative. It is far below 0 if
    the policy has moved far from the weights that sampled the responses. So in a band that begins
    at 0, the estimate counts without its sign.
    """
    if config.callbacks.kl_band is None:
        return "inside"
    (low, high), nats, margin = config.callbacks.kl_band, row[KL], _margin(row)
    nats = nats if low > 0 else abs(nats)
    if low <= nats <= high:
        return "inside"
    if nats + margin < low:
        return "below"
    return "above" if nats - margin > high else before
