"""The plots on the page of an alignment run: loss, accuracy and margins."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D

from reports.alignment.record import AlignmentRecord
from reports.canvas import Plot, Theme, axes_of, colour, legend, marker

BARS = 24  # number of bars in the histogram of margins


def plots(record: AlignmentRecord) -> list[Plot]:
    """Return the plots in the order of the page."""
    stage = record.stage
    found = [
        _curves(
            record,
            "loss",
            title="Loss",
            look="If the held-out loss rises while the training loss falls, the model overfits: "
            "train for fewer epochs.",
        )
    ]
    if stage.accuracy is not None and stage.margin is not None:
        found += [
            _curves(
                record,
                stage.accuracy,
                title="Accuracy",
                look="The share of pairs whose chosen response has the higher score, as a mean "
                "over batches.",
            ),
            _curves(
                record,
                stage.margin,
                title="Margin",
                look="The score of the chosen response minus the score of the rejected response, "
                "as a mean over batches.",
            ),
            _margins(record.margins),
        ]
    return found


def _curves(record: AlignmentRecord, metric: str, *, title: str, look: str) -> Plot:
    """Return a plot of a metric over the steps, for training batches and held-out rows."""
    name = title.lower()
    curves = {
        "training batches": record.series(metric),
        "held-out rows": record.series(f"eval_{metric}"),
    }

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(drawing, theme, x_label="gradient step", y_label=name, below=0.3)
        for i, points in enumerate(curves.values()):
            # There is a point per training batch, so markers would hide the line.
            axes.plot(*zip(*points, strict=True), color=colour(i), marker=marker(i) if i else None)
        handles = [Line2D([], [], color=colour(i), label=label) for i, label in enumerate(curves)]
        legend(drawing, theme, handles, columns=2)

    last = ", ".join(f"{label} {points[-1][1]:.3g}" for label, points in curves.items() if points)
    return Plot(
        name=name,
        title=title,
        look=look,
        draw=draw,
        alt=f"Line plot of {name} against gradient step. Last values: {last}.",
        missing=None if any(curves.values()) else "The trainer logged no value.",
    )


def _margins(margins: Sequence[float]) -> Plot:
    """Return a histogram of the margins of the held-out pairs."""

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(drawing, theme, x_label="margin", y_label="held-out pairs")
        axes.hist(margins, bins=BARS, color=colour(0), zorder=2)
        axes.axvline(0, color=theme.text, linewidth=1, linestyle="--")

    return Plot(
        name="margins",
        title="Margins of the held-out pairs",
        look="The model ranks the pairs to the right of the dashed line correctly. Look at pairs "
        "far to the left: either the model is wrong, or the label is.",
        draw=draw,
        alt="A histogram of the margins of the held-out pairs.",
    )
