"""Chart types: lines and bars per arm, stages, versions over time, and lags of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from grpo_trainable.text import written
from reports.canvas import FONT, HEIGHT, Plot, Theme, axes_of, colour, legend, marker, panels
from reports.parquet_reader import TrialFiles
from reports.records import TrialRecord
from reports.series import STAGE_COLOURS, WAITING, Arms, Series, curve, metric

LEGEND_LINE = 0.25  # height of one line of a legend, in inches
# Number of rounds in the plot of versions. With 64 rounds, single rounds would be invisible.
FIRST_ROUNDS = 12


@dataclass(frozen=True)
class Bar:
    """Length of a bar and the ends of its whisker."""

    middle: float
    low: float
    high: float


def lines(
    arms: Arms,
    *,
    name: str,
    title: str,
    look: str,
    x_label: str,
    y_label: str,
    series: Series,
    missing: str,
    dotted: Series | None = None,
    margin: Series | None = None,
    legend_of: tuple[str, str] | None = None,
    apart: float = 0.0,
    whole: bool = False,
    linear_within: float | None = None,
    joined: int = 1,
) -> Plot:
    """Return a plot with a line for each arm.

    With several seeds, a band shows the range of their values. A margin widens the band, even for
    a single seed.

    Args:
        arms: arm -> trials of the arm.
        name: The name of the plot's file.
        title: The title of the plot.
        look: The text that explains the plot.
        x_label: The label of the x axis.
        y_label: The label of the y axis.
        series: A function that yields the points of a trial.
        missing: The reason to show if no arm has points.
        dotted: A function that yields the points of a second, dotted line.
        margin: A function that yields the margins of error of the solid line.
        legend_of: The meaning of solid and of dotted lines.
        apart: Shift between the lines of neighbouring arms, in units of y, so that equal lines stay
            visible.
        whole: Show whole numbers on the y axis.
        linear_within: If any absolute value exceeds ten times this number, the y axis is
            logarithmic beyond this number. Unless this number is None, the y axis covers only the
            solid lines, so dotted lines may leave the plot.
        joined: An arm with fewer points than this number has no line and no band. Vertical lines
            show the range of its values.
    """
    curves = {arm: curve(trials, series, margin) for arm, trials in arms.items()}
    seconds = {arm: curve(trials, dotted) if dotted else [] for arm, trials in arms.items()}
    shifts = [apart * (i - (len(curves) - 1) / 2) for i in range(len(curves))]

    def draw(figure: Figure, theme: Theme) -> None:
        below = LEGEND_LINE if legend_of else 0.0
        axes = axes_of(figure, theme, x_label=x_label, y_label=y_label, below=below)
        if linear_within is not None:
            largest = max(abs(point.y) for points in curves.values() for point in points)
            # Below this limit, a logarithmic axis would show at most two numbers.
            if largest > 10 * linear_within:
                axes.set_yscale("symlog", linthresh=linear_within)
                axes.yaxis.set_major_formatter("{x:g}")
            axes.axhline(0, color=theme.text, linewidth=0.8)
        for i, points in enumerate(curves.values()):
            # Curves of different arms can be equal bit for bit. A wider line stays visible behind a
            # narrower one.
            covering = 0 if apart else list(curves.values())[i + 1 :].count(points)
            xs = [point.x for point in points]
            every = max(1, len(points) // 6)
            is_line = len(points) >= joined
            axes.plot(
                xs,
                [point.y + shifts[i] for point in points],
                color=colour(i),
                linestyle="-" if is_line else "",
                marker=marker(i),
                markersize=5 + 3 * covering,
                # Start the markers of different arms at different rounds, so that all are visible.
                markevery=(i % every, every),
                linewidth=1.6 + 2.4 * covering,
                zorder=3,
            )
            lows = [point.low + shifts[i] for point in points]
            highs = [point.high + shifts[i] for point in points]
            if any(point.low < point.high for point in points):
                if is_line:
                    axes.fill_between(xs, lows, highs, color=colour(i), alpha=0.16, linewidth=0)
                else:
                    axes.vlines(xs, lows, highs, color=colour(i), linewidth=1.6)
        if linear_within is not None:
            axes.set_ylim(axes.get_ylim())  # so that dotted lines do not change the range
        for i, points in enumerate(seconds.values()):
            axes.plot(
                [point.x for point in points],
                [point.y + shifts[i] for point in points],
                color=colour(i),
                linestyle=":",
                linewidth=1.4,
                zorder=2,
            )
        if legend_of is not None:
            handles = [
                Line2D([], [], color=theme.text, linewidth=1.6, linestyle=style, label=label)
                for style, label in zip(("-", ":"), legend_of, strict=True)
            ]
            legend(figure, theme, handles, columns=2)
        if whole:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -0.2), max(high, 1.2))

    last = ", ".join(f"{arm} {points[-1].y:.3g}" for arm, points in curves.items() if points)
    return Plot(
        name=name,
        title=title,
        look=look,
        draw=draw,
        alt=f"Line plot of {y_label} against {x_label}. Last values: {last}.",
        missing=None if any(curves.values()) else missing,
    )


def bars(
    values: Mapping[str, Bar | str],
    *,
    name: str,
    title: str,
    look: str,
    unit: str,
    form: str,
    line: float | None,
    missing: str,
) -> Plot:
    """Return a plot with a bar and a whisker for each arm.

    Args:
        values: The bar of each arm, or the words to show in its place.
        name: The name of the plot's file.
        title: The title of the plot.
        look: The text that explains the plot.
        unit: The label of the x axis.
        form: The format of the number beside a bar.
        line: The value at which to draw a vertical line, or None.
        missing: The reason to show if no arm has a bar.
    """
    known = {arm: bar for arm, bar in values.items() if isinstance(bar, Bar)}
    labels = {
        arm: written(bar.middle, form) if isinstance(bar, Bar) else bar
        for arm, bar in values.items()
    }

    def draw(figure: Figure, theme: Theme) -> None:
        axes = axes_of(figure, theme, x_label=unit, y_label="", names=list(values))
        # Cut off a very wide interval, because it would squeeze all bars. Two seeds can give such
        # an interval.
        end = 3 * max(bar.middle for bar in known.values())
        end = min(end, max(bar.high for bar in known.values()))
        for i, (arm, bar) in enumerate(values.items()):
            if isinstance(bar, str):
                axes.text(0.01 * end, i, bar, va="center", color=theme.text, fontsize=FONT)
                continue
            axes.barh(i, bar.middle, height=0.66, color=colour(i), zorder=2)
            if bar.low < bar.high:
                ends = [bar.low, min(bar.high, end)]
                axes.plot(ends, [i, i], color=theme.text, linewidth=1.6, zorder=3)
            axes.text(
                min(bar.high, end) + 0.02 * end,
                i,
                labels[arm],
                va="center",
                color=theme.text,
                fontsize=FONT,
                bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 0.6},
            )
        if line is not None:
            axes.axvline(line, color=theme.text, linewidth=1, linestyle="--", zorder=1)
        axes.set_xlim(0, 1.27 * end)

    return Plot(
        name=name,
        title=title,
        look=look,
        draw=draw,
        alt="Bars. " + ", ".join(f"{arm} {label}" for arm, label in labels.items()) + ".",
        height=max(HEIGHT, 1.0 + 0.3 * len(values)),
        missing=None if known else missing,
    )


@dataclass(frozen=True)
class MenuPoint:
    """Position of an arm in the plot of the menu."""

    arm: int  # index among all arms, which determines colour and marker
    speed: Bar
    reward: Bar  # difference from the baseline


def draw_menu(figure: Figure, theme: Theme, points: Sequence[MenuPoint], margin: float) -> None:
    """Draw the reward difference of each arm against its speed-up, with the margin as a band."""
    axes = axes_of(figure, theme, x_label="speed-up", y_label="reward difference")
    axes.axhspan(-margin, 0, color=theme.text, alpha=0.12, linewidth=0)
    axes.axhline(0, color=theme.text, linewidth=0.8)
    for point in points:
        speed, reward, fill = point.speed, point.reward, colour(point.arm)
        axes.plot([speed.low, speed.high], [reward.middle] * 2, color=fill, linewidth=1.6)
        axes.plot([speed.middle] * 2, [reward.low, reward.high], color=fill, linewidth=1.6)
        axes.plot(
            [speed.middle], [reward.middle], color=fill, marker=marker(point.arm), markersize=7
        )
    # Bounds over two or three seeds can be very wide, and would hide the differences.
    largest = max(abs(point.reward.middle) for point in points)
    bounds = max(max(abs(point.reward.low), abs(point.reward.high)) for point in points)
    limit = max(2 * margin, 1.3 * largest, min(1.1 * bounds, 5 * margin))
    axes.set_ylim(-limit, limit)


def draw_stage_bars(
    figure: Figure, theme: Theme, seconds: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw the seconds of each stage as stacked bars, one per arm.

    Args:
        figure: The figure to draw on.
        theme: The colours.
        seconds: arm -> stage -> seconds, from `series.stage_seconds`.
    """
    axes = axes_of(figure, theme, x_label="seconds", y_label="", names=list(seconds), below=0.85)
    for i, stages in enumerate(seconds.values()):
        left = 0.0
        for stage, fill in STAGE_COLOURS.items():
            axes.barh(i - 0.13, stages[stage], left=left, height=0.42, color=fill, zorder=2)
            left += stages[stage]
        if stages["step"]:
            step = [stages["step"]] * 2
            axes.plot(step, [i - 0.4, i + 0.14], color=theme.text, linewidth=2, zorder=3)
        for place, (waiting, hatch) in enumerate(zip(WAITING, ("////", "...."), strict=True)):
            axes.barh(
                i + 0.18 + 0.15 * place,
                stages[waiting],
                height=0.13,
                facecolor="none",
                edgecolor=theme.text,
                hatch=hatch,
                linewidth=0.6,
                zorder=2,
            )
    axes.set_ylim(len(seconds) - 0.4, -0.6)
    occurring = [stage for stage in STAGE_COLOURS if any(own[stage] for own in seconds.values())]
    _stage_legend(figure, theme, occurring, waiting=True)


