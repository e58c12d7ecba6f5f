"""Shared parts of all plots: themes, colours of arms, axes, panels, and PNG output.

Figures are drawn without pyplot, because a library must not use pyplot's global state.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

DPI = 144
WIDTH, HEIGHT = 5.0, 3.4  # inches; 11-point text is then readable on a 360-pixel screen
MARGIN = 0.02  # inches to the left of the leftmost label
FONT = 11.0
TITLE_HEIGHT = 0.34  # inches
# Okabe and Ito's colours without yellow (invisible on white) and black (invisible on dark pages),
# followed by grey and violet.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#888888", "#8C6BB1")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a plot, for light or dark pages."""

    name: str
    background: str
    text: str
    grid: str


LIGHT = Theme(name="light", background="#ffffff", text="#24292f", grid="#d8dee4")
DARK = Theme(name="dark", background="#1b1f24", text="#d5dae0", grid="#3a424c")

Draw = Callable[[Figure, Theme], None]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Plot on a page: how to draw it and how to read it."""

    name: str  # file name without its extension
    title: str
    look: str  # a few sentences that say what the plot shows and how to read it
    draw: Draw
    alt: str = ""
    height: float = HEIGHT  # inches
    missing: str | None = None  # reason why the plot cannot be drawn; None if it can


@dataclass(frozen=True, kw_only=True)
class Section:
    """Plots on a page, under one heading."""

    title: str
    plots: Sequence[Plot]
    note: str = ""  # how to read all plots of the section; empty if there is nothing to explain
    legend: bool = True  # True: show a legend of the arms. False: each plot names its arms


def render_all(plots: Iterable[Plot], *, files: bool = False) -> dict[str, bytes]:
    """Draw every plot that can be drawn, as PNG.

    Args:
        plots: The plots.
        files: Also draw each plot with its title, for use as a file.

    Returns:
        Pictures without titles for a page, keyed by name and theme, such as "speed_up-dark". If
        `files` is true, also pictures with titles, such as "speed_up-file".
    """
    images = {}
    for plot in plots:
        if plot.missing is not None:
            continue
        light, dark = (_figure(plot.height, theme) for theme in (LIGHT, DARK))
        with _no_warnings():
            plot.draw(light, LIGHT)
            _keep_labels_inside(light)
            picture = _pixels(light)
            images[f"{plot.name}-light"] = _png(picture)
            if files:
                images[f"{plot.name}-file"] = _png(_titled(picture, plot.title))
            plot.draw(dark, DARK)
            for axes, placed in zip(dark.axes, light.axes, strict=True):
                axes.set_position(placed.get_position())
            images[f"{plot.name}-dark"] = _png(_pixels(dark))
    return images


def _figure(height: float, theme: Theme) -> Figure:
    """Return an empty figure that can be rendered, with this height in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=theme.background)
    FigureCanvasAgg(figure)
    return figure


def _keep_labels_inside(figure: Figure) -> None:
    """Narrow the axes if wide tick labels have pushed the y label over the left edge."""
    outside = MARGIN - figure.get_tightbbox().x0  # inches
    if outside > 0:
        for axes in figure.axes:
            box = axes.get_position()
            left = box.x0 + outside / figure.get_figwidth()
            axes.set_position(Bbox.from_extents(left, box.y0, box.x1, box.y1))


def _titled(picture: NDArray[np.uint8], title: str) -> NDArray[np.uint8]:
    """Return the picture of a light plot with a title above it."""
    strip = _figure(TITLE_HEIGHT, LIGHT)
    place = {"x": 0.12 / WIDTH, "y": 0.06 / TITLE_HEIGHT, "va": "bottom", "ha": "left"}
    strip.text(s=fitted(title, 60), color=LIGHT.text, fontsize=FONT + 1, **place)
    return np.concatenate([_pixels(strip), picture])


