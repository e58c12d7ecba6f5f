"""Measure the costs and benefits of k, lag and replay.

    python benchmarks/off_policy.py                             k, lag and replay: two hours
    python benchmarks/off_policy.py --spaces lag_exact          lag that is exact on any machine
    python benchmarks/off_policy.py --spaces lag --budget 2h    add seeds until all arms are judged

Runs `launch/tune.py --space … --num-samples … --margin …` with a fixed experiment name, in a
directory named after the commit. So the same command continues an interrupted run. Afterwards, the
benchmark writes one JSON file per space. `make tables` puts the figures into the doc pages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import own_spaces
from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, write
from own_spaces import SHORT

from grpo_trainable.command_line import align, number, positive
from reports.answers import Answer, answer
from reports.experiment import read_experiment
from reports.parquet_reader import TrialFiles, read_files
from reports.records import ExperimentRecord
from reports.summary import compare, median

SPACES = ("gradient_steps", "lag", "replay")
MORE = ("lag_exact", *SHORT)
STORAGE = Path.home() / "ray_results" / "off_policy"
LR = "2e-4"  # learning rate for all tables, even if the default is different


# ---- The result of a space -------------------------------------------------------------------


def summarise(
    experiment: ExperimentRecord, files: Mapping[str, TrialFiles], found: Answer
) -> dict[str, Any]:
    by_arm = experiment.complete_arms  # the same arms as in `found`
    step_kl = {
        arm: _by_step([files[trial.name] for trial in trials], "kl_sampler_nats")
        for arm, trials in by_arm.items()
    }
    return {
        "seeds": sorted({trial.config.seed for trials in by_arm.values() for trial in trials}),
        "columns": {c.name: {"title": c.title, "form": c.form} for c in found.columns},
        "arms": {arm: dict(values) for arm, values in found.arms.items()},
        "said": list(found.said),
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
    """For each gradient step of a round, return a figure's median over rounds, then over seeds."""
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
        for step, value in enumerate(values)  # `step` is the number of earlier steps
        if step >= 1 and value is not None and value > 0
    ]
    if len(points) < 3:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# ---- The trials ------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(
        __doc__, seed="the first seed", counts={"seeds": (3, "number of seeds of every arm")}
    )
    add = parser.add_argument
    add("--spaces", nargs="+", choices=(*SPACES, *MORE), default=SPACES)
    add("--samples", type=number(int, 1), help="responses per trial (default: set by the space)")
    add("--margin", type=positive, default=0.03, help="acceptable loss of reward (0.03)")
    add("--budget", metavar="TIME", help="add seeds, within this time, until every arm is decided")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every trial")
    add("--storage", type=Path, default=STORAGE, help=f"storage path of the trials ({STORAGE})")
    args = parser.parse_args()
    origin = provenance(args)
    storage: Path = args.storage / origin["commit"][:12]  # never mix trials of two commits
    for space in args.spaces:
        result = measured(space, storage / space, options_of(args))
        write(RESULTS / f"off_policy_{space}.json", {**origin, **result})


def options_of(args: argparse.Namespace) -> list[str]:
    """Return the options of `launch/tune.py` that do not depend on the space."""
    return [
        *([] if args.samples is None else ["--samples", str(args.samples)]),
        *("--num-samples", str(args.seeds), "--seed", str(args.seed)),
        *("--margin", str(args.margin)),
        *([] if args.budget is None else ["--until-decided", "--budget", args.budget]),
        *(word for text in (f"optim.lr={LR}", *args.set) for word in ("--set", text)),
    ]


def measured(space: str, directory: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run or continue a space as the experiment in `directory`, and return its result."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    asked = f"{own_spaces.__file__}:{space.upper()}" if space in own_spaces.OWN else space
    command = [
        *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", asked, *options),
        *("--name", directory.name, "--storage", str(directory.parent), "--resume", "auto"),
    ]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{directory.name}: status {done.returncode}; run the same command to continue")
    experiment = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    found = answer(experiment, compare(experiment.trials), files)
    if found is None:
        sys.exit(f"{directory}: fewer than two arms have begun")
    result = summarise(experiment, files, found)
    print(align([found.header, *found.rows()]))
    print(*result["said"], sep="\n")
    result["menu"] = json.loads((directory / "report.json").read_text())["menu"]
    described = json.dumps(experiment.description).replace(f"{ROOT}/", "")
    return {"workload": {"space": space, **json.loads(described)}, **result}


if __name__ == "__main__":
    run_benchmark(main)
