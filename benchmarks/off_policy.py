"""What k, lag and replay cost and buy: the spaces of that name, run and put together.

    python benchmarks/off_policy.py                       all three, some two hours on two cores
    python benchmarks/off_policy.py --spaces lag          one of them
    python benchmarks/off_policy.py --no-run              JSON, tables and plots of what has run

Runs `launch/tune.py --space … --num-samples …` under a fixed name, so that a command that was cut
short goes on where it was; then writes one JSON a space, the plots, and the tables of
docs/results/off_policy.md between their marks.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, write
from space_runs import as_run, fill, run

from grpo_trainable.command_line import align
from reports.answers import Answer, answer
from reports.experiment import read_experiment
from reports.parts import TrialFiles, read_files
from reports.records import ExperimentRecord
from reports.summary import Comparison, compare, median, show
from reports.verdicts import quantities, verdicts

SPACES = ("gradient_steps", "lag", "replay")
DOCS = ROOT / "docs" / "results"
PAGE = DOCS / "off_policy.md"
STORAGE = Path.home() / "ray_results" / "off_policy"
LR = "2e-4"  # of all tables, whatever the default is

# Columns of the tables: by the names of reports/answers.py.
SHOWN = {
    "gradient_steps": (
        *(
            "reward",
            "against",
            "early_reward",
            "gradient_steps",
            "samples_per_s",
            "kl_sampler_nats",
        ),
        *("clip_fraction", "kl_reference_nats", "reference_nll_nats", "optimize_share"),
    ),
    "lag": (
        *("reward", "against", "early_reward", "lag", "lag_of_bound", "lag_max"),
        *("kl_sampler_nats", "clip_fraction", "kl_reference_nats", "reference_nll_nats"),
    ),
    "replay": (
        *("reward", "against", "early_reward", "uses", "age", "never_trained", "samples_per_s"),
        *("kl_sampler_nats", "clip_fraction", "kl_reference_nats", "reference_nll_nats"),
    ),
}


# ---- What is kept ----------------------------------------------------------------------------


def summarise(
    experiment: ExperimentRecord,
    files: Mapping[str, TrialFiles],
    found: Answer,
    comparison: Comparison,
) -> dict[str, Any]:
    by_arm = experiment.complete_arms  # those of the answer
    step_kl = {
        arm: _by_step([files[trial.name] for trial in trials], "kl_sampler_nats")
        for arm, trials in by_arm.items()
    }
    return {
        "seeds": sorted({trial.config.seed for trials in by_arm.values() for trial in trials}),
        "columns": {c.name: {"title": c.title, "form": c.form} for c in found.columns},
        "arms": {arm: dict(values) for arm, values in found.arms.items()},
        "said": list(found.said),
        "told": verdicts(quantities(experiment, comparison, files), comparison),
        # What moved besides the reward: (before, after) of each seed.
        "changes": {
            arm: {change.name: [change.before, change.after] for change in changes}
            for arm, changes in comparison.changes.items()
        },
        # (samples, reward) of each evaluation, for each seed.
        "held_out": {
            arm: [
                [
                    (row.get("count/trained", 0.0) * trial.config.rollout.group_size, reward)
                    for _, reward, row in trial.evaluated()
                ]
                for trial in trials
            ]
            for arm, trials in by_arm.items()
        },
        "step_kl_nats": step_kl,
        "step_clip_fraction": {
            arm: _by_step([files[trial.name] for trial in trials], "clip_fraction")
            for arm, trials in by_arm.items()
        },
        "step_kl_growth": {arm: growth(values) for arm, values in step_kl.items()},
    }


def _by_step(files: Sequence[TrialFiles], name: str) -> list[float | None]:
    """The median over rounds and then over seeds, for each gradient step of a round."""
    steps = sorted({step for read in files for step in read.steps})
    return [
        median([getattr(read.steps[step], name) for read in files if step in read.steps])
        for step in steps
    ]


def growth(values: Sequence[float | None]) -> float | None:
    """p of KL ~ step^p: the slope of a line through (log step, log KL), by least squares, over
    the steps after the first, which sees no KL yet."""
    points = [
        (math.log(step), math.log(value))
        for step, value in enumerate(values)  # steps taken before it
        if step >= 1 and value is not None and value > 0
    ]
    if len(points) < 3:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# ---- The tables ------------------------------------------------------------------------------


def markdown(space: str, result: Mapping[str, Any]) -> str:
    columns = [name for name in SHOWN[space] if name in result["columns"]]
    titles = [result["columns"][name]["title"] for name in columns]
    lines = [f"| arm | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for arm, values in result["arms"].items():
        cells = [show(values[name], result["columns"][name]["form"]) for name in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- The plots -------------------------------------------------------------------------------

Lines = Mapping[str, Sequence[tuple[float, Sequence[float]]]]  # label -> (x, one y a seed)


def lines_of(
    result: Mapping[str, Any], column: str, arms: Mapping[str, Mapping[float, str]]
) -> Lines:
    """`arms`: label of a line -> x -> arm."""
    return {
        label: [
            (x, [value for value in result["arms"][arm][column] if value is not None])
            for x, arm in places.items()
            if arm in result["arms"]
        ]
        for label, places in arms.items()
    }


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x: str
    y: str
    lines: Lines
    log_y: bool = False
    log_x: bool = False  # else places stand evenly, whatever their numbers


def draw(space: str, result: Mapping[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 7.0), dpi=110)
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS[space](result), strict=True):
        _draw_panel(axes, panel)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    DOCS.mkdir(parents=True, exist_ok=True)
    figure.savefig(DOCS / f"{space}.png")
    print(f"drawn to {DOCS / f'{space}.png'}")


def _draw_panel(axes: Any, panel: Panel) -> None:
    from reports.canvas import colour, marker

    every = sorted({x for points in panel.lines.values() for x, ys in points if ys})
    place = {x: x if panel.log_x else float(i) for i, x in enumerate(every)}
    for i, (label, points) in enumerate(panel.lines.items()):
        known = [(place[x], ys) for x, ys in points if ys]
        xs = [x for x, _ in known]
        middle = [statistics.median(ys) for _, ys in known]
        axes.plot(xs, middle, color=colour(i), marker=marker(i), label=label, markersize=5)
        spread = [[min(ys) for _, ys in known], [max(ys) for _, ys in known]]
        axes.fill_between(xs, *spread, color=colour(i), alpha=0.15, linewidth=0)
    if panel.log_y:
        axes.set_yscale("log")
    if panel.log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(list(place.values()), [f"{x:g}" for x in every])
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.3)


def _k_panels(result: Mapping[str, Any]) -> list[Panel]:
    modes = {
        mode: {1: "k1", **{k: f"{mode}_k{k}" for k in (2, 4, 8)}}
        for mode in ("same_batch", "minibatches", "fresh_batches")
    }
    # Drift over the steps taken since the rollouts were sampled.
    drift: Lines = {
        mode: [
            (float(taken), [value])
            for taken, value in enumerate(result["step_kl_nats"].get(f"{mode}_k8", []))
            if taken and value is not None and value > 0
        ]
        for mode in modes
    }
    early, late = "early_reward", "kl_reference_nats"
    return [
        Panel(title=REWARD, x="k", y="reward", lines=lines_of(result, "reward", modes)),
        Panel(title=EARLY, x="k", y="reward", lines=lines_of(result, early, modes)),
        Panel(
            title="KL to the reference, last eighth",
            x="k",
            y="nats a response",
            lines=lines_of(result, late, modes),
        ),
        Panel(
            title="KL from the sampler within a round, k = 8",
            x="gradient steps taken",
            y="nats a response",
            lines=drift,
            log_x=True,
            log_y=True,
        ),
    ]


def _lag_panels(result: Mapping[str, Any]) -> list[Panel]:
    lags = (0, 1, 2, 4, 8)
    kinds = {
        "no cap": {lag: f"lag{lag}" for lag in lags},
        "cap 2": {lag: f"lag{lag}_capped" for lag in lags},
    }
    return [
        Panel(title=REWARD, x="lag", y="reward", lines=lines_of(result, "reward", kinds)),
        Panel(title=EARLY, x="lag", y="reward", lines=lines_of(result, "early_reward", kinds)),
        Panel(
            title="KL from the sampler",
            x="lag",
            y="nats a response",
            lines=lines_of(result, "kl_sampler_nats", kinds),
        ),
        Panel(
            title="Clipped tokens",
            x="lag",
            y="share",
            lines=lines_of(result, "clip_fraction", kinds),
        ),
    ]


def _replay_panels(result: Mapping[str, Any]) -> list[Panel]:
    kinds = {
        sampling: {
            1: "no_replay",
            2: "capacity2",
            **{capacity: f"capacity{capacity}_{sampling}" for capacity in (4, 8)},
        }
        for sampling in ("fifo", "uniform", "mixed")
    }
    x = "capacity, rounds"
    return [
        Panel(title=REWARD, x=x, y="reward", lines=lines_of(result, "reward", kinds)),
        Panel(title=EARLY, x=x, y="reward", lines=lines_of(result, "early_reward", kinds)),
        Panel(
            title="Uses of a trained group", x=x, y="uses", lines=lines_of(result, "uses", kinds)
        ),
        Panel(
            title="KL from the sampler",
            x=x,
            y="nats a response",
            lines=lines_of(result, "kl_sampler_nats", kinds),
        ),
    ]


REWARD, EARLY = "Held-out reward", "Held-out reward after a quarter of the rounds"
PANELS: dict[str, Callable[[Mapping[str, Any]], list[Panel]]] = {
    "gradient_steps": _k_panels,
    "lag": _lag_panels,
    "replay": _replay_panels,
}


def main() -> None:
    parser = parser_of(__doc__, seed="the first", counts={"seeds": (3, "of every arm")})
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--storage", type=Path, default=STORAGE, help=f"of the trials ({STORAGE})")
    parser.add_argument("--no-run", action="store_true", help="put together what has run")
    args = parser.parse_args()
    origin = provenance(args)
    for space in args.spaces:
        if not args.no_run:
            run(space, space, args, ["--set", f"optim.lr={LR}"])
        experiment = read_experiment(args.storage / space)
        files = {trial.name: read_files(trial) for trial in experiment.trials}
        comparison = compare(experiment.trials)
        found = answer(experiment, comparison, files)
        if found is None:
            sys.exit(f"{args.storage / space}: fewer than two arms have begun")
        result = summarise(experiment, files, found, comparison)
        print(align([found.header, *found.rows()]))
        print(*result["said"], *result["told"], sep="\n")
        workload = {"space": space, **experiment.description}
        result = {**as_run(origin, args.storage, space), "workload": workload, **result}
        write(RESULTS / f"off_policy_{space}.json", result)
        draw(space, result)
        if PAGE.exists():
            fill(PAGE, space, markdown(space, result))


if __name__ == "__main__":
    run_benchmark(main)
