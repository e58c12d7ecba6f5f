"""The stages of a round: which there are, their order, and how they are shown.

A span of an actor's clock belongs to a stage; metrics are called `time/<stage>_s` and
`time/<stage>_fraction`. Only the standard library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How one stage is shown."""

    terminal: str  # its colour in a table on a terminal, as Rich names it
    figure: str  # its colour in figures and on the page


# The order is that in which a round goes through them, and in which they are stacked. `other` is
# the part of a round in which no actor works on any stage. The colours of figures are Paul Tol's
# light scheme: they differ from each other, and from the colours of the arms.
STAGES: dict[str, Stage] = {
    "rollout": Stage(terminal="blue", figure="#77AADD"),
    "vine": Stage(terminal="bright_blue", figure="#99DDFF"),
    "reward": Stage(terminal="cyan", figure="#FFAABB"),
    "optimize": Stage(terminal="yellow", figure="#EE8866"),
    "reference": Stage(terminal="magenta", figure="#EEDD88"),
    "sync": Stage(terminal="red", figure="#44BB99"),
    "eval": Stage(terminal="green", figure="#AAAA00"),
    "other": Stage(terminal="bright_black", figure="#BBBBBB"),
}
OTHER = "other"
WORK = tuple(stage for stage in STAGES if stage != OTHER)  # timed by the clocks of the actors
IDLE = "idle"  # the stage of a span between two calls of an actor, which is not work
IDLE_SIDES = ("generator_idle", "learner_idle")  # metrics are called `time/<side>_s`

# What a trace calls a stage where it does not use its name.
TRACE_NAMES = {"eval": "evaluation", IDLE: "waiting"}
OTHER_THREADS = (
    ", other threads"  # follows an actor's name: the row of what these did during its calls
)
