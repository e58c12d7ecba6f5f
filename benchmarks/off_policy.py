"""Measure the costs and benefits of k, lag and replay, and the lag that each objective permits.

    python benchmarks/off_policy.py                             k, lag and replay: two hours
    python benchmarks/off_policy.py --spaces lag                only lag
    python benchmarks/off_policy.py --spaces objectives_by_lag  48 arms: four hours
    python benchmarks/off_policy.py --no-run                    JSON and tables of existing trials

Runs `launch/tune.py --space … --num-samples …` under a fixed name, so the same command continues an
interrupted run. Afterwards, the benchmark writes one JSON file per space, and puts the tables into
docs/results/off_policy.md, between the marks on that page.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, write

from grpo_trainable.command_line import align
from reports.answers import Answer, answer
from reports.experiment import read_experiment
from reports.parquet_reader import TrialFiles, read_files
from reports.records import ExperimentRecord
from reports.summary import Comparison, compare, median, show
from reports.verdicts import quantities, verdicts

SPACES = ("gradient_steps", "lag", "replay")  # the spaces that have a table on the page
OBJECTIVES = "objectives_by_lag"
PAGE = ROOT / "docs" / "results" / "off_policy.md"
STORAGE = Path.home() / "ray_results" / "off_policy"
LR = "2e-4"  # learning rate for all tables, even if the default is different

# Columns of the tables, by their names in reports/answers.py.
SHOWN = {
    "gradient_steps": (
        *("reward", "against", "early_reward", "gradient_steps", "samples_per_s"),
        *("kl_sampler_nats", "clip_fraction", "kl_reference_nats"),
        *("reference_nll_nats", "optimize_share"),
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


# ---- The result of a space -------------------------------------------------------------------


def summarise(
    experiment: ExperimentRecord,
    files: Mapping[str, TrialFiles],
    found: Answer,
    comparison: Comparison,
) -> dict[str, Any]:
    by_arm = experiment.complete_arms  # the answer uses the same arms
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
        "step_kl_growth": {arm: growth(values) for arm, values in step_kl.items()},
    }


def _by_step(files: Sequence[TrialFiles], name: str) -> list[float | None]:
    """Return, for each gradient step of a round, the median over rounds and then over seeds."""
    steps = sorted({step for read in files for step in read.steps})
    return [
        median([getattr(read.steps[step], name) for read in files if step in read.steps])
        for step in steps
    ]


def growth(values: Sequence[float | None]) -> float | None:
    """Return the exponent p of KL ~ step^p.

    p is the slope of a least-squares line through (log step, log KL). The first step is left out,
    because its KL is 0.
    """
    points = [
        (math.log(step), math.log(value))
        for step, value in enumerate(values)  # number of steps taken before
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


# ---- The trials ------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(
        __doc__, seed="the first seed", counts={"seeds": (3, "number of seeds of every arm")}
    )
    parser.add_argument("--spaces", nargs="+", choices=(*SPACES, OBJECTIVES), default=SPACES)
    parser.add_argument(
        "--storage", type=Path, default=STORAGE, help=f"storage path of the trials ({STORAGE})"
    )
    parser.add_argument("--max-concurrent", type=int, default=1, help="concurrent trials (1)")
    parser.add_argument("--no-run", action="store_true", help="use existing trials")
    args = parser.parse_args()
    origin = provenance(args)
    for space in args.spaces:
        if not args.no_run:
            run(space, args)
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
        if space in SPACES:
            fill(PAGE, space, markdown(space, result))


def run(space: str, args: argparse.Namespace) -> None:
    """Run or continue a space, as the experiment of the same name in `args.storage`."""
    args.storage.mkdir(parents=True, exist_ok=True)
    origin = provenance(args)
    with commits_file(args.storage, space).open("a") as file:
        file.write(origin["commit"] + (" and what was not committed" if origin["dirty"] else ""))
        file.write("\n")
    command = [
        *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", space),
        *("--num-samples", str(args.seeds), "--seed", str(args.seed)),
        *("--set", f"optim.lr={LR}", "--name", space, "--storage", str(args.storage)),
        *("--resume", "auto", "--max-concurrent", str(args.max_concurrent)),
    ]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{space}: status {done.returncode}; run the same command to continue")


def as_run(origin: Mapping[str, Any], storage: Path, space: str) -> dict[str, Any]:
    """Return `origin` with the commits at which the trials ran, oldest first."""
    file = commits_file(storage, space)
    commits = file.read_text().splitlines() if file.exists() else []
    dirty = origin["dirty"] or any(" " in commit for commit in commits)
    return {**origin, "dirty": dirty, "trials_commits": commits}


def commits_file(storage: Path, space: str) -> Path:
    """Return the file to which each start of the command adds a line with its commit."""
    return storage / f"{space}.commits"


def fill(page: Path, name: str, table: str) -> None:
    """Put the table between its marks on the page."""
    opening, closing = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
    text = page.read_text()
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        sys.exit(f"{page}: no marks for a table of {name}; add them")
    page.write_text(before + opening + table + closing + after)


if __name__ == "__main__":
    run_benchmark(main)
