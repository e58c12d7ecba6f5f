"""Does GRPO learn by the default settings, and does the policy keep its language?

Runs the arms of `async_vs_sync` with one gradient step a round, each with several seeds. Reports
the held-out inclusion rate before and after, the responses' mean negative log-likelihood under the
reference (mean of the last 8 rounds, beside that of the first), and the largest lag.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS, provenance, write
from trials import overhead, run_trial

ARMS = ("colocated_k1", "sync", "async_k1")
LAST_ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="of every arm (3)")
    parser.add_argument("--seed", type=int, default=0, help="the first (0)")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="to run (those with k=1)")
    parser.add_argument("--lr", type=float, help="learning rate (the default)")
    parser.add_argument("--out", type=Path, default=RESULTS / "learning.json", help="JSON file")
    args = parser.parse_args()
    options = [] if args.lr is None else ["--set", f"optim.lr={args.lr}"]
    trials = []
    for seed in range(args.seed, args.seed + args.seeds):
        for arm in args.arms:
            rows = run_trial(arm, seed=seed, options=options)
            trials.append({"arm": arm, "seed": seed, **summarise(rows)})
            print(show(trials[-1]), flush=True)
    workload = {"space": "async_vs_sync", "options": options, "rounds": trials[0]["rounds"]}
    write(args.out, {**provenance(args), "workload": workload, "trials": trials})


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    nll = [row["response/reference_nll_nats"] for row in rows]
    return {
        "rounds": len(rows),
        "samples": rows[-1]["count/trained"] * 4,
        "held_out": {int(row["eval/round"]): row["reward/eval_mean"] for row in rows},
        "first": rows[0]["reward/eval_first"],
        "last": rows[-1]["reward/eval_mean"],
        "reference_nll_first": nll[0],
        "reference_nll_last": statistics.mean(nll[-LAST_ROUNDS:]),
        "wall_clock_s": rows[-1]["time/wall_clock_s"],
        **overhead(rows),
    }


def show(trial: dict[str, Any]) -> str:
    return (
        f"{trial['arm']:<13} seed {trial['seed']}: held-out {trial['first']:.3f} -> "
        f"{trial['last']:.3f}, reference NLL {trial['reference_nll_first']:.2f} -> "
        f"{trial['reference_nll_last']:.2f} nats a token, largest lag {trial['largest_lag']:.0f}, "
        f"wall-clock {trial['wall_clock_s']:.1f} s, other {trial['other_share']:.1%} of a step"
    )


if __name__ == "__main__":
    main()
