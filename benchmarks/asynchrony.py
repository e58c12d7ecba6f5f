"""Does asynchrony pay?

Compares runs at lag 1 with synchronous and colocated runs that have the same sample count.

In every workload, these arms run one after the other, `--repeats` times, in a random order that the
seed determines:

- `async_k1`: generator and learner with one thread each;
- `sync`: the same two actors at lag 0;
- `colocated_k1` with one or two threads for sampling and for training;
- `async, reference in generator`, if the workload measures a KL: the asynchronous run with
  `resources.reference=generator`. The time of the stage `reference` is the sum over the generator
  and the learner.

In the balanced workloads, `tiny` and `small`, the generator and the learner of the asynchronous run
are about equally busy. `default` is the default workload. `one_prompt` has a single prompt in each
round.

The wall-clock time is a mean over rounds. This time includes Tune's work between rounds, but no
evaluations or checkpoints. Rounds that were disturbed by other work on the machine are left out. If
more than half of the rounds were disturbed, the run is repeated. Stage times are means over the
undisturbed rounds except the last, because an asynchronous run samples nothing in its last round.

For each other arm, the result contains the speed-up of the asynchronous run in each repeat, and the
geometric mean over the repeats with Student's interval. The result also contains max(generator,
learner) / wall-clock, which is the speed of the asynchronous run as a share of its maximum speed.
In this formula, `generator` is the time of the stages rollout and reward, and `learner` is the time
of the stages optimize, reference and sync.

The JSON is written after every run. If a benchmark is interrupted, the same command continues it,
unless the commit or the seed has changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

from measure import (
    TrialFailed,
    overhead,
    parser_of,
    provenance,
    read,
    run_benchmark,
    run_trial,
    same_run,
    write,
)

from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE
from reports.intervals import over_seeds

GENERATOR = ("rollout", "reward")
LEARNER = ("optimize", "reference", "sync")
ONE_THREAD, TWO_THREADS = "0.95", "1.9"  # CPUs that give an actor one or two threads


def colocated(sampling: str, training: str) -> tuple[str, list[str]]:
    """Return the arm and settings of a colocated worker, given its CPUs for each role."""
    cpus = [f"resources.generator_cpus={sampling}", f"resources.worker_cpus={training}"]
    return "colocated_k1", cpus


# Label -> arm of async_vs_sync, settings. n+m: threads for sampling + threads for training.
ASYNC = "async"
MOVED = "async, reference in generator"
ARMS: dict[str, tuple[str, list[str]]] = {
    ASYNC: ("async_k1", []),
    MOVED: ("async_k1", ["resources.reference=generator"]),
    "sync": ("sync", []),
    "colocated 1+1": colocated(ONE_THREAD, ONE_THREAD),
    "colocated 1+2": colocated(ONE_THREAD, TWO_THREADS),
    "colocated 2+1": colocated(TWO_THREADS, ONE_THREAD),
    "colocated 2+2": colocated(TWO_THREADS, TWO_THREADS),
}
NO_KL = "loss.kl_monitor=false"
# The small preset has random weights, so its workload sets the length of every response to 48.
WORKLOADS: dict[str, tuple[int, list[str]]] = {  # rounds, settings
    "tiny": (20, ["rollout.prompts=40", "rollout.unit_prompts=4"]),
    "small": (
        16,
        [
            *("model.preset=small", "rollout.prompts=16", "rollout.unit_prompts=2"),
            *("rollout.min_new_tokens=48", "rollout.max_new_tokens=48", NO_KL),
        ],
    ),
    "default": (24, []),
    "one_prompt": (64, ["rollout.prompts=1"]),
}


def options(workload: str, settings: Sequence[str]) -> list[str]:
    """Return options of launch/tune.py for a run without evaluations or checkpoints on the way."""
    rounds, own = WORKLOADS[workload]
    words = ["--iterations", str(rounds), "--checkpoint-every", str(rounds)]
    for assignment in (f"eval.every={rounds}", *own, *settings):
        words += ["--set", assignment]
    return words


TRIES = 3  # maximum number of tries if other work on the machine disturbs a run


def main() -> None:
    parser = parser_of(
        __doc__, "asynchrony.json", counts={"repeats": (3, "number of repeats of every run")}
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    if ASYNC not in args.arms:
        parser.error(f"--arms: the other arms are compared with {ASYNC}, so add it")
    origin, kept = provenance(args), read(args.out)
    results: dict[str, Any] = kept["workload"] if same_run(kept, origin, "seed") else {}
    for workload in args.workloads:
        rounds, settings = WORKLOADS[workload]
        print(f"{workload}: {rounds} rounds, {' '.join(settings) or 'the default settings'}")
        labels = [label for label in args.arms if label != MOVED or NO_KL not in settings]
        result = results.setdefault(workload, {"rounds": rounds, "settings": settings, "runs": {}})
        for label in labels:
            result["runs"].setdefault(label, [])
        for repeat in range(args.repeats):
            for label in drawn_order(labels, workload, args.seed + repeat):
                if len(result["runs"][label]) > repeat:
                    continue  # an earlier command has completed this run
                result["runs"][label].append(undisturbed(workload, label, args.seed + repeat))
                print(f"  repeat {repeat} {show(label, result['runs'][label][-1])}", flush=True)
                write(args.out, {**origin, "workload": results}, quiet=True)
        result.update(compared(result["runs"]))
        write(args.out, {**origin, "workload": results}, quiet=True)
        print(conclusion(result), flush=True)
    print(f"\nwritten to {args.out}")


def drawn_order(labels: Sequence[str], workload: str, seed: int) -> list[str]:
    """Return the arms in random order, so a drift of the machine's speed favours none of them."""
    return Random(f"{workload} {seed}").sample(labels, len(labels))


