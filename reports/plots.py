"""The report's figures: what each shows, what to look for in it, or why it cannot be drawn.

Figures are drawn without pyplot, whose global state does not belong into a launcher.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from grpo_trainable.stages import IDLE_SIDES, STAGES
from reports.contrasts import Contrast
from reports.experiment import ExperimentRecord, StepPoint, TrialFiles, TrialRecord
from reports.summary import MARK, Comparison

DPI = 144
WIDTH, HEIGHT = 5.0, 3.4  # inches: text of 11 points is still read at 360 pixels
FONT = 11.0
FIRST_ROUNDS = 12  # that a version time line shows: of 64 nobody would see a single one

# Okabe and Ito's colours without yellow and black, which vanish on one of the two backgrounds.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#888888", "#8C6BB1")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

# Evaluation comes last, since it is no part of the wall-clock that trials are compared by.
STAGE_COLOURS = {
    stage: STAGES[stage].figure for stage in sorted(STAGES, key=lambda stage: stage == "eval")
}
WAITING = dict(zip(IDLE_SIDES, ("generator waits", "learner waits"), strict=True))

NO_WALL_CLOCK = "No wall-clock was recorded."


@dataclass(frozen=True, kw_only=True)
class Theme:
    name: str
    background: str
    text: str
    grid: str


LIGHT = Theme(name="light", background="#ffffff", text="#24292f", grid="#d8dee4")
DARK = Theme(name="dark", background="#1b1f24", text="#d5dae0", grid="#3a424c")

Draw = Callable[[Figure, Theme], None]


@dataclass(frozen=True, kw_only=True)
class Plot:
    name: str  # of its file
    title: str
    look: str  # one sentence: what to look for
    draw: Draw
    alt: str = ""
    height: float = HEIGHT
    missing: str | None = None  # why it cannot be drawn


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    plots: Sequence[Plot]
    legend: bool = True  # of the arms; not where they are named in the plots


@dataclass(frozen=True)
class Point:
    """The median over seeds, with the least and the most."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """A length, and the whisker's ends."""

    middle: float
    low: float
    high: float
    doubtful: bool = False


Series = Callable[[TrialRecord], Iterable[tuple[int, float, float]]]  # (round, x, y)


def render(plot: Plot, theme: Theme) -> bytes:
    """PNG."""
    figure = Figure(figsize=(WIDTH, plot.height), dpi=DPI, facecolor=theme.background)
    FigureCanvasAgg(figure)
    plot.draw(figure, theme)
    return _png(figure)


def render_legend(arms: Sequence[str], theme: Theme) -> bytes:
    """The arms' colours and markers, for those who use the PNG files elsewhere."""
    figure = Figure(figsize=(WIDTH, 0.2 + 0.22 * math.ceil(len(arms) / 2)), dpi=DPI)
    figure.set_facecolor(theme.background)
    FigureCanvasAgg(figure)
    handles = [
        Line2D([], [], color=colour(i), marker=marker(i), markersize=6, label=_short(arm, 28))
        for i, arm in enumerate(arms)
    ]
    figure.legend(handles=handles, loc="center", ncols=2, frameon=False, labelcolor=theme.text)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def colour(arm: int) -> str:
    return COLOURS[arm % len(COLOURS)]


