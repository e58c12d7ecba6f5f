"""What part of a round weights are on their way, with the transport that `auto` picks and others.

Synchronous trials, where a round waits for its weights, and asynchronous ones, of the default
settings and of the `small` preset, one transport after the other. The share of a round is
`time/sync_s` (in the learner the snapshot and its checksum, in the generator the fetching, the
checksum and the exchange; both added up) over the round's length, Tune's gap included.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from asynchrony import WORKLOADS, options
from measure import parser_of, provenance, run_benchmark, write
from trial_runs import run_trial

ARMS = ("sync", "async_k1")
BOUNDS = {"default": 0.02, "small": 0.01}  # largest share of a round with `auto`


def main() -> None:
    parser = parser_of(
        __doc__, "sync_share.json", counts={"repeats": (2, "of every trial, in turn")}
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(BOUNDS))
    parser.add_argument("--transports", nargs="+", default=["auto", "object_store", "gloo"])
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for workload in args.workloads:
        shares: dict[str, list[float]] = {}
        for repeat in range(args.repeats):
            for arm in ARMS:
                for transport in args.transports:
                    setting = [f"transport={transport}"]
                    rows = run_trial(
                        arm, seed=args.seed + repeat, options=options(workload, setting)
                    )
                    shares.setdefault(f"{arm} {transport}", []).extend(shares_of(rows))
        results[workload] = {
            name: {"median": statistics.median(own), "largest": max(own), "rounds": len(own)}
            for name, own in shares.items()
        }
        for name, own in results[workload].items():
            print(
                f"{workload:<8} {name:<22} {100 * own['median']:.2f} % of a round (largest "
                f"{100 * own['largest']:.2f} %, {own['rounds']} rounds)",
                flush=True,
            )
    write(args.out, {**provenance(args), "bounds": BOUNDS, "share": results})


def shares_of(rows: list[dict[str, Any]]) -> list[float]:
    """The share of every counted round but the first."""
    return [
        row["time/sync_s"] / (row["time/wall_clock_s"] - before["time/wall_clock_s"])
        for before, row in pairwise(rows)
    ]


if __name__ == "__main__":
    run_benchmark(main)