def undisturbed(workload: str, label: str, seed: int) -> dict[str, float]:
    """Run an arm, and return its figures. Retry if other work disturbed most of the rounds."""
    arm, resources = ARMS[label]
    for _ in range(TRIES):
        found = summarise(run_trial(arm, seed=seed, options=options(workload, resources)))
        if found is not None:
            return found
        print(f"  {label}: disturbed by other work; running it again", flush=True)
    raise TrialFailed(f"{workload}, {label}: disturbed {TRIES} times; stop other work and retry")


def summarise(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the figures of a run, or None if most of its rounds were disturbed.

    Seconds are means per round. `other_share` is the median share of `time/other_s` in a round.
    """
    ends = [0.0, *(row["time/wall_clock_s"] for row in rows)]
    seconds = [end - begin for begin, end in pairwise(ends)]
    clean = [row["time/disturbed_fraction"] <= DISTURBED_ABOVE for row in rows]
    if 2 * sum(clean) < len(rows):
        return None
    whole = [row for row, is_clean in zip(rows[:-1], clean, strict=False) if is_clean]
    stages = {
        stage: statistics.mean(row[f"time/{stage}_s"] for row in whole)
        for stage in (*GENERATOR, *LEARNER)
    }
    return {
        **{f"{stage}_s": value for stage, value in stages.items()},
        "generator_s": sum(stages[stage] for stage in GENERATOR),
        "learner_s": sum(stages[stage] for stage in LEARNER),
        "wall_clock_s": statistics.mean(s for s, ok in zip(seconds, clean, strict=True) if ok),
        "disturbed_rounds": len(rows) - sum(clean),
        "disturbed_fraction": statistics.mean(row["time/disturbed_fraction"] for row in rows),
        **overhead(rows),
    }


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Compare the arms. Speed-ups are computed per repeat and averaged geometrically."""
    wall = {arm: [run["wall_clock_s"] for run in results] for arm, results in runs.items()}
    speed_ups = {
        arm: [slow / fast for slow, fast in zip(wall[arm], wall[ASYNC], strict=True)]
        for arm in wall
        if arm != ASYNC
    }
    means = {arm: geometric_mean(values) for arm, values in speed_ups.items()}
    rivals = [arm for arm in means if arm.startswith("colocated")]
    # A share of 1 means that a round takes only as long as the slower of generator and learner.
    of_bound = [max(r["generator_s"], r["learner_s"]) / r["wall_clock_s"] for r in runs[ASYNC]]
    return {
        "share_of_bound": of_bound,
        "share_of_bound_median": statistics.median(of_bound),
        "speed_ups": speed_ups,
        "speed_up_means": means,
        "best_colocated": min(rivals, key=lambda arm: means[arm]["value"], default=None),
    }


def geometric_mean(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the geometric mean with Student's interval; a single repeat has no interval."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return {"value": ratios[0], "low": None, "high": None}
    estimate, _ = over_seeds(logs)
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: math.exp(end) for name, end in ends.items()}


def show(label: str, run: dict[str, float]) -> str:
    return (
        f"{label:<29} {run['wall_clock_s']:.3f} s per round; generator {run['generator_s']:.3f} s, "
        f"learner {run['learner_s']:.3f} s, other {run['other_share']:.1%} of the step"
    )


def conclusion(result: dict[str, Any]) -> str:
    lines = [f"  async reaches {result['share_of_bound_median']:.1%} of the speed its stages allow"]
    for arm, mean in result["speed_up_means"].items():
        best = ", the best colocated arm" if arm == result["best_colocated"] else ""
        between = "" if mean["low"] is None else f" ({mean['low']:.2f}-{mean['high']:.2f})"
        lines.append(f"  {mean['value']:.2f} x as fast as {arm}{between}{best}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_benchmark(main)
