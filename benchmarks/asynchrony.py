"""Does asynchrony pay? Lag 1 against synchronous and colocated runs at equal samples.

Every workload runs `async_k1` (generator and learner with one thread each), `sync` (the same two
actors at lag 0) and `colocated_k1` with one or two threads for sampling and for training, one after
the other, `--repeats` times over. In the balanced workloads, `tiny` and `small`, both sides of the
asynchronous run are about equally busy; `default` is the default workload as it is; `one_prompt`
has a single prompt a round.

Wall-clock runs from the start of round 1 to the end of the last, Tune's gaps included, evaluation
and checkpoints subtracted. Stages are means over the same rounds but for the last, in which an
asynchronous run has nothing left to sample. Reported: the speed-up over each other arm of the same
repeat, and how much of the bound that its own stages set it the asynchronous run reaches, which is
max(generator, learner) / wall-clock, where the generator's part is rollout + reward and the
learner's optimize + reference + sync.

`async, reference in generator` is the same asynchronous run with `resources.reference=generator`,
where the workload measures a KL; its `reference` adds up both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from measure import parser_of, provenance, run_benchmark, write
from trials import overhead, run_trial

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


def main() -> None:
    parser = parser_of(__doc__, "asynchrony.json", counts={"repeats": (3, "of every run, in turn")})
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    if ASYNC not in args.arms:
        parser.error(f"--arms: must have {ASYNC}")
    results: dict[str, Any] = {}
    for workload in args.workloads:
        rounds, settings = WORKLOADS[workload]
        print(f"{workload}: {rounds} rounds, {' '.join(settings) or 'the default settings'}")
        labels = [label for label in args.arms if label != MOVED or NO_KL not in settings]
        runs: dict[str, list[dict[str, float]]] = {label: [] for label in labels}
        for repeat in range(args.repeats):
            for label in labels:
                arm, resources = ARMS[label]
                rows = run_trial(arm, seed=args.seed + repeat, options=options(workload, resources))
                runs[label].append(summarise(rows))
                print(f"  repeat {repeat} {show(label, runs[label][-1])}", flush=True)
        results[workload] = {
            "rounds": rounds,
            "settings": settings,
            "runs": runs,
            **compared(runs),
        }
        print(conclusion(results[workload]), flush=True)
    write(args.out, {**provenance(args), "workload": results})


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds a round; the share of `time/other_s` is a median over the rounds."""
    stages = {
        stage: statistics.mean(row[f"time/{stage}_s"] for row in rows[:-1])
        for stage in (*GENERATOR, *LEARNER)
    }
    return {
        **{f"{stage}_s": seconds for stage, seconds in stages.items()},
        "generator_s": sum(stages[stage] for stage in GENERATOR),
        "learner_s": sum(stages[stage] for stage in LEARNER),
        "wall_clock_s": rows[-1]["time/wall_clock_s"] / len(rows),
        **overhead(rows),
    }


def share_of_bound(run: dict[str, float]) -> float:
    """1: the shorter side is hidden behind the longer altogether."""
    return max(run["generator_s"], run["learner_s"]) / run["wall_clock_s"]


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the repeats; a speed-up is between runs of the same repeat."""
    wall = {arm: [run["wall_clock_s"] for run in results] for arm, results in runs.items()}
    speed_ups = {
        arm: [slow / fast for slow, fast in zip(wall[arm], wall[ASYNC], strict=True)]
        for arm in wall
        if arm != ASYNC
    }
    medians = {arm: statistics.median(values) for arm, values in speed_ups.items()}
    rivals = [arm for arm in medians if arm.startswith("colocated")]
    of_bound = [share_of_bound(run) for run in runs[ASYNC]]
    return {
        "share_of_bound": of_bound,
        "share_of_bound_median": statistics.median(of_bound),
        "speed_ups": speed_ups,
        "speed_up_medians": medians,
        "best_colocated": min(rivals, key=lambda arm: medians[arm], default=None),
    }


def show(label: str, run: dict[str, float]) -> str:
    return (
        f"{label:<29} {run['wall_clock_s']:.3f} s a round; generator {run['generator_s']:.3f} s, "
        f"learner {run['learner_s']:.3f} s, other {run['other_share']:.1%} of the step"
    )


def conclusion(result: dict[str, Any]) -> str:
    lines = [f"  async reaches {result['share_of_bound_median']:.1%} of the bound of its stages"]
    for arm, middle in result["speed_up_medians"].items():
        values = result["speed_ups"][arm]
        best = ", the best colocated" if arm == result["best_colocated"] else ""
        lines.append(f"  {middle:.2f} x {arm} ({min(values):.2f}-{max(values):.2f}){best}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_benchmark(main)