def draw_stage_areas(figure: Figure, theme: Theme, arms: Arms) -> None:
    """Draw the seconds of each stage over the rounds as stacked areas, one panel per arm."""

    def draw(axes: Axes, i: int, trials: Sequence[TrialRecord]) -> None:
        layers = [
            {point.x: point.y for point in curve(trials, metric(f"time/{stage}_s"))}
            for stage in STAGE_COLOURS
        ]
        rounds = sorted({x for layer in layers for x in layer})
        if rounds:
            heights = [[layer.get(x, 0.0) for x in rounds] for layer in layers]
            axes.stackplot(rounds, *heights, colors=list(STAGE_COLOURS.values()), linewidth=0)
            axes.set_xlim(rounds[0], max(rounds[-1], rounds[0] + 1))
        axes.set_ylim(bottom=0)

    panels(figure, theme, arms, draw, x_label="round", y_label="seconds")
    trials = [trial for own in arms.values() for trial in own]
    occurring = [
        stage
        for stage in STAGE_COLOURS
        if any(any(trial.column(f"time/{stage}_s")) for trial in trials)
    ]
    _stage_legend(figure, theme, occurring, waiting=False)


def _stage_legend(figure: Figure, theme: Theme, stages: Sequence[str], *, waiting: bool) -> None:
    handles: list[Any] = [Patch(facecolor=STAGE_COLOURS[stage], label=stage) for stage in stages]
    if waiting:
        handles += [
            Patch(facecolor="none", edgecolor=theme.text, hatch=hatch, label=label, linewidth=0.6)
            for label, hatch in zip(WAITING.values(), ("////", "...."), strict=True)
        ]
    legend(figure, theme, handles, columns=3 if waiting else 4)


