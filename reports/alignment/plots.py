"""The plots on the page of an alignment run: loss, accuracy and margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from reports.alignment.record import AlignmentRecord
from reports.canvas import Plot, Theme, axes_of, colour, legend, marker

BARS = 24  # number of bars in the histogram of margins
Curves = Mapping[str, Sequence[tuple[int, float]]]


def plots(record: AlignmentRecord) -> list[Plot]:
    """Return the plots in the order of the page."""
    stage = record.stage
    counted = (
        "pairs whose chosen response has the higher score"
        if stage.has_pairs
        else "tokens that the model predicts correctly"
    )
    found = [
        _curves(
            record,
            "loss",
            name="loss",
            title="Loss",
            look="If the held-out loss rises while the training loss falls, the model overfits: "
            "train for fewer epochs.",
        ),
        _curves(
            record,
            stage.accuracy,
            name="accuracy",
            title="Accuracy",
            look=f"The share of {counted}. The trainer computes it as a mean over batches.",
        ),
    ]
    if stage.margin is not None:
        found += [
            _curves(
                record,
                stage.margin,
                name="margin",
                title="Margin",
                look="The score of the chosen response minus the score of the rejected response, "
                "as a mean over pairs.",
            ),
            _margins(record.margins),
        ]
    return found


def _curves(record: AlignmentRecord, metric: str, *, name: str, title: str, look: str) -> Plot:
    """Return a plot of a metric over the steps, for training batches and held-out rows."""
    curves = {
        "training batches": record.series(metric),
        "held-out rows": record.series(f"eval_{metric}"),
    }

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(drawing, theme, x_label="gradient step", y_label=name, below=0.3)
        for i, points in enumerate(curves.values()):
            axes.plot(
                [step for step, _ in points],
                [value for _, value in points],
                color=colour(i),
                # A point per training batch: markers would hide the line.
                marker=marker(i) if i else None,
                linewidth=1.6,
            )
        handles = [Line2D([], [], color=colour(i), label=label) for i, label in enumerate(curves)]
        legend(drawing, theme, handles, columns=2)

    last = ", ".join(f"{label} {points[-1][1]:.3g}" for label, points in curves.items() if points)
    return Plot(
        name=name,
        title=title,
        look=look,
        draw=draw,
        alt=f"Lines of {name} over gradient steps. Last values: {last}.",
        missing=None if any(curves.values()) else "The trainer logged no value.",
    )


def _margins(margins: Sequence[float]) -> Plot:
    """Return a histogram of the margins of the held-out pairs."""

    def draw(drawing: Drawing, theme: Theme) -> None:
        axes = axes_of(drawing, theme, x_label="margin", y_label="held-out pairs", below=0.3)
        right = [margin for margin in margins if margin > 0]
        wrong = [margin for margin in margins if margin <= 0]
        reach = max(map(abs, margins)) or 1.0
        # An edge at 0 separates right from wrong pairs.
        edges = [reach * (2 * i / BARS - 1) for i in range(BARS + 1)]
        colours = [colour(0), colour(1)]
        axes.hist([right, wrong], bins=edges, stacked=True, color=colours, zorder=2)
        axes.axvline(0, color=theme.text, linewidth=1, linestyle="--")
        handles = [
            Patch(facecolor=fill, label=label)
            for fill, label in zip(colours, ("right", "wrong"), strict=True)
        ]
        legend(drawing, theme, handles, columns=2)

    return Plot(
        name="margins",
        title="Margins of the held-out pairs",
        look="Pairs to the right of the dashed line have the chosen response first. Pairs far to "
        "the left deserve a look: either the model is wrong, or the label is.",
        draw=draw,
        alt="A histogram of margins.",
        missing=None if margins else "No held-out pair has a score.",
    )
