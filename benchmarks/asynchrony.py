"""Does asynchrony pay? Lag 1 against colocated at equal samples, threads chosen per stage.

Every workload runs `async_k1` (generator and learner with one thread each) and `colocated_k1` with
one or two threads for sampling and for training, one after the other, `--repeats` times over. The
balanced workloads keep both sides of the asynchronous run about equally busy, with responses of
fixed length so that the balance does not move while the policy learns; `default` is the default
workload as it is, and `one_prompt` has a single prompt a round.

Reported: wall-clock a round (from the start of round 3 to the end of the last, Tune's gaps
included, evaluation and checkpoints subtracted), the speed-up over each colocated setting of the
same repeat, and how much of the bound that its own stages set it the asynchronous run reaches:
(generator + learner) / max(generator, learner) over (generator + learner) / wall-clock.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS, provenance, write
from overlap import summarise
from trials import run_trial

ASYNC, COLOCATED_1 = "async", "colocated 1+1"
ONE_THREAD, TWO_THREADS = "0.95", "1.9"  # CPUs that buy them


def colocated(sampling: str, training: str) -> list[str]:
    """`--set` options of a colocated worker with so many CPUs for each."""
    return [f"resources.generator_cpus={sampling}", f"resources.worker_cpus={training}"]


# Label -> the arm of async_vs_sync and what is set. n+m: threads for sampling + for training.
ARMS: dict[str, tuple[str, list[str]]] = {
    ASYNC: ("async_k1", []),
    COLOCATED_1: ("colocated_k1", colocated(ONE_THREAD, ONE_THREAD)),
    "colocated 1+2": ("colocated_k1", colocated(ONE_THREAD, TWO_THREADS)),
    "colocated 2+1": ("colocated_k1", colocated(TWO_THREADS, ONE_THREAD)),
    "colocated 2+2": ("colocated_k1", colocated(TWO_THREADS, TWO_THREADS)),
}


def fixed_length(tokens: int) -> list[str]:
    return [f"rollout.min_new_tokens={tokens}", f"rollout.max_new_tokens={tokens}"]


WORKLOADS: dict[str, tuple[int, list[str]]] = {  # rounds, what is set
    "tiny": (20, ["rollout.prompts=40", "rollout.unit_prompts=8", *fixed_length(60)]),
    "small": (
        14,
        [
            *("model.preset=small", "rollout.prompts=16", "rollout.unit_prompts=4"),
            *fixed_length(48),
        ],
    ),
    "default": (24, []),
    "one_prompt": (64, ["rollout.prompts=1"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=3, help="of every run, in turn (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat (0)")
    parser.add_argument("--out", type=Path, default=RESULTS / "asynchrony.json", help="JSON file")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for workload in args.workloads:
        rounds, settings = WORKLOADS[workload]
        print(f"{workload}: {rounds} rounds, {' '.join(settings) or 'the default settings'}")
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
        for repeat in range(args.repeats):
            for label in args.arms:
                arm, resources = ARMS[label]
                options = ["--iterations", str(rounds), "--checkpoint-every", str(rounds)]
                for assignment in (f"eval.every={rounds}", *settings, *resources):
                    options += ["--set", assignment]
                rows = run_trial(arm, seed=args.seed + repeat, options=options)
                runs[label].append(summarise(rows))
                print(f"  repeat {repeat} {show(label, runs[label][-1])}", flush=True)
        results[workload] = {
            "rounds": rounds,
            "settings": settings,
            "runs": runs,
            **(compared(runs) if ASYNC in runs else {}),
        }
        print(conclusion(results[workload]), flush=True)
    write(args.out, {**provenance(args), "workload": results})


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the repeats; a speed-up compares runs of the same repeat."""
    wall = {arm: [run["wall_clock_s"] for run in results] for arm, results in runs.items()}
    speed_ups = {
        arm: [slow / fast for slow, fast in zip(wall[arm], wall[ASYNC], strict=True)]
        for arm in wall
        if arm != ASYNC
    }
    of_bound = [1 / run["wall_clock_over_longer_side"] for run in runs[ASYNC]]
    medians = {arm: statistics.median(values) for arm, values in speed_ups.items()}
    best = min(medians, key=lambda arm: medians[arm], default=None)
    return {
        "share_of_bound": of_bound,
        "share_of_bound_median": statistics.median(of_bound),
        "speed_ups": speed_ups,
        "speed_up_medians": medians,
        "best_colocated": best,
    }


def show(label: str, run: dict[str, float]) -> str:
    return (
        f"{label:<13} {run['wall_clock_s']:.3f} s a round; generator {run['generator_s']:.3f} s, "
        f"learner {run['learner_s']:.3f} s"
    )


def conclusion(result: dict[str, Any]) -> str:
    if "share_of_bound" not in result:
        return ""
    lines = [f"  async reaches {result['share_of_bound_median']:.1%} of the bound of its stages"]
    for arm, median in result["speed_up_medians"].items():
        values = result["speed_ups"][arm]
        lines.append(
            f"  {median:.2f} x {arm} ({min(values):.2f}-{max(values):.2f})"
            + (" (the best colocated)" if arm == result["best_colocated"] else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
