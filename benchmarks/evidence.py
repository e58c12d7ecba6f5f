"""Repeat the main measurements, one after another, in an hour on two quiet cores.

    python benchmarks/evidence.py --plan    print the items and their planned time; run nothing
    python benchmarks/evidence.py           run them; `make evidence` also fills the tables

The command starts only if the checkout has no uncommitted changes and the machine does no other
work. Each item is a benchmark with arguments that shorten it. If the command is interrupted, the
same command continues and skips items that are complete at this commit. Afterwards,
benchmarks/results/ holds evidence.json, with the wall-clock time of each item and of all items.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from measure import (
    RESULTS,
    ROOT,
    is_dirty,
    measurements,
    parser_of,
    provenance,
    read,
    run_benchmark,
    same_run,
    write,
)

from grpo_trainable.command_line import UsageError, align
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE, Meter, shown_command

LOGS = ROOT / "build" / "evidence"
LISTENED_S = 5.0  # duration of the check for other work before the start


@dataclass(frozen=True)
class Item:
    """A benchmark with its arguments, its planned time and the result that it writes."""

    name: str
    minutes: float  # planned time, known from earlier runs on two cores
    script: str
    options: str
    result: str  # file in benchmarks/results/
    part: str = ""  # name of the measurement in a file that holds several

    @property
    def command(self) -> list[str]:
        """Arguments of `python` in the command."""
        return [self.script, *shlex.split(self.options)]

    @property
    def written(self) -> dict[str, Any]:
        """The measurement in the result file, or an empty dictionary."""
        return measurements(read(RESULTS / self.result)).get(self.part, {})


def micro(claim: str, minutes: float, options: str) -> Item:
    return Item(claim, minutes, "benchmarks/micro.py", f"{claim} {options}", "micro.json", claim)


def off_policy(space: str, minutes: float) -> Item:
    # 2,048 responses are a third of a usual trial.
    options = f"--spaces {space} --samples 2048 --seeds 3 --margin 0.03"
    result = f"off_policy_{space}.json"
    return Item(space, minutes, "benchmarks/off_policy.py", options, result)


SHORTER = "--seeds 3 --arms sync async_k1 --out benchmarks/results"
ITEMS = (
    Item("startup", 2.0, "benchmarks/startup.py", "--repeats 3", "startup.json"),
    Item("peers", 7.5, "benchmarks/peers.py", "--repeats 5", "peers.json"),
    Item(
        *("asynchrony", 9.0, "benchmarks/asynchrony.py"),
        "--repeats 2 --workloads default one_prompt --arms async sync 'colocated 1+1' "
        "'colocated 1+2'",
        "asynchrony.json",
    ),
    Item("a_a", 6.5, "benchmarks/a_a.py", "", "a_a.json"),
    micro("packing", 3.0, "--repeats 5"),
    micro("sampler_dtype", 1.0, "--repeats 5"),
    micro("learners", 1.0, "--repeats 5"),
    micro("monitor", 1.5, "--rounds 8"),
    Item(
        *("weight_transport", 3.0, "benchmarks/weight_transport.py"),
        "--turns 1 --sizes '16 MB' '240 MB' --transports shm object_store gloo --generators 2",
        "weight_transport.json",
    ),
    Item(
        *("keywords", 4.0, "benchmarks/learning.py"),
        f"{SHORTER}/learning_short.json --set rounds=32 --set eval.every=32",
        "learning_short.json",
    ),
    Item(
        *("word_problems", 5.5, "benchmarks/learning.py"),
        f"{SHORTER}/arithmetic_short.json --task arithmetic --set rounds=16 --set eval.every=16",
        "arithmetic_short.json",
    ),
    off_policy("gradient_steps_short", 5.5),
    off_policy("lag_exact_short", 5.5),
    off_policy("replay_short", 5.0),
)


def main(items: Sequence[Item] = ITEMS) -> None:
    parser = parser_of(__doc__, "evidence.json", seed="only recorded; each item has its own seeds")
    parser.add_argument("--plan", action="store_true", help="print the items and run nothing")
    args = parser.parse_args()
    if args.plan:
        print(plan(items))
        return
    if is_dirty():
        raise UsageError("the checkout has uncommitted changes; commit or remove them first")
    check_machine()
    origin = provenance(args)
    kept = read(args.out)
    done: dict[str, Any] = kept["items"] if same_run(kept, origin) else {}
    for place, item in enumerate(items, start=1):
        if not is_complete(item, done, origin):
            print(f"{place}/{len(items)} {item.name}: {item.minutes:g} min planned", flush=True)
            seconds = run(item)
            done[item.name] = {
                "command": shlex.join(["python", *item.command]),
                "planned_s": 60 * item.minutes,
                "wall_clock_s": seconds,
            }
            total = sum(own["wall_clock_s"] for own in done.values())
            write(args.out, {**origin, "wall_clock_s": total, "items": done}, quiet=True)
        print(progress(item.name, done, items), flush=True)


def plan(items: Sequence[Item]) -> str:
    """Return the items, their planned minutes and their commands as text."""
    rows = [[own.name, f"{own.minutes:g}", shlex.join(own.command)] for own in items]
    total = ["all", f"{sum(own.minutes for own in items):g}", ""]
    return align([["item", "minutes", "command"], *rows, total])


def check_machine() -> None:
    """Check that no other work uses the cores of this machine.

    Raises:
        UsageError: There is other work, or this machine does not report its load.
    """
    meter = Meter()
    meter.start_measuring()
    time.sleep(LISTENED_S)
    others = meter.take()
    if others is None:
        raise UsageError("this machine does not report the load of its cores")
    share = others.foreign_s / others.cores / others.seconds
    if share > DISTURBED_ABOVE:
        name = f" ({shown_command(others.culprit)})" if others.culprit else ""
        raise UsageError(f"other work uses {share:.0%} of this machine{name}; stop it and retry")


def is_complete(item: Item, done: dict[str, Any], origin: dict[str, Any]) -> bool:
    """Return True if an earlier command completed the item at this commit."""
    return item.name in done and same_run(item.written, origin)


def run(item: Item) -> float:
    """Run an item, and return its wall-clock time in seconds. Its output goes to a log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{item.name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, *item.command]
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
    if status != 0:
        sys.exit(
            f"{item.name}: exit status {status}; see {log}; to continue, run the same command again"
        )
    return time.monotonic() - began


def progress(name: str, done: dict[str, Any], items: Sequence[Item]) -> str:
    """Return one line about a completed item and the progress of all items."""
    own = done[name]["wall_clock_s"]
    total = sum(one["wall_clock_s"] for one in done.values())
    left = sum(item.minutes for item in items if item.name not in done)
    return f"{name}: {own:.0f} s; {total / 60:.1f} min so far, about {left:g} min left"


if __name__ == "__main__":
    run_benchmark(main)
