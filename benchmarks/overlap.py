"""Does asynchronous training overlap? Wall-clock of a round against its two sides' own stages.

Runs `sync` and `async_k1` one after the other on the same workload, both sides with one thread,
and compares wall-clock a round (from the start of round 3 to the end of the last, Tune's gaps
included, evaluation and checkpoints subtracted) with what the actors' clocks say: the generator's
rollout + reward and the learner's optimize + reference + sync. Perfect overlap takes as long as the
longer side. In the synchronous run the share of `time/other_s` is reported as well.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS, provenance, write
from trials import counted_rows, overhead, run_trial

GENERATOR = ("time/rollout_s", "time/reward_s")
LEARNER = ("time/optimize_s", "time/reference_s", "time/sync_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="of each run (24)")
    parser.add_argument("--prompts", type=int, default=40, help="of a rollout batch (40)")
    parser.add_argument("--unit-prompts", type=int, default=8, help="sampled together (8)")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="of a response (60)")
    parser.add_argument("--repeats", type=int, default=3, help="of both runs, in turn (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat (0)")
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap.json", help="JSON file")
    args = parser.parse_args()
    options = [
        *("--iterations", str(args.rounds), "--set", f"rollout.prompts={args.prompts}"),
        *("--set", f"rollout.unit_prompts={args.unit_prompts}"),
        *("--set", f"rollout.max_new_tokens={args.max_new_tokens}"),
        *("--set", f"eval.every={args.rounds}"),
    ]
    runs: dict[str, list[dict[str, float]]] = {"sync": [], "async_k1": []}
    for repeat in range(args.repeats):
        for arm, results in runs.items():
            rows = run_trial(arm, seed=args.seed + repeat, options=options)
            results.append(summarise(rows))
            print(f"repeat {repeat} {arm:<9} {show(results[-1])}", flush=True)
    print()
    for arm, results in runs.items():
        middle = {key: statistics.median(r[key] for r in results) for key in results[0]}
        print(f"median   {arm:<9} {show(middle)}")
    workload = {
        "rounds": args.rounds,
        "prompts": args.prompts,
        "unit_prompts": args.unit_prompts,
        "responses_per_prompt": 4,
        "max_new_tokens": args.max_new_tokens,
        "threads_per_side": 1,
    }
    write(args.out, {**provenance(args), "workload": workload, "runs": runs})


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds a round, means over rounds 3 to the last; shares are medians over the rounds."""
    counted = counted_rows(rows)
    generator = statistics.mean(sum(row[key] for key in GENERATOR) for row in counted)
    learner = statistics.mean(sum(row[key] for key in LEARNER) for row in counted)
    wall_clock = rows[-1]["time/wall_clock_s"] / len(counted)
    return {
        "generator_s": generator,
        "learner_s": learner,
        "wall_clock_s": wall_clock,
        "wall_clock_over_longer_side": wall_clock / max(generator, learner),
        "wall_clock_over_sum": wall_clock / (generator + learner),
        **overhead(rows),
    }


def show(result: dict[str, float]) -> str:
    seconds = ", ".join(
        f"{name} {result[f'{name}_s']:.3f} s" for name in ("generator", "learner", "wall_clock")
    )
    return (
        f"{seconds} = {result['wall_clock_over_longer_side']:.3f} x the longer side; "
        f"other {result['other_share']:.1%} of the step; lag {result['largest_lag']:.0f}"
    )


if __name__ == "__main__":
    main()
