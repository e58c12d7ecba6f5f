"""Which objective permits which staleness? The space `objectives_by_lag`, run and put together.

    python benchmarks/objectives.py                     48 arms, 3 seeds: four hours on two cores
    python benchmarks/objectives.py --max-concurrent 2  the same, two trials at a time: two hours
    python benchmarks/objectives.py --seeds 1 --seed 2  seed 2 alone, beside what the JSON has
    python benchmarks/objectives.py --no-run            table and plot of what the JSON has
    python benchmarks/objectives.py --space mine.py --name mine --seeds 1 --out mine.json

Runs `launch/tune.py --space …` under a fixed name for each seed, so that a command that was cut
short goes on where it was. A seed is written when all of its arms have run, and is run again
only where the commit has changed since. Every arm trains on as many samples. `--space` may be any
space whose arms are called OBJECTIVE_lagN, with a lag 0 for each objective. Writes a JSON and a
plot, and the table of docs/results/objectives.md between its marks.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, same_run, write
from space_runs import as_run, fill, run

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

CORES, TRIAL_CPUS = 2, 0.1  # the machine's, and what a trial's own process reserves

Objectives = Mapping[str, Mapping[int, Mapping[str, Any]]]  # what `atlas` gives


# ---- What is kept ----------------------------------------------------------------------------


def last_reward(trial: TrialRecord) -> float | None:
    """Held-out reward at the end."""
    return trial.last("reward/eval_mean")


def mean_reward(trial: TrialRecord) -> float | None:
    """Held-out reward, the mean over the trial's evaluations after the one before training: how
    fast it learned, with less noise than its last value."""
    rewards = [reward for round_, reward, _ in trial.evaluated() if round_ > 0]
    return statistics.fmean(rewards) if rewards else None


REWARDS = {"last": last_reward, "mean": mean_reward}


def arms_of(experiment: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """What is kept of each arm of one seed."""
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    found = answer(experiment, compare(experiment.trials), files)
    if found is None:
        sys.exit("fewer than two arms have run")
    return {
        arm: {
            **{name: measure(trial) for name, measure in REWARDS.items()},
            **{name: median(found.arms[arm][name]) for name in KEPT if name in found.arms[arm]},
        }
        for arm, trials in experiment.complete_arms.items()
        for trial in trials  # one, or none where it has not run to its end
    }


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval at 95 % over the seeds, and the values; no interval for a single one."""
    if len(values) < 2:
        return {"value": next(iter(values), None), "low": None, "high": None, "seeds": len(values)}
    return {**asdict(over_seeds(values)[0]), "seeds": len(values)}


