"""What checkpoints cost: their share of wall-clock, every round and at the default, beside what the
machine itself needs to write and fsync the same bytes.

Runs the default workload with a checkpoint every round and every ten in turn. A checkpoint's time
is what the trial's own clock says (writing, fsync, Tune's copy to the storage path) and what it
adds to the gap before the next round (Tune takes note of it): the median gap after a round with a
checkpoint less that after a round without one. The machine's write is one file of the same bytes,
on the same file system, in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import parser_of, provenance, run_benchmark, write
from trial_runs import finished_trial

EVERY = (1, 10)


def main() -> None:
    parser = parser_of(
        __doc__,
        "checkpoint_cost.json",
        counts={"rounds": (31, "of each run"), "repeats": (3, "of all runs, in turn")},
    )
    parser.add_argument("--arms", nargs="+", default=["sync", "colocated_k1"])
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    for repeat in range(args.repeats):
        for arm in args.arms:
            found = {
                every: spans_of(arm, every, args.seed + repeat, args.rounds) for every in EVERY
            }
            for every, result in costs(found).items():
                runs.setdefault(f"{arm}, every {every}", []).append(result)
                print(f"repeat {repeat} {arm:<13} every {every:>2}: {shown(result)}", flush=True)
    print()
    for name, results in runs.items():
        middle = {key: statistics.median(r[key] for r in results) for key in results[0]}
        print(f"median   {name:<23} {shown(middle)}")
    workload = {"rounds": args.rounds, "space": "async_vs_sync, its defaults"}
    write(args.out, {**provenance(args), "workload": workload, "runs": runs})


def spans_of(arm: str, every: int, seed: int, rounds: int) -> dict[str, Any]:
    """Seconds of each checkpoint, gaps with and without one, and the whole."""
    # No evaluation but the first and the last: it would be part of a few rounds only.
    options = [
        *("--iterations", str(rounds), "--checkpoint-every", str(every)),
        *("--set", f"eval.every={rounds}", "--set", "eval.prompts=16"),
    ]
    with finished_trial(arm, seed=seed, options=options) as directory:
        trace = json.loads((directory / "trace.json").read_text())
        newest = max(directory.glob("checkpoint_*"))
        size = sum(path.stat().st_size for path in newest.iterdir())
    spans = [event for event in trace if event["ph"] == "X" and event["cat"] == "trial"]
    named = {
        name: sorted(
            (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in spans if e["name"] == name
        )
        for name in ("round", "checkpoint")
    }
    gaps: dict[bool, list[float]] = {True: [], False: []}
    seconds = []
    counted = named["round"][2:]
    for (_, end), (start, _) in pairwise(counted):
        inside = [b - a for a, b in named["checkpoint"] if end <= a < start]
        gaps[bool(inside)].append(start - end - sum(inside))
        seconds += inside
    return {
        "checkpoint_s": seconds,
        "gaps": gaps,
        "whole_s": counted[-1][0] - counted[0][1],
        "write_s": own_write_s(size),
        "bytes": size,
        "rounds": len(counted) - 1,
    }


def costs(found: dict[int, dict[str, Any]]) -> dict[int, dict[str, float]]:
    plain = statistics.median(found[max(EVERY)]["gaps"][False])
    noted = statistics.median(found[min(EVERY)]["gaps"][True])
    result = {}
    for every, run in found.items():
        total = sum(run["checkpoint_s"]) + len(run["checkpoint_s"]) * max(0.0, noted - plain)
        result[every] = {
            "share": total / run["whole_s"],
            "checkpoint_s": statistics.median(run["checkpoint_s"]),
            "gap_added_s": noted - plain,
            "write_and_fsync_s": run["write_s"],
            "bytes": run["bytes"],
            "round_s": run["whole_s"] / run["rounds"],
        }
    return result


def own_write_s(size: int) -> float:
    """Median of 20 files."""
    content = os.urandom(size)
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        for i in range(20):
            start = time.perf_counter()
            with (Path(directory) / str(i)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def shown(result: dict[str, float]) -> str:
    return (
        f"{result['share']:.1%} of wall-clock; {result['checkpoint_s'] * 1e3:.0f} ms each + "
        f"{result['gap_added_s'] * 1e3:.0f} ms of the gap, rounds of {result['round_s'] * 1e3:.0f} "
        f"ms; the machine's own write + fsync of {result['bytes'] / 1e6:.1f} MB "
        f"{result['write_and_fsync_s'] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    run_benchmark(main)
