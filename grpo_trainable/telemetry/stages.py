"""The stages of a round, with their order and their colours.

Each span of an actor's clock belongs to a stage. Metrics are named `time/<stage>_s` and
`time/<stage>_fraction`. This module imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The colours of one stage."""

    terminal: str  # colour in tables on a terminal, by its name in Rich
    figure: str  # colour in figures and in the report page
    optional: bool = False  # True if only some trials have this stage


# A round runs through the stages in this order, and figures stack them in this order. `other` is
# the part of a round in which no actor works on any stage. The colours of figures are Paul Tol's
# light scheme: they differ from each other and from the colours of the arms.
STAGES: dict[str, Stage] = {
    "rollout": Stage(terminal="blue", figure="#77AADD"),
    "vine": Stage(terminal="bright_blue", figure="#99DDFF", optional=True),
    "reward": Stage(terminal="cyan", figure="#FFAABB"),
    "optimize": Stage(terminal="yellow", figure="#EE8866"),
    "reference": Stage(terminal="magenta", figure="#EEDD88", optional=True),
    "sync": Stage(terminal="red", figure="#44BB99"),
    "eval": Stage(terminal="green", figure="#AAAA00"),
    "other": Stage(terminal="bright_black", figure="#BBBBBB"),
}
OTHER = "other"
WORK = tuple(stage for stage in STAGES if stage != OTHER)  # timed by the clocks of the actors
IDLE = "idle"  # between two calls, while the actor does not work, its span has this stage
IDLE_SIDES = ("generator_idle", "learner_idle")  # named as in the metric `time/generator_idle_s`

# Stage -> its name in traces, if that name differs.
TRACE_NAMES = {"eval": "evaluation", IDLE: "waiting"}
OTHER_THREADS = ", other threads"  # suffix of an actor's name in the trace row of its other threads


def shares_of_work(row: Mapping[str, float], *, without: str | None = None) -> dict[str, float]:
    """Return each stage's share of a round's work. The shares add up to 1.

    Stages that overlap (lag >= 1) count in full, so the shares are not shares of wall-clock time.

    Args:
        row: The metrics of the round. A stage without `time/<stage>_s` counts as 0 s.
        without: A stage to leave out.
    """
    seconds = {stage: row.get(f"time/{stage}_s", 0.0) for stage in STAGES if stage != without}
    total = sum(seconds.values()) or 1.0
    return {stage: value / total for stage, value in seconds.items()}