def draw_versions(figure: Figure, theme: Theme, files: Mapping[str, TrialFiles]) -> None:
    """Draw the policy versions of the learner and the generators over time, one panel per arm.

    Args:
        figure: The figure to draw on.
        theme: The colours.
        files: arm -> the figures of one of the arm's trials.
    """

    def draw(axes: Axes, i: int, read: TrialFiles) -> None:
        learner = [change for change in read.changes if change.side == "learner"]
        steps = list(dict.fromkeys(change.version for change in learner))
        last = steps[min(FIRST_ROUNDS, len(steps)) - 1] if steps else math.inf
        changes = [change for change in read.changes if change.version <= last]
        end = 1.05 * max((change.second for change in changes), default=1.0)
        # Draw a line for each actor, because generators change version at different times.
        for side, actor in sorted({(c.side, c.actor) for c in changes}):
            own = [(c.second, c.version) for c in changes if (c.side, c.actor) == (side, actor)]
            if side == "learner":
                # The learner's first change is its first step. Before that step, the learner has
                # the version that the generators load first.
                own.insert(0, (0.0, min(change.version for change in changes)))
            own.append((end, own[-1][1]))
            axes.step(
                *zip(*own, strict=True),
                where="post",
                color=colour(i) if side == "learner" else theme.text,
                linestyle="-" if side == "learner" else ":",
                linewidth=2.2 if side == "learner" else 1.4,
                zorder=2 if side == "learner" else 3,
            )
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))

    panels(figure, theme, files, draw, x_label="seconds", y_label="gradient steps")
    handles = [
        Line2D([], [], color=theme.text, linewidth=2.2, label="learner (in the arm's colour)"),
        Line2D([], [], color=theme.text, linewidth=1.4, linestyle=":", label="generator"),
    ]
    legend(figure, theme, handles, columns=2)


def draw_lag_histogram(
    figure: Figure, theme: Theme, shares: Mapping[str, Mapping[int, float]]
) -> None:
    """Draw the share of groups at each lag as bars, with the arms side by side.

    Args:
        figure: The figure to draw on.
        theme: The colours.
        shares: arm -> lag -> share of groups.
    """
    axes = axes_of(figure, theme, x_label="lag, rounds", y_label="share of groups")
    lags = sorted({lag for arm in shares.values() for lag in arm})
    width = 0.84 / len(shares)
    for i, arm in enumerate(shares.values()):
        places = [n - 0.42 + (i + 0.5) * width for n in range(len(lags))]
        heights = [arm.get(lag, 0.0) for lag in lags]
        axes.bar(places, heights, width=0.9 * width, color=colour(i), zorder=2)
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_xlim(-0.5, len(lags) - 0.5)
    axes.set_ylim(0, 1.05)
    axes.grid(visible=False, axis="x")