def marker(arm: int) -> str:
    # Shifted with each turn through the colours, so that 64 arms differ.
    return MARKERS[(arm + arm // len(COLOURS)) % len(MARKERS)]


# ---- All plots -------------------------------------------------------------------------------


def sections(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> list[Section]:
    """Every figure in the order of the page. `files` by the name of the trial."""
    arms = experiment.arms
    return [
        Section(title="What was learned", plots=_learning(arms)),
        Section(title="Speed and cost", plots=_costs(comparison), legend=False),
        Section(title="Where the time goes", plots=_stages(arms), legend=False),
        Section(title="How far the policy drifted", plots=_drift(arms)),
        Section(title="How stale the rollouts were", plots=_lags(arms, files)),
        *(
            Section(title=title, plots=plots)
            for title, plots in (
                ("What each gradient step of a round saw", _steps(arms, files)),
                ("How often rollouts were used", _reuse(arms)),
            )
            if plots
        ),
    ]


Arms = Mapping[str, Sequence[TrialRecord]]


def _learning(arms: Arms) -> list[Plot]:
    def samples(trial: TrialRecord, row: Mapping[str, float]) -> float | None:
        trained = row.get("count/trained") if row else 0.0
        return None if trained is None else trained * trial.config.rollout.group_size

    def held_out_by(x: Callable[[TrialRecord, int, Mapping[str, float]], float | None]) -> Series:
        def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
            for round_, reward, row in trial.evaluated():
                place = x(trial, round_, row)
                if place is not None:
                    yield round_, place, reward

        return series

    missing = "No held-out evaluation was recorded."
    reward = "held-out reward"
    wall_clock = _lines(
        arms,
        name="reward_wall_clock",
        title="Held-out reward against wall-clock",
        look="Curves further left learn faster in real time. Seconds count from the start of "
        "round 1, without evaluation and checkpoints.",
        x_label="wall-clock, seconds",
        y_label=reward,
        series=held_out_by(lambda t, n, row: row.get("time/wall_clock_s", 0.0)),
        missing=missing,
    )
    return [
        _lines(
            arms,
            name="reward_rounds",
            title="Held-out reward against rounds",
            look="Higher is better; arms that train several batches a round need fewer rounds. "
            "Equal curves lie within each other.",
            x_label="round",
            y_label=reward,
            series=held_out_by(lambda t, n, row: n),
            missing=missing,
        ),
        _lines(
            arms,
            name="reward_samples",
            title="Held-out reward against samples",
            look="The fair comparison: a curve that lies lower learns less from the same samples.",
            x_label="responses trained on",
            y_label=reward,
            series=held_out_by(lambda t, n, row: samples(t, row)),
            missing=missing,
        ),
        wall_clock,
        _lines(
            arms,
            name="reward_train",
            title="Training reward",
            look="Should rise with the held-out reward; rising alone, it is learned by heart.",
            x_label="round",
            y_label="mean reward of the round",
            series=metric("reward/train_mean"),
            missing="No row has reward/train_mean.",
        ),
    ]


def _costs(comparison: Comparison) -> list[Plot]:
    relative = comparison.baseline or "-"
    return [
        _bars(
            _ratios(comparison, comparison.speed),
            name="speed_up",
            title="Speed-up",
            look=f"Samples a second relative to {relative} (the line at 1), whatever an arm "
            "reserves: longer is faster. Whiskers: the interval at 95 %. A question mark: other "
            "work on the machine made it incomparable.",
            unit="times as fast",
            form="{:.2f}x",
            line=1.0,
            missing=NO_WALL_CLOCK,
        ),
        _bars(
            _ratios(comparison, comparison.cost),
            name="equal_cost",
            title="Speed-up at equal cost",
            look=f"Samples a device-hour relative to {relative} (the line at 1): longer is "
            "cheaper. A device is a GPU, or a CPU core of the actors where there is no GPU.",
            unit="times as many samples",
            form="{:.2f}x",
            line=1.0,
            missing=NO_WALL_CLOCK,
        ),
        _bars(
            {
                arm: _spread(
                    [t.device_hours for t in trials if t.device_hours],
                    doubtful=not comparison.comparable(arm),
                )
                for arm, trials in comparison.arms.items()
            },
            name="device_hours",
            title="Device-hours",
            look="What the arm cost: shorter is cheaper. Hours of its GPUs, or of its CPU cores "
            "when it has none. A question mark: disturbed by other work on the machine.",
            unit="device-hours",
            form="{:.3g}",
            line=None,
            missing=NO_WALL_CLOCK,
        ),
    ]


def _ratios(comparison: Comparison, contrasts: Mapping[str, Contrast]) -> dict[str, Bar | None]:
    bars: dict[str, Bar | None] = dict.fromkeys(comparison.arms)
    if comparison.baseline is not None:
        bars[comparison.baseline] = Bar(1.0, 1.0, 1.0)
    for arm, own in contrasts.items():
        ends = (own.interval.low, own.interval.high) if own.interval else (own.value, own.value)
        bars[arm] = Bar(own.value, *ends, doubtful=own.doubt is not None)
    return bars


def _spread(values: Sequence[float], *, doubtful: bool) -> Bar | None:
    if not values:
        return None
    return Bar(statistics.median(values), min(values), max(values), doubtful)


def _stages(arms: Arms) -> list[Plot]:
    height = max(HEIGHT, _panel_rows(len(arms)) * 1.3 + 0.9)
    seconds = {arm: stage_seconds(trials, responses=100) for arm, trials in arms.items()}
    timed = any(any(stages.values()) for stages in seconds.values())
    missing = None if timed else "No row has time/…_s."
    alt = "; ".join(
        f"{arm}: " + ", ".join(f"{name} {spent:.2g} s" for name, spent in stages.items() if spent)
        for arm, stages in seconds.items()
    )
    return [
        Plot(
            name="stages",
            title="Seconds for 100 responses, by stage",
            look="The longest piece is what to speed up. The tick is the whole step where nothing "
            "is evaluated: pieces beyond it, but for eval, overlap with others. Hatched: one side "
            "waiting for the other.",
            draw=lambda figure, theme: _draw_stage_bars(figure, theme, seconds),
            alt=f"Stacked bars, median seconds for 100 responses. {alt}.",
            height=height,
            missing=missing,
        ),
        Plot(
            name="stages_over_rounds",
            title="Seconds of each round, by stage",
            look="One panel an arm: steady layers are healthy, a growing "
            "one or a spike asks for a look at the trace.",
            draw=lambda figure, theme: _draw_stage_areas(figure, theme, arms),
            alt=f"Stacked areas of the seconds of each stage, a panel for {', '.join(arms)}.",
            height=height,
            missing=missing,
        ),
    ]


def _drift(arms: Arms) -> list[Plot]:
    monitored = any(trial.config.loss.kl_monitor for trials in arms.values() for trial in trials)
    no_kl = (
        "No row has a KL (kl/…)." if monitored else "KL was not monitored (loss.kl_monitor=false)."
    )
    plots = []
    for name, title, look in (
        (
            "reference",
            "KL to the reference",
            "How far the policy is from where it began: reward bought with less of it is better.",
        ),
        (
            "previous",
            "KL to the round before",
            "The step that one round takes: spikes are steps too large.",
        ),
        (
            "behaviour",
            "KL to the weights that sampled",
            "Staleness as the loss sees it: it grows with lag and with gradient steps a round.",
        ),
    ):
        plots.append(
            _lines(
                arms,
                name=f"kl_{name}",
                title=title,
                look=f"{look} Solid: k1 (signed), dotted: k3 (never negative, a single unlikely "
                "token makes it jump). Logarithmic beyond the innermost marks.",
                x_label="round",
                y_label="nats a response",
                series=metric(f"kl/{name}_nats"),
                dotted=metric(f"kl/{name}_k3_nats"),
                linear_within=1.0 if name == "reference" else 0.1,
                missing=no_kl,
            )
        )
    plots.append(
        _lines(
            arms,
            name="frontier",
            title="Reward bought with drift",
            look="Up and to the left is better: more held-out reward for less KL to the reference.",
            x_label="KL to the reference, nats a response",
            y_label="held-out reward",
            series=frontier,
            missing=no_kl,
        )
    )
    plots.append(
        _lines(
            arms,
            name="clip_fraction",
            title="Clipped tokens",
            look="The share of tokens that give no gradient any more: high means that the "
            "rollouts are too old, or the steps too large, for what they still teach.",
            x_label="round",
            y_label="clip fraction",
            series=metric("loss/clip_fraction"),
            missing="No row has loss/clip_fraction.",
        )
    )
    plots.append(
        _lines(
            arms,
            name="reference_nll",
            title="Is it still language?",
            look="How surprised the first weights are by a token of today's responses: a steep "
            "rise means that the text falls apart.",
            x_label="round",
            y_label="nats a token",
            series=metric("response/reference_nll_nats"),
            missing="No row has response/reference_nll_nats." if monitored else no_kl,
        )
    )
    plots.append(
        _lines(
            arms,
            name="response_length",
            title="Response length",
            look="A fall or rise that the task does not ask for is a reward being gamed.",
            x_label="round",
            y_label="tokens",
            series=metric("response/length_mean"),
            missing="No row has response/length_mean.",
        )
    )
    return plots


def _lags(arms: Arms, files: Mapping[str, TrialFiles]) -> list[Plot]:
    shares = {
        arm: lag_shares([files[trial.name].lags for trial in trials])
        for arm, trials in arms.items()
    }
    changed = {arm: files[trials[0].name] for arm, trials in arms.items()}
    histogram = "; ".join(
        f"{arm}: " + ", ".join(f"lag {lag} {share:.0%}" for lag, share in sorted(lags.items()))
        for arm, lags in shares.items()
        if lags
    )
    return [
        _lines(
            arms,
            name="lag",
            title="Lag over the rounds",
            look="The solid line (the stalest group) must not pass the arm's bound; dotted is the "
            "mean. Equal lines are drawn a hair apart.",
            x_label="round",
            y_label="rounds behind",
            series=metric("lag/max"),
            dotted=metric("lag/mean"),
            apart=0.02,
            whole=True,
            missing="No row has lag/max.",
        ),
        Plot(
            name="versions",
            title="Policy versions in time",
            look=f"The first {FIRST_ROUNDS} rounds: the dotted line (generator) follows the solid "
            "one (learner), and the space between them is time spent on older weights.",
            draw=lambda figure, theme: _draw_versions(figure, theme, changed),
            alt=f"Version of learner and generator over seconds, a panel for {', '.join(changed)}.",
            height=max(HEIGHT, _panel_rows(len(arms)) * 1.5 + 0.9),
            missing=None
            if any(files.changes for files in changed.values())
            else "No version changes were recorded (versions/ is missing or empty).",
        ),
        Plot(
            name="lag_histogram",
            title="Lag of the groups",
            look="Of all groups the share first trained at each lag: 0 is synchronous.",
            draw=lambda figure, theme: _draw_lag_histogram(figure, theme, shares),
            alt=f"Bars. {histogram}.",
            missing=None
            if any(shares.values())
            else "No rollouts were kept (rollouts/ is missing or empty).",
        ),
    ]


def _steps(arms: Arms, files: Mapping[str, TrialFiles]) -> list[Plot]:
    """Nothing where every round has one step."""
    if all(trial.config.k == 1 for trials in arms.values() for trial in trials):
        return []

    def by_step(value: Callable[[StepPoint], float | None]) -> Series:
        def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
            for step, point in files[trial.name].steps.items():
                if (y := value(point)) is not None:
                    yield step, step, y

        return series

    missing = "No gradient steps were recorded (steps/ is missing or empty)."
    return [
        _lines(
            arms,
            name="step_kl",
            title="KL from the weights that sampled, by gradient step",
            look="Before each step of a round, on what it trains on, the median over the "
            "rounds: a line that bends upwards drifts faster the more steps a round takes.",
            x_label="gradient step of the round",
            y_label="nats a response",
            series=by_step(lambda point: point.kl_sampler_nats),
            whole=True,
            missing=missing,
        ),
        _lines(
            arms,
            name="step_clip",
            title="Clipped tokens, by gradient step",
            look="The share of tokens that give no gradient any more: the price of another step.",
            x_label="gradient step of the round",
            y_label="clip fraction",
            series=by_step(lambda point: point.clip_fraction),
            missing=missing,
        ),
    ]


def _reuse(arms: Arms) -> list[Plot]:
    """Nothing without a replay buffer."""
    if all(trial.config.buffer_capacity == 1 for trials in arms.values() for trial in trials):
        return []
    return [
        _lines(
            arms,
            name="uses",
            title="Uses of a group",
            look="How often what a round trains on has been trained on, this round included: 1 is "
            "no reuse.",
            x_label="round",
            y_label="uses, mean",
            series=metric("buffer/uses_mean"),
            missing="No row has buffer/uses_mean.",
        ),
        _lines(
            arms,
            name="age",
            title="Age of what is trained on",
            look="Solid: the oldest group of the round, which must not pass buffer.max_age; "
            "dotted: the mean.",
            x_label="round",
            y_label="rounds behind",
            series=metric("buffer/age_max"),
            dotted=metric("buffer/age_mean"),
            missing="No row has buffer/age_max.",
        ),
    ]


# ---- What is drawn ---------------------------------------------------------------------------


def metric(name: str) -> Series:
    def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
        for row in trial.rows:
            if name in row:
                round_ = int(row["training_iteration"])
                yield round_, round_, row[name]

    return series


def frontier(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
    """Held-out reward by KL to the reference; at round 0 the policy is the reference."""
    for round_, reward, row in trial.evaluated():
        if round_ == 0 and trial.column("kl/reference_nats"):
            yield 0, 0.0, reward
        elif "kl/reference_nats" in row:
            yield round_, row["kl/reference_nats"], reward


def curve(trials: Sequence[TrialRecord], series: Series) -> list[Point]:
    """A point a round: medians over the trials that have one there."""
    at: dict[int, list[tuple[float, float]]] = {}
    for trial in trials:
        for round_, x, y in series(trial):
            at.setdefault(round_, []).append((x, y))
    points = []
    for round_ in sorted(at):
        xs, ys = zip(*at[round_], strict=True)
        points.append(Point(statistics.median(xs), statistics.median(ys), min(ys), max(ys)))
    return points


def stage_seconds(trials: Sequence[TrialRecord], responses: int) -> dict[str, float]:
    """Seconds for so many responses by stage, waiting and `step`: a trial's median over its
    rounds, and of these the median over trials. Most rounds are not evaluated: of eval it is the
    mean. By responses, because arms differ in how many a round has."""
    seconds = {}
    config = trials[0].config  # trials of an arm differ in their seed
    scale = responses / (config.prompts_per_round * config.rollout.group_size)
    for stage in (*STAGE_COLOURS, *WAITING, "step"):
        middle = statistics.fmean if stage == "eval" else statistics.median
        columns = [trial.column(f"time/{stage}_s") for trial in trials]
        spent = [middle(column) for column in columns if column]
        seconds[stage] = scale * statistics.median(spent) if spent else 0.0
    return seconds


def lag_shares(counts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """The share of groups at each lag, over all trials of an arm."""
    total: dict[int, int] = {}
    for lags in counts:
        for lag, groups in lags.items():
            total[lag] = total.get(lag, 0) + groups
    groups = sum(total.values())
    return {lag: total[lag] / groups for lag in sorted(total)}


# ---- How it is drawn -------------------------------------------------------------------------


def _lines(
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
    apart: float = 0.0,
    whole: bool = False,
    linear_within: float | None = None,
) -> Plot:
    """A line an arm, with a band from least to most when there are several seeds. Values beyond
    `linear_within` are drawn on a logarithmic scale."""
    curves = {arm: curve(trials, series) for arm, trials in arms.items()}
    seconds = {arm: curve(trials, dotted) if dotted else [] for arm, trials in arms.items()}

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _axes(figure, theme, x_label=x_label, y_label=y_label)
        for i, (arm, points) in enumerate(curves.items()):
            up = apart * (i - (len(curves) - 1) / 2)
            # Arms that learn the same, bit for bit, stay visible beneath each other.
            covering = 0 if apart else list(curves.values())[i + 1 :].count(points)
            xs = [point.x for point in points]
            every = max(1, len(points) // 6)
            axes.plot(
                xs,
                [point.y + up for point in points],
                color=colour(i),
                marker=marker(i),
                markersize=5 + 3 * covering,
                # Markers of different arms stand at different rounds where they are few.
                markevery=(i % every, every),
                linewidth=1.6 + 2.4 * covering,
                zorder=3,
            )
            if any(point.low < point.high for point in points):
                axes.fill_between(
                    xs,
                    [point.low + up for point in points],
                    [point.high + up for point in points],
                    color=colour(i),
                    alpha=0.16,
                    linewidth=0,
                )
            axes.plot(
                [point.x for point in seconds[arm]],
                [point.y + up for point in seconds[arm]],
                color=colour(i),
                linestyle=":",
                linewidth=1.4,
                zorder=2,
            )
        if linear_within is not None:
            axes.set_yscale("symlog", linthresh=linear_within)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.axhline(0, color=theme.text, linewidth=0.8)
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
        alt=f"Lines of {y_label} over {x_label}. Last values: {last}.",
        missing=None if any(curves.values()) else missing,
    )


def _bars(
    values: Mapping[str, Bar | None],
    *,
    name: str,
    title: str,
    look: str,
    unit: str,
    form: str,
    line: float | None,
    missing: str,
) -> Plot:
    """A bar an arm, with its whisker; None where nothing is known."""
    known = {arm: bar for arm, bar in values.items() if bar is not None}
    labels = {
        arm: form.format(bar.middle) + f" {MARK}" * bar.doubtful for arm, bar in known.items()
    }

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _axes(figure, theme, x_label=unit, y_label="", names=list(values))
        # Two seeds may leave an interval that would squeeze all bars to nothing: it runs out.
        end = 3 * max(bar.middle for bar in known.values())
        end = min(end, max(bar.high for bar in known.values()))
        for i, (arm, bar) in enumerate(values.items()):
            if bar is None:
                axes.text(0.01 * end, i, "not known", va="center", color=theme.text, fontsize=FONT)
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


def _draw_stage_bars(
    figure: Figure, theme: Theme, seconds: Mapping[str, Mapping[str, float]]
) -> None:
    axes = _axes(figure, theme, x_label="seconds", y_label="", names=list(seconds), below=0.85)
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
    _stage_legend(figure, theme, waiting=True)


def _draw_stage_areas(figure: Figure, theme: Theme, arms: Arms) -> None:
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

    _panels(figure, theme, arms, draw, x_label="round", y_label="seconds")
    _stage_legend(figure, theme, waiting=False)


def _stage_legend(figure: Figure, theme: Theme, *, waiting: bool) -> None:
    handles: list[Any] = [
        Patch(facecolor=fill, label=stage) for stage, fill in STAGE_COLOURS.items()
    ]
    if waiting:
        handles += [
            Patch(facecolor="none", edgecolor=theme.text, hatch=hatch, label=label, linewidth=0.6)
            for label, hatch in zip(WAITING.values(), ("////", "...."), strict=True)
        ]
    _legend(figure, theme, handles, columns=3 if waiting else 4)


def _draw_versions(figure: Figure, theme: Theme, files: Mapping[str, TrialFiles]) -> None:
    def draw(axes: Axes, i: int, read: TrialFiles) -> None:
        learner = [change for change in read.changes if change.side == "learner"]
        steps = list(dict.fromkeys(change.version for change in learner))
        last = steps[min(FIRST_ROUNDS, len(steps)) - 1] if steps else math.inf
        end = max((c.second for c in read.changes if c.version <= last), default=1.0)
        # By actor: several generators change at times of their own.
        for side, actor in sorted({(c.side, c.actor) for c in read.changes}):
            own = [c for c in read.changes if (c.side, c.actor) == (side, actor)]
            xs = [change.second for change in own if change.second <= end]
            ys = [change.version for change in own if change.second <= end]
            axes.step(
                [*xs, end],
                [*ys, ys[-1]] if ys else [math.nan],
                where="post",
                color=colour(i) if side == "learner" else theme.text,
                linestyle="-" if side == "learner" else ":",
                linewidth=2.2 if side == "learner" else 1.4,
                zorder=2 if side == "learner" else 3,
            )
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))

    _panels(figure, theme, files, draw, x_label="seconds", y_label="gradient steps")
    handles = [
        Line2D([], [], color=theme.text, linewidth=2.2, label="learner (in the arm's colour)"),
        Line2D([], [], color=theme.text, linewidth=1.4, linestyle=":", label="generator"),
    ]
    _legend(figure, theme, handles, columns=2)


def _draw_lag_histogram(
    figure: Figure, theme: Theme, shares: Mapping[str, Mapping[int, float]]
) -> None:
    axes = _axes(figure, theme, x_label="lag, rounds", y_label="share of groups")
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


def _panel_rows(panels: int) -> int:
    return math.ceil(panels / 2)


def _panels(
    figure: Figure,
    theme: Theme,
    arms: Mapping[str, Any],
    draw: Callable[[Axes, int, Any], None],
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Two columns of small axes, one an arm, with scales of their own."""
    grid = figure.subplots(_panel_rows(len(arms)), 2, squeeze=False).flatten()
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
        _style(axes, theme)
        axes.set_title(_short(arm, 24), color=theme.text, fontsize=FONT, loc="left", pad=4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        draw(axes, i, value)
    for axes in grid[len(arms) :]:
        axes.set_visible(False)
    figure.text(0.5, 0.56 / height, x_label, ha="center", color=theme.text, fontsize=FONT)
    figure.text(
        0.01, 0.5, y_label, va="center", rotation="vertical", color=theme.text, fontsize=FONT
    )


def _legend(figure: Figure, theme: Theme, handles: Sequence[Any], columns: int) -> None:
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


def _axes(
    figure: Figure,
    theme: Theme,
    *,
    x_label: str,
    y_label: str,
    names: Sequence[str] = (),
    below: float = 0.0,
) -> Axes:
    """The one axes of a figure: `names` are written down its left side, from the top; `below` are
    inches left free for a legend."""
    short = [_short(name, 22) for name in names]
    left = 0.2 + 0.09 * max(map(len, short)) if short else 0.76
    height = figure.get_figheight()
    bottom = 0.5 + below
    top = 0.12
    axes = figure.add_axes(
        (left / WIDTH, bottom / height, 1 - (left + 0.15) / WIDTH, 1 - (bottom + top) / height)
    )
    _style(axes, theme)
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
            MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=x_label == "round")
        )
    return axes


def _style(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.grid(visible=True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, labelsize=FONT - 1, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)


def _short(text: str, length: int) -> str:
    # matplotlib reads what stands between two dollar signs as mathematics.
    text = text if len(text) <= length else text[: length - 1] + "…"
    return text.replace("$", r"\$")
