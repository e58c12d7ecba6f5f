"""Which objective permits which staleness? The space `objectives_by_lag`, run and put together.

    python benchmarks/objectives.py                 48 arms, 3 seeds: some four hours on two cores
    python benchmarks/objectives.py --no-run        JSON, table and plot of what has run
    python benchmarks/objectives.py --space mine.py --name mine --seeds 1

Runs `launch/tune.py --space … --num-samples …` under a fixed name, so that a command that was cut
short goes on where it was: seed after seed, so that all arms have as many. Every arm trains on as
many samples. `--space` may be any space whose arms are called OBJECTIVE_lagN, with a lag 0 for
each objective. Writes a JSON and a plot, and the table of docs/results/objectives.md between its
marks.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments import as_run, fill, run
from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, write

from grpo_trainable.command_line import align
from reports.answers import answer
from reports.experiment import read_experiment
from reports.intervals import over_seeds
from reports.parts import read_files
from reports.records import ExperimentRecord, TrialRecord
from reports.summary import compare, median

SPACE = "objectives_by_lag"
DOCS = ROOT / "docs" / "results"
PAGE = DOCS / "objectives.md"
STORAGE = Path.home() / "ray_results" / "objectives"
ARM = re.compile(r"(?P<objective>.+)_lag(?P<lag>\d+)")

# What is kept of each arm besides its rewards: medians over the seeds.
KEPT = (
    *("lag", "lag_max", "kl_sampler_nats", "clip_fraction", "weights_bounded"),
    *("kl_reference_nats", "reference_nll_nats", "entropy_nats", "grad_norm", "skipped_steps"),
)

BySeed = Mapping[int, float]


# ---- What is kept ----------------------------------------------------------------------------


def last_reward(trial: TrialRecord) -> float | None:
    """Held-out reward at the end."""
    return trial.last("reward/eval_mean")


def mean_reward(trial: TrialRecord) -> float | None:
    """Held-out reward, the mean over the trial's evaluations after the one before training: how
    fast it learned, with less noise than its last value."""
    rewards = [reward for round_, reward, _ in trial.evaluated() if round_ > 0]
    return statistics.fmean(rewards) if rewards else None


def by_seed(trials: Sequence[TrialRecord], measure: Any) -> BySeed:
    values = {trial.config.seed: measure(trial) for trial in trials}
    return {seed: value for seed, value in sorted(values.items()) if value is not None}


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval at 95 % over the seeds, and the values; no interval for a single one."""
    if len(values) < 2:
        return {"value": next(iter(values), None), "low": None, "high": None, "seeds": len(values)}
    return {**asdict(over_seeds(values)[0]), "seeds": len(values)}


def against_lag_0(rewards: BySeed, base: BySeed) -> dict[str, Any]:
    """The difference to the same objective at lag 0, between trials of one seed."""
    return estimate([rewards[seed] - base[seed] for seed in rewards if seed in base])


