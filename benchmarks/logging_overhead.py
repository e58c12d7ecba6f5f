"""What our callbacks cost: seconds of a whole trial with them, over the same trial without.

The same Trainable runs under a Tuner with Tune's default loggers (result.json, progress.csv,
TensorBoard) and under one with `grpo_callbacks`, in turn, with the same seed and workload: the
default one. Compared are the seconds from the start of the third round to the end of the last row,
by the driver's clock, without checkpoints and evaluations, which neither run has after the first.
Rows with details are what the callbacks need, so the trial that makes them is the one with them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import RESULTS, provenance, write

FIRST_ROUND = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="of each run (40)")
    parser.add_argument("--repeats", type=int, default=3, help="of all runs, in turn (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat (0)")
    parser.add_argument("--out", type=Path, default=RESULTS / "logging_overhead.json")
    args = parser.parse_args()

    os.environ.update(
        {
            "TUNE_GLOBAL_CHECKPOINT_S": "1",  # as the launcher sets them
            "RAY_AIR_NEW_OUTPUT": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    )
    import ray

    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}},
    )
    runs: dict[str, dict[str, list[float]]] = {}
    try:
        for repeat in range(args.repeats):
            for arm in ("sync", "async_k1"):
                for kind in ("bare", "ours"):
                    seconds = run(arm, kind, args.rounds, args.seed + repeat)
                    runs.setdefault(arm, {}).setdefault(kind, []).append(seconds)
                    print(f"repeat {repeat} {arm:<9} {kind:<5} {seconds:.2f} s", flush=True)
    finally:
        ray.shutdown()
    overheads = {}
    for arm, kinds in runs.items():
        ratios = [ours / bare for bare, ours in zip(kinds["bare"], kinds["ours"], strict=True)]
        overheads[arm] = {"ratios": ratios, "median": statistics.median(ratios)}
        shown = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
        print(f"{arm:<9} overhead {statistics.median(ratios) - 1:+.1%} (median of {shown})")
    workload = {"rounds": args.rounds, "first_round": FIRST_ROUND, "space": "async_vs_sync"}
    result = {"workload": workload, "seconds": runs, "overhead": overheads}
    write(args.out, {**provenance(args), **result})


def run(arm: str, kind: str, rounds: int, seed: int) -> float:
    """Seconds from the row before round `FIRST_ROUND` to the row before the last."""
    from ray import tune

    from callbacks import grpo_callbacks
    from grpo_trainable.trainable import DetailedGRPO, GRPOTrainable
    from search_spaces import SPACES

    class Stamps(tune.Callback):
        """When each row arrived at it, the last of ours; Tune's own loggers come after."""

        def __init__(self) -> None:
            self.at: list[float] = []

        def on_trial_result(self, *args: Any, **info: Any) -> None:
            self.at.append(time.perf_counter())

    fixed = {"rounds": rounds, "eval.every": rounds + 1, "checkpoint.every": rounds + 1}
    (config,) = SPACES["async_vs_sync"].trials({"arm": arm, **fixed}, [seed])
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as storage:
        grid = tune.Tuner(
            GRPOTrainable if kind == "bare" else DetailedGRPO,
            param_space=config.to_dict(),
            run_config=tune.RunConfig(
                name=kind,
                storage_path=storage,
                verbose=0,
                callbacks=[*([] if kind == "bare" else grpo_callbacks()), stamps],
            ),
        ).fit()
        if grid.errors:
            raise SystemExit(f"{arm} {kind}: {grid.errors[0]}")
    # The last row brings the last evaluation with it.
    return stamps.at[rounds - 2] - stamps.at[FIRST_ROUND - 2]


if __name__ == "__main__":
    main()
