"""What the schedule alone is worth: the pipeline in virtual time, for 1 to 64 generators.

Pipeline, gate, replay buffer and learner group are the product's own; actors only take their time
(grpo_trainable/simulation/). Three parts, each a part of the JSON:

validation   Runs trials on this machine, takes from the trace of each how long its calls took (a
             chunk of generation, an update, a publication, a load) and from its rows what the
             driver adds, and simulates wall-clock a round: from the run's own times in their
             order, and `predicted` from nothing but the synchronous run beside it, which knows
             nothing of overlap, of several generators or of more passes. The policy does not
             learn in them: one that does writes shorter responses in one arm than in another.
scaling      Weak scaling: every generator has `CHUNKS` chunks a round to sample, and the learner
             keeps pace with them (by as many devices as it takes), so that both sides are equally
             busy. Times of chunks are log-normal with mean 1 and the given σ: 0 is responses of
             one length, 1 a long tail. A publication and a load take as long for any number of
             generators: a transport that cannot do that does worse. Speed-up is over lag 0 with
             as many generators. The plot goes to docs/results.
reference    What `resources.reference=generator` should bring: the stages of the asynchronous runs
             in asynchrony.json, with the pass of the frozen reference, half of the stage
             `reference`, in the learner and in the generator; beside it what was measured there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynchrony import ARMS, MOVED, WORKLOADS, options
from measure import RESULTS, ROOT, parser_of, provenance, run_benchmark, same_run, write
from trial_runs import finished_trial, rows_of

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.calibration import Times, simulated_wall_clock, times_of
from grpo_trainable.simulation.runtime import Durations
from grpo_trainable.simulation.traces import EVALUATION, SYNC, UPDATE
from grpo_trainable.simulation.trial import simulate, wall_clock_a_round

PLOT = ROOT / "docs" / "results" / "schedule_sim.png"

# ---- Validation ------------------------------------------------------------------------------

CALIBRATION = "sync"  # the run that the predictions of the others stand on

STILL = "optim.lr=1e-9"

# Label -> arm of async_vs_sync, settings beside those of the balanced workload of `tiny`.
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
            # Loads before the first round leave no trace; those of a worker are in `sync` as well.
            own = replace(own, calls={**sync.calls, **own.calls})
            simulated = {
                "own": simulated_wall_clock(config, own),  # whose updates hold all their passes
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
                f"repeat {repeat} {label:<19} {measured:.3f} s a round; from its own times "
                f"{simulated['own']:.3f} s ({errors['own']:+.1%}), predicted from the synchronous "
                f"run {simulated['predicted']:.3f} s ({errors['predicted']:+.1%})",
                flush=True,
            )
    return results


def wall_clock_of(directory: Path) -> float:
    """Seconds a round."""
    rows = rows_of(directory)
    return rows[-1]["time/wall_clock_s"] / len(rows)


# ---- Scaling ---------------------------------------------------------------------------------

GENERATORS = tuple(2**n for n in range(0, 7, 2))
CHUNKS = 4  # a round for each generator, of mean length 1
SYNC_S = 0.02  # a publication or a load: one two-hundredth of a round's work
TAILS = (0.0, 0.5, 1.0)  # σ
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"lag": 0},
    "lag 1": {"lag": 1},
    "lag 1, in flight": {"lag": 1, "weight_update": "in_flight"},
    "lag 2": {"lag": 2},
    "lag 4": {"lag": 4},
    "lag 8": {"lag": 8},
}


def long_tailed(seed: int, sigma: float) -> Durations:
    """Mean 1 for a chunk: e^(σz − σ²/2)."""
    rng = random.Random(seed)
    fixed = {UPDATE: float(CHUNKS), SYNC: SYNC_S, EVALUATION: 0.0}

    def duration(actor: str, stage: str) -> float:
        if stage in fixed:
            return fixed[stage]
        return rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0

    return duration


def rounds_counted(generators: int) -> int:
    """Fewer where every round averages over more chunks."""
    return max(12, min(200, 3200 // generators))


def scale(count: int, sigma: float, seeds: int) -> dict[str, Any]:
    """A point of the plot for every schedule."""
    deepest = max(s["lag"] for s in SCHEDULES.values())
    walls: dict[str, list[float]] = {label: [] for label in SCHEDULES}
    lags: dict[str, list[float]] = {label: [] for label in SCHEDULES}
    # The first rounds fill the pipe, in the last there is nothing left to sample.
    counted = rounds_counted(count)
    for label, schedule in SCHEDULES.items():
        config = scaled_config(count, deepest + 2 + counted + deepest, schedule)
        # Seeds agree where a round has a thousand chunks.
        for seed in range(seeds if sigma and count < 256 else 1):
            reports = simulate(config, long_tailed(seed, sigma), seed=seed)
            window = reports[deepest + 2 : deepest + 2 + counted]
            walls[label].append(wall_clock_a_round(window))
            lags[label].append(statistics.fmean(report.metrics["lag/mean"] for report in window))
    speed_ups = {
        label: [base / wall for base, wall in zip(walls["sync"], walls[label], strict=True)]
        for label in SCHEDULES
    }
    return {
        "generators": count,
        "sigma": sigma,
        "rounds_counted": counted,
        "sync_round_s": statistics.median(walls["sync"]),
        "speed_ups": speed_ups,
        "speed_up_medians": {
            label: statistics.median(values) for label, values in speed_ups.items()
        },
        "mean_lag": {label: statistics.median(lags[label]) for label in lags},
    }


def scaled_config(generators: int, rounds: int, schedule: dict[str, Any]) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": rounds,
            "rollout": {
                "prompts": generators * CHUNKS,
                "unit_prompts": 1,
                "group_size": 1,
            },
            "loss": {"advantage": "none", "type": "no_baseline"},
            "eval": {"every": rounds, "prompts": 1, "samples": 1},
            "resources": {"num_generators": generators, "deadline_s": 1e9},
            **schedule,
        }
    )


# ---- The reference in the generator ----------------------------------------------------------


def reference_in_the_generator(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """`measured`: the workloads of asynchrony.json."""
    results = []
    for workload, found in measured.items():
        seconds = {
            name: statistics.median(run[f"{name}_s"] for run in found["runs"]["async"])
            for name in ("rollout", "reward", "optimize", "reference", "sync", "wall_clock")
        }
        sampling, training = seconds["rollout"] + seconds["reward"], seconds["optimize"]
        moved = seconds["reference"] / 2
        rounds = {
            "learner": lag_1_round_s(sampling, training + 2 * moved, seconds["sync"] / 2),
            "generator": lag_1_round_s(sampling + moved, training + moved, seconds["sync"] / 2),
        }
        gain = rounds["learner"] / rounds["generator"]
        measured_gain = None
        if MOVED in found["speed_ups"]:
            measured_gain = 1.0 / statistics.median(found["speed_ups"][MOVED])
        results.append(
            {
                "workload": workload,
                "stages": seconds,
                "round_s": rounds,
                "gain": gain,
                "measured_gain": measured_gain,
            }
        )
        seen = "not measured" if measured_gain is None else f"measured {measured_gain:.2f}x"
        print(
            f"{workload}: measured {seconds['wall_clock']:.3f} s a round, simulated "
            f"{rounds['learner']:.3f} s; with the reference in the generator "
            f"{rounds['generator']:.3f} s: {gain:.2f}x ({seen})"
        )
    return results


def lag_1_round_s(sampling_s: float, training_s: float, sync_s: float) -> float:
    fixed = {UPDATE: training_s, SYNC: sync_s, EVALUATION: 0.0}
    config = scaled_config(1, 40, {"lag": 1})
    reports = simulate(config, lambda actor, stage: fixed.get(stage, sampling_s / CHUNKS), seed=0)
    return wall_clock_a_round(reports[4:-4])


# ---- The plot --------------------------------------------------------------------------------


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from reports.canvas import colour, marker

    figure = Figure(figsize=(11.0, 4.2), dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(TAILS), sharey=True)
    for panel, sigma in zip(panels, TAILS, strict=True):
        own = [point for point in points if point["sigma"] == sigma]
        counts = [point["generators"] for point in own]
        for i, label in enumerate(label for label in SCHEDULES if label != "sync"):
            values = [point["speed_ups"][label] for point in own]
            panel.plot(
                counts,
                [statistics.median(v) for v in values],
                color=colour(i),
                marker=marker(i),
                markersize=4,
                linestyle="--" if "in flight" in label else "-",
                label=label,
            )
            lows, highs = [min(v) for v in values], [max(v) for v in values]
            panel.fill_between(counts, lows, highs, color=colour(i), alpha=0.15, linewidth=0)
        panel.axhline(1.0, color="#888888", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_xlabel("generators")
        tail = "responses of one length" if sigma == 0 else f"log-normal, σ = {sigma:g}"
        panel.set_title(f"Units: {tail}", fontsize=11)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("speed-up over lag 0")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"drawn to {path}")


def main() -> None:
    parser = parser_of(
        __doc__,
        "schedule_sim.json",
        counts={
            "repeats": (3, "of the validation's trials"),
            "seeds": (3, "of each point of the plot"),
        },
    )
    parts = ("validation", "scaling", "reference")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--generators", nargs="+", type=int, default=GENERATORS)
    parser.add_argument("--plot", type=Path, default=PLOT, help="PNG of the scaling")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    if "validation" in args.parts:
        rounds, settings = WORKLOADS["tiny"]
        runs = validate(args.repeats, args.seed)
        worst = largest_errors(runs)
        for how, errors in worst.items():
            print(
                f"{how}: largest error of a median {errors['of_medians']:.1%}, of a single run "
                f"{errors['of_runs']:.1%}"
            )
        result["validation"] = {
            **provenance(args),
            "workload": {"rounds": rounds, "settings": [*settings, STILL]},
            "runs": runs,
            "medians": medians(runs),
            "largest_errors": worst,
        }
    if "scaling" in args.parts:
        scaled(args, result)
        draw(result["scaling"]["points"], args.plot)
    if "reference" in args.parts:
        measured = json.loads((RESULTS / "asynchrony.json").read_text())["workload"]
        found = reference_in_the_generator(measured)
        result["reference"] = {**provenance(args), "workloads": found}
    write(args.out, result)


def scaled(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills the part `scaling`, which is written after every point."""
    workload = {"units": CHUNKS, "sync_s": SYNC_S, "seeds": args.seeds}
    origin = {**provenance(args), "workload": workload}
    kept = result.get("scaling", {})
    points = kept["points"] if same_run(kept, origin, "workload") else []
    result["scaling"] = {**origin, "points": points}
    for count in args.generators:
        for sigma in TAILS:
            if any((p["generators"], p["sigma"]) == (count, sigma) for p in points):
                continue
            began = time.monotonic()
            points.append(scale(count, sigma, args.seeds))
            medians = points[-1]["speed_up_medians"]
            shown = ", ".join(f"{label} {m:.2f}x" for label, m in medians.items() if m != 1.0)
            seconds = time.monotonic() - began
            print(f"{count:>5} generators, σ {sigma:g}: {shown} ({seconds:.0f} s)", flush=True)
            write(args.out, result, quiet=True)


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the repeats: of the seconds, and the errors between these."""
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
    """The prediction is not judged by the run that it was taken from."""
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
