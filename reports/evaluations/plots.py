"""The figures on the page of an evaluation: what more attempts buy, and how long responses are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from reports.canvas import HEIGHT, Plot, Theme, axes_of, colour, legend, marker
from reports.evaluations.measures import Figure, Measure
from reports.evaluations.record import EvaluationRecord

BARS = 24  # bars of the histogram of lengths
ALL = "all responses"


def plots(record: EvaluationRecord, measured: Mapping[str, Measure]) -> list[Plot]:
    """The figures, in the order of the page."""
    return [_attempts(measured), _lengths(record)]


def _attempts(measured: Mapping[str, Measure]) -> Plot:
    curves: dict[str, dict[int, Figure]] = {}
    for name, measure in measured.items():
        kind, at, k = name.partition("@")
        if at:
            curves.setdefault(f"{kind}@k", {})[int(k)] = measure.figure()
    missing = None
    if not curves:
        missing = "The rewards of answers are not all 0 or 1."
    elif len(next(iter(curves.values()))) == 1:
        missing = "One response was sampled for each prompt."

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(
            drawing, theme, x_label="k, responses", y_label="share of prompts", below=0.3
        )
        for i, points in enumerate(curves.values()):
            ks = list(points)
            axes.plot(
                ks, [p.value for p in points.values()], color=colour(i), marker=marker(i), zorder=3
            )
            ends = [(p.low, p.high) for p in points.values()]
            lows, highs = zip(*ends, strict=True)
            axes.fill_between(ks, lows, highs, color=colour(i), alpha=0.16, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, [str(k) for k in ks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, 1.02)
        handles = [
            Line2D([], [], color=colour(i), marker=marker(i), label=label)
            for i, label in enumerate(curves)
        ]
        legend(drawing, theme, handles, columns=2)

    last = ", ".join(
        f"{kind[:-1]}{max(points)} {points[max(points)].value:.3f}"
        for kind, points in curves.items()
    )
    return Plot(
        name="attempts",
        title="What more attempts buy",
        look="pass@k: at least one of k responses is right, which more sampling finds. majority@k: "
        "the most frequent answer is. The bands are the intervals over prompts.",
        draw=draw,
        alt=f"Lines over k. Last values: {last}.",
        height=HEIGHT + 0.3,
        missing=missing,
    )


def _lengths(record: EvaluationRecord) -> Plot:
    found = record.categories
    groups = {ALL: record.generations} if found is None else found
    lengths = {name: [own.tokens for own in group] for name, group in groups.items() if group}

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(
            drawing, theme, x_label="tokens of a response", y_label="responses", below=0.3
        )
        axes.hist(
            list(lengths.values()),
            bins=_edges(list(lengths.values())),
            stacked=True,
            color=[colour(i) for i in range(len(lengths))],
            zorder=2,
        )
        handles = [Patch(facecolor=colour(i), label=name) for i, name in enumerate(lengths)]
        legend(drawing, theme, handles, columns=2)

    every = [length for own in lengths.values() for length in own]
    return Plot(
        name="lengths",
        title="How long responses are",
        look="A heap at the right end is cut off by the limit of tokens; a category that is longer "
        "than the others may owe its rewards to length.",
        draw=draw,
        alt=f"A histogram from {min(every)} to {max(every)} tokens.",
        height=HEIGHT + 0.3,
    )


def _edges(lengths: Sequence[Sequence[int]]) -> list[float]:
    """The edges of bars that are equally wide, each around whole numbers of tokens."""
    low = min(map(min, lengths))
    high = max(map(max, lengths))
    width = -(-(high - low + 1) // BARS)
    return [edge - 0.5 for edge in range(low, high + width + 1, width)]
