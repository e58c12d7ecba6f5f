"""Plots for an evaluation: results by number of attempts (the @k curves), and response lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from reports.canvas import HEIGHT, Plot, Theme, axes_of, colour, legend, marker
from reports.evaluations.measures import Figure, Measure
from reports.evaluations.record import EvaluationRecord

BARS = 24  # number of bars in the histogram of lengths
ALL = "all responses"


def plots(record: EvaluationRecord, measured: Mapping[str, Measure]) -> list[Plot]:
    """Return the plots in the order of the page."""
    return [_attempts(measured), _lengths(record)]


def _attempts(measured: Mapping[str, Measure]) -> Plot:
    curves: dict[str, dict[int, Figure]] = {}
    for name, measure in measured.items():
        kind, at, k = name.partition("@")
        if at:
            curves.setdefault(f"{kind}@k", {})[int(k)] = measure.figure()
    missing = None
    if not curves:
        missing = "Some answer rewards are neither 0 nor 1."
    elif len(next(iter(curves.values()))) == 1:
        missing = "Each prompt has only one response."

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
        title="Value of more attempts",
        look="pass@k: the share of prompts for which at least one of k responses is right. A "
        "rising curve means that more samples find more right answers. majority@k: the share of "
        "prompts for which the most frequent of k answers is right. A majority vote can be used "
        "even if nobody knows the true answer. To pick a right response out of k, as pass@k "
        "assumes, one must know the true answer. The bands are 95% intervals over prompts.",
        draw=draw,
        alt=f"Line plot of {' and '.join(curves)} against k. Last values: {last}.",
        height=HEIGHT + 0.3,
        missing=missing,
    )


def _lengths(record: EvaluationRecord) -> Plot:
    found = record.categories
    groups = {ALL: record.generations} if found is None else found
    lengths = {name: [own.tokens for own in group] for name, group in groups.items() if group}

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(
            drawing, theme, x_label="tokens per response", y_label="responses", below=0.3
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
        title="Response lengths",
        look="A peak at the right end means that the token limit cuts responses off: raise the "
        "limit before you trust the figures. If one category has longer responses than the others, "
        "the reward may depend on length.",
        draw=draw,
        alt=f"A histogram of response lengths, from {min(every)} to {max(every)} tokens.",
        height=HEIGHT + 0.3,
    )


def _edges(lengths: Sequence[Sequence[int]]) -> list[float]:
    """Return the edges of bars of equal width, halfway between whole numbers of tokens."""
    low = min(map(min, lengths))
    high = max(map(max, lengths))
    width = -(-(high - low + 1) // BARS)
    return [edge - 0.5 for edge in range(low, high + width + 1, width)]
