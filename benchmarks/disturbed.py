"""Are exactly those arms marked beside which something else was running?

Runs `launch/tune.py --space async_vs_sync`, short, twice a repeat: with one busy core beside two of
its arms, from the start to the end of their trials, and with nothing beside any. An arm is marked
when the final table marks its speed as not comparable: too many of its rounds were disturbed
(`time/disturbed_fraction` above `noise.DISTURBED_ABOVE`). Exit status 1 unless both are marked in
the first run and none in the second, in every repeat.

Nothing else may run meanwhile: it would be measured as well. Some seven minutes a repeat.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import ROOT, parser_of, provenance, run_benchmark, write
from trial_runs import rows_of

from grpo_trainable.noise import DISTURBED_ABOVE
from reports.experiment import read_experiment
from reports.summary import compare
from search_spaces import SPACES

SPACE = SPACES["async_vs_sync"]
METRIC = "time/disturbed_fraction"
# It ends with us, however we end.
BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
# What the command prints where there is no terminal: the trial that starts, and how one ends.
EVENT = re.compile(r"^\d\d:\d\d:\d\d  (\S+)/\d+ +(started|done|failed)")


class Load:
    """One busy core, while it is on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def switch(self, on: bool) -> None:
        if on and self._process is None:
            self._process = subprocess.Popen([sys.executable, "-c", BUSY_LOOP])
        elif not on and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *error: object) -> None:
        self.switch(False)


def main() -> int:
    parser = parser_of(
        __doc__,
        "disturbed.json",
        counts={"rounds": (8, "of every arm"), "repeats": (5, "of both runs, in turn")},
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(SPACE.arms),
        default=["colocated_k2", "async_k1"],
        help="to disturb (colocated_k2 async_k1)",
    )
    args = parser.parse_args()
    runs = []
    for seed in range(args.seed, args.seed + args.repeats):
        for loaded in (args.arms, []):
            arms = run(loaded, args.rounds, seed)
            marked = sorted(arm for arm, measured in arms.items() if measured["marked"])
            right = marked == sorted(loaded)
            runs.append({"seed": seed, "loaded": loaded, "right": right, "arms": arms})
            print(f"seed {seed}, a busy core beside {' and '.join(loaded) or 'none'}:")
            print(*map(show, arms.items()), sep="\n", flush=True)
    right = sum(run["right"] for run in runs)
    print(f"{right} of {len(runs)} runs marked exactly the arms that were disturbed")
    workload = {"space": SPACE.name, "rounds": args.rounds, "disturbed_above": DISTURBED_ABOVE}
    write(args.out, {**provenance(args), "workload": workload, "runs": runs})
    return 0 if right == len(runs) else 1


def show(arm: tuple[str, dict[str, Any]]) -> str:
    name, measured = arm
    return (
        f"  {name:<24} {measured['disturbed_rounds']:2} of {measured['rounds']} rounds disturbed, "
        f"median share of others {measured['median']:.0%}{'  marked' if measured['marked'] else ''}"
    )


def run(loaded: Sequence[str], rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """What each arm of the space measured, with a busy core beside these."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", SPACE.name),
            *("--iterations", str(rounds), "--seed", str(seed), "--max-concurrent", "1"),
            *("--set", "eval.prompts=16", "--set", "eval.samples=1"),
            *("--name", "disturbed", "--storage", storage),
        ]
        with (
            Load() as load,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as tune,
        ):
            assert tune.stdout is not None
            printed = []
            for line in tune.stdout:
                printed.append(line)
                if event := EVENT.match(line):
                    load.switch(event[2] == "started" and event[1] in loaded)
        if tune.returncode != 0:
            sys.exit(f"status {tune.returncode}\n{''.join(printed)}")
        found = {}
        comparison = compare(read_experiment(Path(storage) / "disturbed").trials)
        for path in sorted(Path(storage).glob("disturbed/*/result.json")):
            rows = rows_of(path.parent)
            arm = rows[0]["config"]["arm"]
            marked = not comparison.comparable(arm)
            found[arm] = {"marked": marked, **judged([row[METRIC] for row in rows])}
        assert found.keys() == SPACE.arms.keys(), f"arms without a trial: {printed}"
        return found


def judged(fractions: Sequence[float]) -> dict[str, Any]:
    """How many rounds of a trial were disturbed, and by how much."""
    return {
        "rounds": len(fractions),
        "disturbed_rounds": sum(fraction > DISTURBED_ABOVE for fraction in fractions),
        "median": statistics.median(fractions),
        "fractions": fractions,
    }


if __name__ == "__main__":
    run_benchmark(main)
