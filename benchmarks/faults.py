"""What is lost when something breaks: a campaign of faults against real experiments.

Each fault strikes a running `launch/tune.py` at a random moment between rounds 3 and 12 of 16,
with a checkpoint every 4 rounds. A trial has survived when the command, or its `--resume` once the
driver is dead, ends with status 0, every round stands once and in order in result.json,
progress.csv, TensorBoard and Parquet, and no process of ours is left 30 s after a kill of the
driver. Seconds to recover are the longest time without a row from the fault on; lost is what was
done again: rounds, or prompts asked for once more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from measure import RESULTS, ROOT, provenance, write

ROUNDS, CHECKPOINT_EVERY = 16, 4
FIRST, LAST = 3, 12  # rounds between which a fault strikes
LONGEST_S = 240.0
ROLES = ("Generator", "Learner", "Colocated", "DetailedGRPO")


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    arm: str
    role: str | None  # whose process is killed; None: the driver's
    repeats: int


FAULTS = (
    Fault(name="generator SIGKILL, lag 0", arm="sync", role="Generator", repeats=10),
    Fault(name="generator SIGKILL, lag 1", arm="async_k1", role="Generator", repeats=10),
    Fault(name="learner SIGKILL", arm="async_k1", role="Learner", repeats=10),
    Fault(name="colocated worker SIGKILL", arm="colocated_k1", role="Colocated", repeats=10),
    Fault(name="Trainable SIGKILL", arm="sync", role="DetailedGRPO", repeats=10),
    Fault(name="driver SIGKILL, then --resume", arm="sync", role=None, repeats=10),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    struck_at_round: int
    survived: bool
    recovered_s: float | None
    rounds_repeated: int
    prompts_asked_again: int
    problem: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", action="append", help="part of the name of those to run (all)")
    parser.add_argument("--repeats", type=int, help="of each, instead of its own number")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults.json", help="JSON file")
    args = parser.parse_args()
    chosen = [f for f in FAULTS if not args.fault or any(part in f.name for part in args.fault)]
    if not chosen:
        parser.error(f"--fault: none matches; valid: {', '.join(f.name for f in FAULTS)}")
    outcomes: dict[str, list[Outcome]] = {}
    for fault in chosen:
        for repeat in range(args.repeats or fault.repeats):
            rng = random.Random(f"{args.seed}/{fault.name}/{repeat}")
            outcome = strike(fault, rng)
            outcomes.setdefault(fault.name, []).append(outcome)
            print(f"{fault.name} {repeat}: {shown(outcome)}", flush=True)
    print()
    print(table(outcomes))
    faults = {name: [asdict(outcome) for outcome in list_] for name, list_ in outcomes.items()}
    workload = {"rounds": ROUNDS, "checkpoint_every": CHECKPOINT_EVERY}
    write(args.out, {**provenance(args), "workload": workload, "faults": faults})


def strike(fault: Fault, rng: random.Random) -> Outcome:
    """One experiment, one fault."""
    with tempfile.TemporaryDirectory() as storage:
        experiment = Path(storage) / "faults"
        first = subprocess.Popen(
            command(storage, *start_options(fault.arm)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            at = rng.randint(FIRST, LAST)
            wait_until(lambda: len(rows(experiment)) >= at, first)
            time.sleep(rng.random() * 0.3)
            family = psutil.Process(first.pid).children(recursive=True)
            struck = time.time()
            before = len(rows(experiment))
            if fault.role is None:
                first.send_signal(signal.SIGKILL)
                first.wait()
                _, left = psutil.wait_procs([p for p in family if is_ours(p)], timeout=30)
                if left:
                    return failure(before, f"{len(left)} processes left 30 s after the kill")
                struck = time.time()
                resume = ["--resume", "must"]
                status = subprocess.run(
                    command(storage, *resume),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=LONGEST_S,
                ).returncode
            else:
                victims = [p for p in family if is_ours(p, fault.role)]
                if not victims:
                    return failure(before, f"no process of {fault.role} was found")
                victims[0].kill()
                status = first.wait(timeout=LONGEST_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            return failure(0, f"took longer than {LONGEST_S:g} s ({type(error).__name__})")
        finally:
            if first.poll() is None:
                first.kill()
                first.wait()
        if status != 0:
            return failure(before, f"status {status}")
        return judge(experiment, before, struck)


def command(storage: str, *options: str) -> list[str]:
    script = str(ROOT / "launch" / "tune.py")
    return [sys.executable, script, "--name", "faults", "--storage", storage, *options]


def start_options(arm: str) -> list[str]:
    settings = {
        "arm": arm,
        "eval.prompts": 8,
        "eval.samples": 1,
        "eval.every": 4,
        "rollout.prompts": 4,
        "rollout.max_new_tokens": 24,
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [
        *("--space", "async_vs_sync", "--iterations", str(ROUNDS)),
        *("--checkpoint-every", str(CHECKPOINT_EVERY), *options),
    ]


def rows(experiment: Path) -> list[dict[str, Any]]:
    """Whole lines of the trial's result.json."""
    for path in experiment.glob("*/result.json"):
        lines = path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError
        time.sleep(0.02)