def atlas(seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Objective -> lag -> its rewards and what the lag changed, from the arms of each seed; what an
    arm lacks in a seed is left out."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for objective, lag, arm in named(dict.fromkeys(chain.from_iterable(seeds.values()))):
        row: dict[str, Any] = {}
        for name in REWARDS:
            row[name] = estimate(_known(arms.get(arm, {}).get(name) for arms in seeds.values()))
            if lag > 0:  # between trials of one seed
                base = f"{objective}_lag0"
                row[f"{name}_against_lag_0"] = estimate(
                    _known(_difference(arms, arm, base, name) for arms in seeds.values())
                )
        for name in KEPT:
            row[name] = median([arms[arm].get(name) for arms in seeds.values() if arm in arms])
        found.setdefault(objective, {})[lag] = row
    return found


def _difference(
    arms: Mapping[str, Mapping[str, Any]], arm: str, base: str, name: str
) -> float | None:
    """What an arm has more than `base`, where both have it."""
    own, others = (arms.get(each, {}).get(name) for each in (arm, base))
    return None if own is None or others is None else own - others


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def named(arms: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Objective, lag and name of each arm."""
    for arm in arms:
        match = ARM.fullmatch(arm)
        if match is None:
            sys.exit(f"{arm}: the arms of this benchmark are called OBJECTIVE_lagN")
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


def table(objectives: Objectives) -> list[list[str]]:
    """A row an objective: the reward at the end at each lag, and what each lag changed of the mean
    over the run."""
    lags = sorted({lag for row in objectives.values() for lag in row})
    header = [
        "objective",
        *(f"reward at the end, lag {lag}" for lag in lags),
        *(f"lag {lag} less lag 0, mean of the run" for lag in lags if lag > 0),
        f"KL from sampler, lag {lags[-1]}",
        f"clipped, lag {lags[-1]}",
    ]
    rows = [header]
    for objective, row in objectives.items():
        deepest = row.get(lags[-1], {})
        rows.append(
            [
                objective,
                *(cell(row.get(lag, {}).get("last"), "{:.3f}") for lag in lags),
                *(
                    cell(row.get(lag, {}).get("mean_against_lag_0"), "{:+.3f}")
                    for lag in lags
                    if lag > 0
                ),
                *(
                    "" if deepest.get(name) is None else form.format(deepest[name])
                    for name, form in (("kl_sampler_nats", "{:.2g}"), ("clip_fraction", "{:.1%}"))
                ),
            ]
        )
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *others])


# ---- The plot --------------------------------------------------------------------------------


def draw(objectives: Objectives, path: Path) -> None:
    """Two panels, a line an objective: the reward at the end, and what each lag changed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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


def _draw_panel(axes: Any, objectives: Objectives, name: str, title: str) -> None:
    from reports.canvas import colour, marker

    lags = sorted({lag for row in objectives.values() for lag in row})
    for i, lag in enumerate(lags):
        known = [
            (place + 0.22 * (i - (len(lags) - 1) / 2), row[lag][name])
            for place, row in enumerate(objectives.values())
            if row.get(lag, {}).get(name, {}).get("value") is not None
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


# ---- All of it -------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(
        __doc__, "objectives.json", seed="the first", counts={"seeds": (3, "of every arm")}
    )
    add = parser.add_argument
    add("--space", default=SPACE, help=f"whose arms are compared ({SPACE})")
    add("--name", default=SPACE, help=f"of the experiments, a number behind it ({SPACE})")
    add("--storage", type=Path, default=STORAGE, help=f"of the trials ({STORAGE})")
    add("--max-concurrent", type=int, default=1, help="trials at a time (1)")
    add("--no-run", action="store_true", help="put together what the JSON has")
    args = parser.parse_args()
    parts = json.loads(args.out.read_text()) if args.out.exists() else {}
    if not args.no_run:
        for seed in range(args.seed, args.seed + args.seeds):
            parts[f"seed {seed}"] = measured(args, seed, parts.get(f"seed {seed}"))
            write(args.out, parts)
    if not parts:
        sys.exit(f"{args.out}: no seed has been measured")
    objectives = atlas({part: parts[part]["arms"] for part in sorted(parts, key=number)})
    rows = table(objectives)
    print(align(rows))
    is_for_the_page = args.out == RESULTS / "objectives.json"
    draw(objectives, (DOCS if is_for_the_page else args.out.parent) / "objectives.png")
    if is_for_the_page and PAGE.exists():
        fill(PAGE, "objectives", markdown(rows))


def number(part: str) -> int:
    """Of the seed that a part of the JSON is called by: `seed 10` comes after `seed 9`."""
    return int(part.removeprefix("seed "))


def measured(
    args: argparse.Namespace, seed: int, known: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """All arms with one seed: what the JSON has of them, or else what they come to."""
    args = argparse.Namespace(**{**vars(args), "seed": seed, "seeds": 1})
    origin = provenance(args)
    if known is not None and same_run(known, origin):
        print(f"seed {seed}: has run at {known['commit'][:8]}")
        return known
    name = f"{args.name}_{seed}"
    run(args.space, name, args, side_by_side(args.max_concurrent))
    experiment = read_experiment(args.storage / name)
    return {
        **as_run(origin, args.storage, name),
        "workload": {"space": args.space, **experiment.description},
        "arms": arms_of(experiment),
    }


def side_by_side(trials: int) -> list[str]:
    """The options with which so many trials run at a time, each on its part of two cores."""
    if trials == 1:
        return []
    each = (CORES / trials - TRIAL_CPUS) / 2  # of generator and learner
    sets = [f"resources.{actor}_cpus={each:g}" for actor in ("generator", "learner")]
    return ["--max-concurrent", str(trials), *(word for one in sets for word in ("--set", one))]


if __name__ == "__main__":
    run_benchmark(main)
