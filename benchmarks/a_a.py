"""Can comparisons of speed be trusted?

Tests them with equal arms, and with other work on the machine.

    python benchmarks/a_a.py                     are equal arms told apart?
    python benchmarks/a_a.py --part disturbed    are disturbed arms marked? seven minutes per repeat

a_a          Runs three arms in randomised blocks: `a`; `a_again`, which is as fast as `a`; and
             `slowed`, whose reward function sleeps so that a round takes 15 % longer. The
             comparison must tell `a` and `slowed` apart, but not `a` and `a_again`. By
             construction, the comparison wrongly tells equal arms apart in one experiment out of
             twenty. The benchmark therefore also resamples the experiment `--resampled` times, and
             counts how often the arms are told apart. Resampling draws the rounds of every trial
             with replacement. For the equal arms, resampling also decides at random which of the
             two runs with the same seed counts as `a`.
disturbed    Runs a short `async_vs_sync` twice. In the first run, one core is kept busy during two
             of the arms, and the final table must mark exactly these two arms as not comparable. In
             the second run, both cores are free, and the table must mark no arm. If a table marks
             too many or too few arms, the exit status is 1. Run nothing else at the same time,
             because any other work would disturb the arms too.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import (
    RESULTS,
    ROOT,
    parser_of,
    provenance,
    rows_of,
    run_benchmark,
    run_trial,
    write,
)

import search_spaces
from grpo_trainable.command_line import number
from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE
from reports.contrasts import Contrast, speed_up
from reports.experiment import read_experiment
from reports.records import TrialRecord
from reports.summary import compare
from search_spaces import SearchSpace

Trials = Sequence[TrialRecord]

SLOWED = 0.15
# The default reward (1 for the keyword as a whole word), written as a user-defined function, so
# that it runs in a separate process.
REWARD = """\
import re, time


def score(response, ground_truth):
    time.sleep({sleep_s!r})
    words = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    return float(all(re.search(rf"\\b{{re.escape(word)}}\\b", response, re.I) for word in words))
