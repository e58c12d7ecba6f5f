"""Does asynchrony pay? Lag 1 against synchronous and colocated runs at equal samples.

Every workload runs `async_k1` (generator and learner with one thread each), `sync` (the same two
actors at lag 0) and `colocated_k1` with one or two threads for sampling and for training, one after
the other in an order drawn from the seed, `--repeats` times over. In the balanced workloads, `tiny`
and `small`, both sides of the asynchronous run are about equally busy; `default` is the default
workload as it is; `one_prompt` has a single prompt a round.

Wall-clock is a mean over the rounds, Tune's gaps included, evaluation and checkpoints subtracted,
without those that other work on the machine disturbed; a run in which these are more than half is
done again. Stages are means over the same rounds but for the last, in which an asynchronous run has
nothing left to sample. Reported: the speed-up over each other arm of the same repeat, its
geometric mean over the repeats with Student's interval, and how much of the bound that its own
stages set it the asynchronous run reaches, which is max(generator, learner) / wall-clock, where the
generator's part is rollout + reward and the learner's optimize + reference + sync.

`async, reference in generator` is the same asynchronous run with `resources.reference=generator`,
where the workload measures a KL; its `reference` adds up both sides.

The JSON is written after every run, and the same command goes on with what it has unless commit or
options have changed since.
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
ONE_THREAD, TWO_THREADS = "0.95", "1.9"  # CPUs that buy them


def colocated(sampling: str, training: str) -> tuple[str, list[str]]:
    """A colocated worker with so many CPUs for each."""
    cpus = [f"resources.generator_cpus={sampling}", f"resources.worker_cpus={training}"]
    return "colocated_k1", cpus


# Label -> the arm of async_vs_sync and what is set. n+m: threads for sampling + for training.
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
# The small preset has random weights, which never end a response: all have one length.
WORKLOADS: dict[str, tuple[int, list[str]]] = {  # rounds, what is set
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
    """The options of launch/tune.py: the workload, evaluated and saved at its ends alone."""
    rounds, own = WORKLOADS[workload]
    words = ["--iterations", str(rounds), "--checkpoint-every", str(rounds)]
    for assignment in (f"eval.every={rounds}", *own, *settings):
        words += ["--set", assignment]
    return words


TRIES = 3  # of a run that other work on the machine disturbs


def main() -> None:
    parser = parser_of(__doc__, "asynchrony.json", counts={"repeats": (3, "of every run, in turn")})
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    args = parser.parse_args()
    origin, kept = provenance(args), read(args.out)
    results: dict[str, Any] = kept["workload"] if same_run(kept, origin, "seed") else {}
    for workload in args.workloads:
        rounds, settings = WORKLOADS[workload]
        print(f"{workload}: {rounds} rounds, {' '.join(settings) or 'the default settings'}")
        labels = [label for label in ARMS if label != MOVED or NO_KL not in settings]
        empty = {label: [] for label in labels}
        result = results.setdefault(
            workload, {"rounds": rounds, "settings": settings, "runs": empty}
        )
        for repeat in range(args.repeats):
            for label in drawn_order(labels, workload, args.seed + repeat):
                if len(result["runs"][label]) > repeat:
                    continue  # an earlier command has done it
                result["runs"][label].append(undisturbed(workload, label, args.seed + repeat))
                print(f"  repeat {repeat} {show(label, result['runs'][label][-1])}", flush=True)
                write(args.out, {**origin, "workload": results}, quiet=True)
        result.update(compared(result["runs"]))
        write(args.out, {**origin, "workload": results}, quiet=True)
        print(conclusion(result), flush=True)
    print(f"\nwritten to {args.out}")


def drawn_order(labels: Sequence[str], workload: str, seed: int) -> list[str]:
    """The arms in the order of a repeat, so that drift of the machine falls on none of them."""
    return Random(f"{workload} {seed}").sample(labels, len(labels))


def undisturbed(workload: str, label: str, seed: int) -> dict[str, float]:
    """The figures of a run, done again where other work disturbed more than half of its rounds."""
    arm, resources = ARMS[label]
    for _ in range(TRIES):
        found = summarise(run_trial(arm, seed=seed, options=options(workload, resources)))
        if found is not None:
            return found
        print(f"  {label}: disturbed by other work, once more", flush=True)
    raise TrialFailed(f"{workload}, {label}: disturbed {TRIES} times; is the machine in use?")


def summarise(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Seconds a round; the share of `time/other_s` is a median over the rounds. None where most of
    the rounds were disturbed."""
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
    """Geometric means over the repeats; a speed-up is between runs of the same repeat."""
    wall = {arm: [run["wall_clock_s"] for run in results] for arm, results in runs.items()}
    speed_ups = {
        arm: [slow / fast for slow, fast in zip(wall[arm], wall[ASYNC], strict=True)]
        for arm in wall
        if arm != ASYNC
    }
    means = {arm: geometric_mean(values) for arm, values in speed_ups.items()}
    rivals = [arm for arm in means if arm.startswith("colocated")]
    # 1: the shorter side is hidden behind the longer altogether.
    of_bound = [max(r["generator_s"], r["learner_s"]) / r["wall_clock_s"] for r in runs[ASYNC]]
    return {
        "share_of_bound": of_bound,
        "share_of_bound_median": statistics.median(of_bound),
        "speed_ups": speed_ups,
        "speed_up_means": means,
        "best_colocated": min(rivals, key=lambda arm: means[arm]["value"], default=None),
    }


def geometric_mean(ratios: Sequence[float]) -> dict[str, float | None]:
    """The mean of the logarithms with Student's interval, which one repeat does not have."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return {"value": ratios[0], "low": None, "high": None}
    estimate, _ = over_seeds(logs)
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: math.exp(end) for name, end in ends.items()}


def show(label: str, run: dict[str, float]) -> str:
    return (
        f"{label:<29} {run['wall_clock_s']:.3f} s a round; generator {run['generator_s']:.3f} s, "
        f"learner {run['learner_s']:.3f} s, other {run['other_share']:.1%} of the step"
    )


def conclusion(result: dict[str, Any]) -> str:
    lines = [f"  async reaches {result['share_of_bound_median']:.1%} of the bound of its stages"]
    for arm, mean in result["speed_up_means"].items():
        best = ", the best colocated" if arm == result["best_colocated"] else ""
        between = "" if mean["low"] is None else f" ({mean['low']:.2f}-{mean['high']:.2f})"
        lines.append(f"  {mean['value']:.2f} x {arm}{between}{best}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_benchmark(main)
