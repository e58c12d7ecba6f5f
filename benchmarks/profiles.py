"""Where the seconds of a step and of sampling go, by kind of operation.

The works are those of `peers.py` on our side. Each runs in a process of its own for each number of
threads: some turns are timed as they are, then as many under torch's profiler, which adds up what
each operation took by itself. Matrix products are set beside the time that their floating-point
operations would take at the machine's peak, which is the floor that `peers.py` speaks of; what the
profiler did not see in any operation is Python and dispatch. The limit is how fast this program
could be beside what it is if only one kind became free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import measure
import peers
import peers_ours
import train_step

WORKS = ("step", "kl", "generation")
TURNS, WARM_UP = 7, 3
LONGEST = 12
PRODUCTS, ATTENTION, REST, PYTHON = "products", "attention", "other operations", "Python"
# The operations of a kind, by how their names begin; the first that fits counts.
KINDS = {
    PRODUCTS: ("mm", "addmm", "mkldnn_linear", "mkl_linear"),
    ATTENTION: ("_scaled_dot_product", "bmm", "baddbmm", "_softmax"),
    "optimizer": ("_fused_adamw", "_foreach", "_adamw"),
    "norms": ("_fused_rms_norm", "rms_norm", "mean", "rsqrt"),
    "activation": ("silu",),
    "log-softmax": ("_log_softmax", "log_softmax", "logsumexp"),
    "copies": ("copy_", "cat", "index", "gather", "scatter", "constant_pad", "roll", "clone"),
    "additions and multiplications": ("add", "mul", "sub", "div", "sum", "where", "masked_fill"),
}


def main() -> None:
    args = measure.arguments(__doc__, "profiles.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    result = measure.provenance(args)
    rows = []
    for work in WORKS:
        for threads in measure.THREADS:
            rows.append(measure.in_fresh_process(args, work, threads))
            print(show(rows[-1]), flush=True)
    measure.write(args.out, {**result, "turns": TURNS, "results": rows})


def inside(args: argparse.Namespace) -> dict[str, Any]:
    """One row: the seconds of a turn, and what an average turn's seconds went to."""
    turn = turn_of(args)
    timing = measure.repeated(turn, repeats=TURNS, warm_up=WARM_UP)
    peak = measure.machine_peaks()["matmul_gflop_per_s"]
    wall, seconds, flop, operations = profiled(turn)
    seconds[PYTHON] = max(0.0, wall - sum(seconds.values()))
    return {
        "work": args.inside,
        "threads": args.threads,
        "seconds": {"median": statistics.median(timing.wall_s), "all": timing.wall_s},
        "profiled_s": wall,
        "by_kind_s": dict(seconds.most_common()),
        "peak_gflop_per_s": peak,
        "products_at_peak_s": flop / peak / 1e9,
        "products_share_of_peak": flop / peak / 1e9 / seconds[PRODUCTS],
        "limits": {kind: wall / (wall - spent) for kind, spent in seconds.items()},
        "longest_operations_s": dict(operations.most_common(LONGEST)),
    }


def turn_of(args: argparse.Namespace) -> Callable[[], None]:
    job = {
        "seed": args.seed,
        "prompts": peers.prompts(args),
        "group_size": measure.GROUP_SIZE,
        "microbatch": train_step.MICROBATCH,
        "max_new_tokens": measure.NEW_TOKENS,
        "temperature": 0.8,
    }
    make = peers_ours.sampling if args.inside == "generation" else peers_ours.steps
    return make(job, args.inside, float(args.threads))


def profiled(turn: Callable[[], None]) -> tuple[float, Counter[str], float, Counter[str]]:
    """An average turn's wall-clock, seconds by kind, floating-point operations of products, and
    seconds by operation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as found:
        began = time.perf_counter()
        for _ in range(TURNS):
            turn()
        wall = time.perf_counter() - began
    seconds: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    flop = 0.0
    for event in found.key_averages():
        kind = kind_of(event.key)
        operations[event.key] = event.self_cpu_time_total / 1e6 / TURNS
        seconds[kind] += operations[event.key]
        flop += event.flops / TURNS if kind == PRODUCTS else 0.0
    return wall / TURNS, seconds, flop, operations


def kind_of(operation: str) -> str:
    """The kind of an operation such as aten::mm, by its name."""
    name = operation.rpartition("::")[2]
    for kind, beginnings in KINDS.items():
        if name.startswith(beginnings):
            return kind
    return REST


def show(row: dict[str, Any]) -> str:
    spent = ", ".join(f"{kind} {s / row['profiled_s']:.0%}" for kind, s in row["by_kind_s"].items())
    return (
        f"{row['work']}, threads {row['threads']}: {row['seconds']['median']:.3f} s "
        f"({row['profiled_s']:.3f} s under the profiler): {spent}; products run at "
        f"{row['products_share_of_peak']:.0%} of the peak"
    )


if __name__ == "__main__":
    measure.run_benchmark(main)