"""


def main() -> int:
    parser = parser_of(__doc__, seed="the first seed")
    add = parser.add_argument
    add("--part", choices=("a_a", "disturbed"), default="a_a")
    add("--seeds", type=number(int, 1), help="number of seeds or repeats (12; disturbed: 5)")
    add("--rounds", type=number(int, 1), help="rounds of every trial (8)", default=8)
    add("--resampled", type=number(int, 1), default=200, help="resampled experiments (200)")
    add("--out", type=Path, help="JSON file (a_a.json or disturbed.json)")
    args = parser.parse_args()
    args.seeds = args.seeds or {"a_a": 12, "disturbed": 5}[args.part]
    result = {"a_a": a_a, "disturbed": disturbed}[args.part](args)
    workload = {"space": args.part, "rounds": args.rounds, "disturbed_above": DISTURBED_ABOVE}
    out = args.out or RESULTS / f"{args.part}.json"
    write(out, {**provenance(args), "workload": workload, **result})
    return 0 if all(run["right"] for run in result.get("runs", ())) else 1


# ---- Equal arms ------------------------------------------------------------------------------


def a_a(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory)
        result = compared_arms(args, storage)
    for arm in ("a_again", "slowed"):
        print(said(arm, result[arm]))
    return result


def compared_arms(args: argparse.Namespace, storage: Path) -> dict[str, Any]:
    from launch import tune

    rounds = ["--set", f"eval.every={args.rounds}", "--iterations", str(args.rounds)]
    round_s = seconds_a_round(args, storage, rounds)
    sleep_s = SLOWED * round_s / schedule.responses_per_round(GRPOConfig())
    settings = {
        "a": {"task.reward": reward(storage, "plain", 0.0)},
        # Arms with equal settings would be merged, so `a_again` has its own copy of the function.
        "a_again": {"task.reward": reward(storage, "plain_again", 0.0)},
        "slowed": {"task.reward": reward(storage, "slowed", sleep_s)},
    }
    search_spaces.SPACES["a_a"] = SearchSpace(
        name="a_a",
        question="are equal arms told apart?",
        arms={arm: {"placement": "colocated", **own} for arm, own in settings.items()},
    )
    seeds = ["--num-samples", str(args.seeds), "--seed", str(args.seed)]
    where = ["--name", "a_a", "--storage", str(storage)]
    status = tune.main(["--space", "a_a", *seeds, *rounds, *where])
    if status != tune.OK:
        sys.exit(status)
    arms = read_experiment(storage / "a_a").arms
    rng = random.Random(args.seed)
    return {
        "seconds_a_round": round_s,
        "sleep_s_a_response": sleep_s,
        "a_again": verdict(arms["a_again"], arms["a"], args.resampled, rng, swap=True),
        "slowed": verdict(arms["slowed"], arms["a"], args.resampled, rng, swap=False),
    }


def seconds_a_round(args: argparse.Namespace, storage: Path, options: Sequence[str]) -> float:
    """Return the median seconds per round of `a`, including the work of the reward process."""
    task = f"task.reward={reward(storage, 'plain', 0.0)}"
    rows = run_trial("colocated_k1", seed=args.seed, options=["--set", task, *options])
    return statistics.median(row["time/step_s"] - row["time/eval_s"] for row in rows[1:])


def reward(storage: Path, name: str, sleep_s: float) -> str:
    path = storage / f"{name}.py"
    path.write_text(REWARD.format(sleep_s=sleep_s))
    return f"{path}:score"


def verdict(
    arm: Trials, base: Trials, repeats: int, rng: random.Random, *, swap: bool
) -> dict[str, Any]:
    """Compare two arms, and count the resampled experiments that tell them apart."""
    found = speed_up(arm, base)
    assert isinstance(found, Contrast), f"not comparable: {found}"
    again = [speed_up(*resampled(arm, base, rng, swap=swap)) for _ in range(repeats)]
    return {
        "speed_up": found.value,
        "interval": found.interval and [found.interval.low, found.interval.high],
        "told_apart": found.told_apart,
        "repeats": repeats,
        "repeats_told_apart": sum(isinstance(o, Contrast) and bool(o.told_apart) for o in again),
    }


def resampled(
    arm: Trials, base: Trials, rng: random.Random, *, swap: bool
) -> tuple[Trials, Trials]:
    pairs = []
    for own, other in zip(arm, base, strict=True):
        pair = (drawn(own, rng), drawn(other, rng))
        pairs.append(pair[::-1] if swap and rng.random() < 0.5 else pair)
    return [own for own, _ in pairs], [other for _, other in pairs]


def drawn(trial: TrialRecord, rng: random.Random) -> TrialRecord:
    """Draw the rounds of a trial with replacement, and recompute the sums of time and samples."""
    names = ("time/wall_clock_s", "count/trained")
    before = [dict.fromkeys(names, 0.0), *trial.rows[:-1]]
    steps = [
        {**row, **{name: row[name] - last[name] for name in names}}
        for row, last in zip(trial.rows, before, strict=True)
    ]
    rows, totals = [], dict.fromkeys(names, 0.0)
    for place, step in enumerate(rng.choices(steps, k=len(steps)), start=1):
        totals = {name: totals[name] + step[name] for name in names}
        rows.append({**step, **totals, "training_iteration": float(place)})
    return replace(trial, rows=rows)


def said(arm: str, found: dict[str, Any]) -> str:
    low, high = found["interval"]
    outcome = "told apart" if found["told_apart"] else "not told apart"
    return (
        f"{arm} over a: {found['speed_up']:.3f} x ({low:.3f} to {high:.3f}), {outcome}; told apart "
        f"in {found['repeats_told_apart']} of {found['repeats']} resampled experiments"
    )


# ---- Arms with other work on the machine -----------------------------------------------------

DISTURBED = ("colocated_k2", "async_k1")
# This process ends as soon as its parent process has ended, for whatever reason.
BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
# If its output is not a terminal, the command prints these lines when a trial starts and ends.
EVENT = re.compile(r"^\d\d:\d\d:\d\d  (\S+)/\d+ +(started|done|failed)")


class Load:
    """A process that keeps one core busy while it is switched on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def switch(self, on: bool) -> None:
        if on and self._process is None:
            self._process = subprocess.Popen([sys.executable, "-c", BUSY_LOOP])
        elif not on and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def disturbed(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for seed in range(args.seed, args.seed + args.seeds):
        for loaded in (DISTURBED, ()):
            arms = run_beside(loaded, args.rounds, seed)
            marked = sorted(arm for arm, found in arms.items() if found["marked"])
            right = marked == sorted(loaded)
            runs.append({"seed": seed, "loaded": loaded, "right": right, "arms": arms})
            print(f"seed {seed}, other work in {loaded or 'none'}: marked {marked}", flush=True)
    right = sum(run["right"] for run in runs)
    print(f"{right} of {len(runs)} runs marked exactly the arms that were disturbed")
    return {"runs": runs}


def run_beside(loaded: Sequence[str], rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Run every arm of the space. Return the arms' marks, and how disturbed their rounds were.

    Args:
        loaded: arms that run while another process keeps a core busy.
        rounds: rounds of every trial.
        seed: seed of the trials.
    """
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", "async_vs_sync"),
            *("--iterations", str(rounds), "--seed", str(seed), "--max-concurrent", "1"),
            *("--set", "eval.prompts=16", "--set", "eval.samples=1"),
            *("--name", "disturbed", "--storage", storage),
        ]
        load = Load()  # the load is switched off when the last trial ends, if not before
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as job:
            assert job.stdout is not None
            printed = []
            for line in job.stdout:
                printed.append(line)
                if event := EVENT.match(line):
                    load.switch(event[2] == "started" and event[1] in loaded)
        if job.returncode != 0:
            sys.exit(f"status {job.returncode}\n{''.join(printed)}")
        comparison = compare(read_experiment(Path(storage) / "disturbed").trials)
        found = {}
        for path in sorted(Path(storage).glob("disturbed/*/result.json")):
            rows = rows_of(path.parent)
            arm = rows[0]["config"]["arm"]
            fractions = [row["time/disturbed_fraction"] for row in rows]
            found[arm] = {"marked": not comparison.comparable(arm), "fractions": fractions}
        return found


if __name__ == "__main__":
    run_benchmark(main)