def is_ours(process: psutil.Process, role: str | None = None) -> bool:
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(f"ray::{name}" in title for name in ((role,) if role else ROLES))


def failure(at: int, problem: str) -> Outcome:
    return Outcome(
        struck_at_round=at,
        survived=False,
        recovered_s=None,
        rounds_repeated=0,
        prompts_asked_again=0,
        problem=problem,
    )


def judge(experiment: Path, before: int, struck: float) -> Outcome:
    """What the files say. `before`: rows that stood there when the fault struck."""
    problem = None
    (trial,) = (path.parent for path in experiment.glob("*/result.json"))
    results = rows(experiment)
    every = list(range(1, ROUNDS + 1))
    for name, found in rounds_on_disk(trial).items():
        if found != every:
            problem = f"{name} holds rounds {found}"
    # A part is written with each row, and again when a round is done again.
    times = sorted(path.stat().st_mtime for path in (trial / "rollouts").glob("*.parquet"))
    after = [struck, *(at for at in times if at > struck)]
    restarts = [
        row["training_iteration"] for row in results if row["iterations_since_restore"] == 1
    ]
    repeated = max(0, before - (restarts[-1] - 1)) if len(restarts) > 0 and restarts[-1] > 1 else 0
    return Outcome(
        struck_at_round=before,
        survived=problem is None,
        recovered_s=max((b - a for a, b in pairwise(after)), default=None),
        rounds_repeated=repeated,
        prompts_asked_again=int(results[-1]["count/redispatched"]),
        problem=problem,
    )


def rounds_on_disk(trial: Path) -> dict[str, list[int]]:
    import pyarrow.parquet as pq
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (trial / "progress.csv").open(newline="") as file:
        progress = [int(row["training_iteration"]) for row in csv.DictReader(file)]
    events = EventAccumulator(str(trial), {"scalars": 0})
    events.Reload()
    parquet = {
        kind: sorted(
            {
                round_
                for path in (trial / kind).glob("*.parquet")
                for round_ in pq.read_table(path, columns=["round"]).column("round").to_pylist()
            }
        )
        for kind in ("rollouts", "versions")
    }
    lines = (trial / "result.json").read_text().splitlines()
    return {
        "result.json": [json.loads(line)["training_iteration"] for line in lines],
        "progress.csv": progress,
        "TensorBoard": [event.step for event in events.Scalars("version/learner")],
        **parquet,
    }


def shown(outcome: Outcome) -> str:
    if not outcome.survived:
        return f"round {outcome.struck_at_round}: LOST ({outcome.problem})"
    return (
        f"round {outcome.struck_at_round}: survived, recovered in {outcome.recovered_s:.1f} s, "
        f"{outcome.rounds_repeated} rounds repeated, {outcome.prompts_asked_again} prompts again"
    )


def table(outcomes: dict[str, Sequence[Outcome]]) -> str:
    lines = [
        f"{'fault':<32} trials survived  recovery s (max)  rounds repeated (max)  prompts (max)"
    ]
    for name, list_ in outcomes.items():
        seconds = [o.recovered_s for o in list_ if o.recovered_s is not None]
        recovery = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "-"
        lines.append(
            f"{name:<32} {len(list_):>6} {sum(o.survived for o in list_):>8}  {recovery:>16}  "
            f"{max(o.rounds_repeated for o in list_):>21}  "
            f"{max(o.prompts_asked_again for o in list_):>13}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