def atlas(experiment: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Objective -> lag -> its rewards and what the lag changed."""
    found: dict[str, dict[str, Any]] = {}
    arms = experiment.complete_arms
    for objective, lag, arm in named(arms):
        base = arms.get(f"{objective}_lag0", [])
        row: dict[str, Any] = {}
        for name, measure in (("last", last_reward), ("mean", mean_reward)):
            rewards = by_seed(arms[arm], measure)
            row[name] = {**estimate(list(rewards.values())), "by_seed": dict(rewards)}
            if lag > 0:
                row[f"{name}_against_lag_0"] = against_lag_0(rewards, by_seed(base, measure))
        found.setdefault(objective, {})[str(lag)] = row
    return found


def named(arms: Mapping[str, Sequence[TrialRecord]]) -> Iterator[tuple[str, int, str]]:
    """Objective, lag and name of each arm that has run."""
    for arm, trials in arms.items():
        match = ARM.fullmatch(arm)
        if match is None:
            sys.exit(f"{arm}: the arms of this benchmark are called OBJECTIVE_lagN")
        if trials:
            yield match["objective"], int(match["lag"]), arm


# ---- The table -------------------------------------------------------------------------------


def cell(found: Mapping[str, Any] | None, form: str) -> str:
    """A value and its interval."""
    if found is None or found["value"] is None:
        return ""
    value = form.format(found["value"])
    if found["low"] is None:
        return value
    return f"{value} ({form.format(found['low'])} to {form.format(found['high'])})"


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """A row an objective: the reward at the end at each lag, and what each lag changed of the mean
    over the run."""
    objectives = result["objectives"]
    lags = sorted({int(lag) for row in objectives.values() for lag in row})
    header = [
        "objective",
        *(f"reward at the end, lag {lag}" for lag in lags),
        *(f"lag {lag} less lag 0, mean of the run" for lag in lags if lag > 0),
        *(f"KL from sampler, lag {lag}" for lag in lags if lag == lags[-1]),
        *(f"clipped, lag {lag}" for lag in lags if lag == lags[-1]),
    ]
    rows = [header]
    for objective, row in objectives.items():
        kept = result["arms"].get(f"{objective}_lag{lags[-1]}", {})
        rows.append(
            [
                objective,
                *(cell(row.get(str(lag), {}).get("last"), "{:.3f}") for lag in lags),
                *(
                    cell(row.get(str(lag), {}).get("mean_against_lag_0"), "{:+.3f}")
                    for lag in lags
                    if lag > 0
                ),
                *(
                    "" if kept.get(name) is None else form.format(kept[name])
                    for name, form in (("kl_sampler_nats", "{:.2g}"), ("clip_fraction", "{:.1%}"))
                ),
            ]
        )
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *others])


# ---- The plot --------------------------------------------------------------------------------


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Two panels, a line an objective: the reward at the end, and what each lag changed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    objectives = result["objectives"]
    figure = Figure(figsize=(9.4, 1.4 + 0.32 * len(objectives)), dpi=110)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_panel(left, objectives, "last", "held-out reward at the end")
    _draw_panel(right, objectives, "mean_against_lag_0", "less that at lag 0, mean of the run")
    right.axvline(0, color="#888888", linewidth=0.8)
    left.set_yticks(range(len(objectives)), list(objectives))
    left.invert_yaxis()
    names = left.get_legend_handles_labels()
    figure.legend(*names, loc="lower center", ncols=len(names[1]), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"drawn to {path}")


def _draw_panel(axes: Any, objectives: Mapping[str, Any], name: str, title: str) -> None:
    from reports.canvas import colour, marker

    lags = sorted({int(lag) for row in objectives.values() for lag in row})
    for i, lag in enumerate(lags):
        known = [
            (place + 0.22 * (i - (len(lags) - 1) / 2), row[str(lag)][name])
            for place, row in enumerate(objectives.values())
            if row.get(str(lag), {}).get(name, {}).get("value") is not None
        ]
        if not known:
            continue
        values = [found["value"] for _, found in known]
        spread = [
            [0.0 if found[end] is None else abs(found[end] - found["value"]) for _, found in known]
            for end in ("low", "high")
        ]
        axes.errorbar(
            values,
            [place for place, _ in known],
            xerr=spread,
            fmt=marker(i),
            color=colour(i),
            markersize=4,
            linewidth=1,
            label=f"lag {lag}",
        )
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)


def main() -> None:
    parser = parser_of(
        __doc__, "objectives.json", seed="the first", counts={"seeds": (3, "of every arm")}
    )
    parser.add_argument("--space", default=SPACE, help=f"whose arms are compared ({SPACE})")
    parser.add_argument("--name", default=SPACE, help=f"of the experiment ({SPACE})")
    parser.add_argument("--storage", type=Path, default=STORAGE, help=f"of the trials ({STORAGE})")
    parser.add_argument("--no-run", action="store_true", help="put together what has run")
    args = parser.parse_args()
    origin = provenance(args)
    if not args.no_run:
        run(args.space, args.name, args)
    experiment = read_experiment(args.storage / args.name)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    found = answer(experiment, compare(experiment.trials), files)
    if found is None:
        sys.exit(f"{args.storage / args.name}: fewer than two arms have run")
    result = {
        **as_run(origin, args.storage, args.name),
        "workload": {"space": args.space, **experiment.description},
        "objectives": atlas(experiment),
        "arms": {
            arm: {name: median(values[name]) for name in KEPT if name in values}
            for arm, values in found.arms.items()
        },
    }
    rows = table(result)
    print(align(rows))
    write(args.out, result)
    is_for_the_page = args.out == RESULTS / "objectives.json"
    draw(result, (DOCS if is_for_the_page else args.out.parent) / "objectives.png")
    if is_for_the_page and PAGE.exists():
        fill(PAGE, "objectives", markdown(rows))


if __name__ == "__main__":
    run_benchmark(main)