def render_legend(arms: Sequence[str], theme: Theme) -> bytes:
    """Draw the arms' colours and markers, as a legend for PNG files used outside the page."""
    figure = _figure(0.2 + 0.22 * math.ceil(len(arms) / 2), theme)
    handles = [
        Line2D([], [], color=colour(i), marker=marker(i), markersize=6, label=fitted(arm, 28))
        for i, arm in enumerate(arms)
    ]
    figure.legend(handles=handles, loc="center", ncols=2, frameon=False, labelcolor=theme.text)
    with _no_warnings():
        return _png(_pixels(figure))


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    """Draw a figure. Return its pixels as (height, width, 4): red, green, blue and opacity."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def _png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    imsave(buffer, picture, format="png", dpi=DPI)
    return buffer.getvalue()


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hide warnings about characters missing from the font and about axes of zero extent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def colour(arm: int) -> str:
    """Return the colour of the arm at this position."""
    return COLOURS[arm % len(COLOURS)]


def marker(arm: int) -> str:
    """Return the marker of the arm at this position."""
    # Shift the markers after each pass through the colours, so that up to 64 arms look different.
    return MARKERS[(arm + arm // len(COLOURS)) % len(MARKERS)]


def panel_rows(panels: int) -> int:
    """Return the number of rows that this many panels need in two columns."""
    return math.ceil(panels / 2)


def panels(
    figure: Figure,
    theme: Theme,
    arms: Mapping[str, Any],
    draw: Callable[[Axes, int, Any], None],
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Draw a panel for each arm, in two columns, each panel with its own scale.

    Args:
        figure: The figure to draw on.
        theme: The colours.
        arms: arm -> value to draw.
        draw: Draws one panel, given the axes, the position of the arm and the arm's value.
        x_label: The label below all panels.
        y_label: The label beside all panels.
    """
    grid = figure.subplots(panel_rows(len(arms)), 2, squeeze=False).flatten()
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.62 / WIDTH,
        right=1 - 0.12 / WIDTH,
        top=1 - 0.3 / height,
        bottom=1.0 / height,
        wspace=0.28,
        hspace=0.62,
    )
    for i, (axes, (arm, value)) in enumerate(zip(grid, arms.items(), strict=False)):
        style(axes, theme)
        axes.set_title(fitted(arm, 24), color=theme.text, fontsize=FONT, loc="left", pad=4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        draw(axes, i, value)
    for axes in grid[len(arms) :]:
        axes.set_visible(False)
    figure.text(0.5, 0.56 / height, x_label, ha="center", color=theme.text, fontsize=FONT)
    figure.text(
        0.01, 0.5, y_label, va="center", rotation="vertical", color=theme.text, fontsize=FONT
    )


def legend(figure: Figure, theme: Theme, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend at the bottom of a figure."""
    figure.legend(
        handles=list(handles),
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=FONT - 1.5,
        labelcolor=theme.text,
        handlelength=1.6,
        columnspacing=1.2,
        borderpad=0.1,
        labelspacing=0.25,
    )


def axes_of(
    figure: Figure,
    theme: Theme,
    *,
    x_label: str,
    y_label: str,
    names: Sequence[str] = (),
    below: float = 0.0,
) -> Axes:
    """Fill the figure with one pair of axes, and return the axes.

    Args:
        figure: The figure.
        theme: The colours.
        x_label: The label of the x axis. If it ends with "round", the ticks are integers.
        y_label: The label of the y axis.
        names: Row names, shown at the left from top to bottom.
        below: Inches to keep free for a legend at the bottom.
    """
    short = [fitted(name, 22) for name in names]
    left = 0.2 + 0.09 * max(map(len, short)) if short else 0.76
    height = figure.get_figheight()
    bottom = 0.5 + below
    top = 0.12
    axes = figure.add_axes(
        (left / WIDTH, bottom / height, 1 - (left + 0.15) / WIDTH, 1 - (bottom + top) / height)
    )
    style(axes, theme)
    axes.set_xlabel(x_label, color=theme.text, fontsize=FONT)
    axes.set_ylabel(y_label, color=theme.text, fontsize=FONT)
    if short:
        axes.set_yticks(range(len(short)), short)
        axes.set_ylim(len(short) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    else:
        axes.xaxis.set_major_locator(
            MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=x_label.endswith("round"))
        )
    return axes


def style(axes: Axes, theme: Theme) -> None:
    """Apply the theme to axes."""
    axes.set_facecolor(theme.background)
    axes.grid(visible=True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, labelsize=FONT - 1, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)


def fitted(text: str, length: int) -> str:
    """Shorten a text to `length` characters and make it safe for matplotlib."""
    # matplotlib reads text between two dollar signs as mathematics.
    text = text if len(text) <= length else text[: length - 1] + "…"
    return text.replace("$", r"\$")
