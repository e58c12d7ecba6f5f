"""Does the simulated schedule take as long as real trials?

The simulation (grpo_trainable/simulation/) uses the real pipeline, gate, replay buffer and learner
group, but its actors compute nothing and only let time pass. This benchmark runs trials, reads the
duration of each call from their traces, and simulates the wall-clock time of a round in two ways:

own          with the times of the run itself, in their original order
predicted    with only the times of the synchronous run of the same repeat (in that run, nothing
             overlaps, and there is one generator and one pass over each batch)

The learning rate is almost 0, because a policy that learns would write shorter responses in some
arms than in others.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynchrony import ARMS, WORKLOADS, options
from measure import (
    finished_trial,
    parser_of,
    provenance,
    rows_of,
    run_benchmark,
    write,
)

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.calibration import Times, simulated_wall_clock, times_of

CALIBRATION = "sync"  # the run whose times predict the other runs

STILL = "optim.lr=1e-9"

# Label -> arm of async_vs_sync, settings in addition to those of the balanced workload `tiny`.
VALIDATED: dict[str, tuple[str, list[str]]] = {
    CALIBRATION: ("sync", []),
    "sync, 2 generators": ("sync", ["resources.num_generators=2"]),
    "colocated": ARMS["colocated 1+1"],
    "lag 1": ("async_k1", []),
    "lag 1, in flight": ("async_k1", ["weight_update=in_flight"]),
    "lag 4, k=2": ("async_k1", ["lag=4", "k=2", "k_mode=same_batch"]),
}


def validate(repeats: int, seed: int) -> list[dict[str, Any]]:
    results = []
    for repeat in range(repeats):
        sync: Times | None = None
        for label, (arm, more) in VALIDATED.items():
            words = options("tiny", [STILL, *more])
            with finished_trial(arm, seed=seed + repeat, options=words) as directory:
                config = GRPOConfig.from_dict(json.loads((directory / "params.json").read_text()))
                events = json.loads((directory / "trace.json").read_text())
                times = times_of(rows_of(directory), events)
                measured = wall_clock_of(directory)
            sync = times if label == CALIBRATION else sync
            assert sync is not None
            own = times if times.hop_s else replace(times, hop_s=sync.hop_s)
            # Calls that load weights before the first round are not in the trace. If this run lacks
            # times for a kind of call, they come from the synchronous run. This includes the calls
            # of a colocated worker.
            own = replace(own, calls={**sync.calls, **own.calls})
            simulated = {
                "own": simulated_wall_clock(config, own),  # an update's time contains all passes
                "predicted": simulated_wall_clock(config, sync, passes=config.k),
            }
            errors = {how: seconds / measured - 1.0 for how, seconds in simulated.items()}
            results.append(
                {
                    "run": label,
                    "repeat": repeat,
                    "measured_s": measured,
                    "simulated_s": simulated,
                    "error": errors,
                    "hop_s": own.hop_s,
                    "gap_s": own.gap_s,
                }
            )
            print(
                f"repeat {repeat} {label:<19} {measured:.3f} s per round; simulated with its own "
                f"times {simulated['own']:.3f} s ({errors['own']:+.1%}), predicted from the "
                f"synchronous run {simulated['predicted']:.3f} s ({errors['predicted']:+.1%})",
                flush=True,
            )
    return results


def wall_clock_of(directory: Path) -> float:
    """Return the seconds per round."""
    rows = rows_of(directory)
    return rows[-1]["time/wall_clock_s"] / len(rows)


def main() -> None:
    parser = parser_of(
        __doc__, "schedule_sim.json", counts={"repeats": (3, "number of repeats of every trial")}
    )
    args = parser.parse_args()
    rounds, settings = WORKLOADS["tiny"]
    runs = validate(args.repeats, args.seed)
    worst = largest_errors(runs)
    for how, errors in worst.items():
        print(
            f"{how}: largest error of a median {errors['of_medians']:.1%}, of a single run "
            f"{errors['of_runs']:.1%}"
        )
    about = {"workload": {"rounds": rounds, "settings": [*settings, STILL]}}
    found = {"runs": runs, "medians": medians(runs), "largest_errors": worst}
    write(args.out, {**provenance(args), **about, **found})


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median seconds over the repeats, and the errors of these medians."""
    result = []
    for label in dict.fromkeys(run["run"] for run in runs):
        own = [run for run in runs if run["run"] == label]
        measured = statistics.median(run["measured_s"] for run in own)
        simulated = {
            how: statistics.median(run["simulated_s"][how] for run in own)
            for how in own[0]["simulated_s"]
        }
        errors = {how: seconds / measured - 1.0 for how, seconds in simulated.items()}
        result.append(
            {"run": label, "measured_s": measured, "simulated_s": simulated, "error": errors}
        )
    return result


def largest_errors(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the largest errors. The errors of predictions exclude the calibration run."""
    result = {}
    for how in ("own", "predicted"):
        judged = [run for run in runs if how == "own" or run["run"] != CALIBRATION]
        result[how] = {
            "of_medians": max(abs(run["error"][how]) for run in medians(judged)),
            "of_runs": max(abs(run["error"][how]) for run in judged),
        }
    return result


if __name__ == "__main__":
    run_benchmark(main)
