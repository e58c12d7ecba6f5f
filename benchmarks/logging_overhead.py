"""What our callbacks cost: seconds of a round with them, over the same round without.

The same Trainable runs under a Tuner with Tune's default loggers (result.json, progress.csv,
TensorBoard) and under one with `grpo_callbacks`, in turn, with the same seed and workload: the
default one. A round lasts from one row's arrival in the driver to the next, so everything between
two rows counts; neither run has evaluations there, and both have the default checkpoints. Round i is compared with round i,
which at lag 0 trains on the very same responses, and the median over the rounds is the overhead of
a run: the machine's own spikes hit single rounds. Rows with details are what the callbacks need, so
the Trainable that makes them is the one that runs with them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
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
    runs: dict[str, dict[str, list[list[float]]]] = {}
    try:
        for repeat in range(args.repeats):
            for arm in ("sync", "async_k1"):
                # In turn the first: a machine that slows down must not favour one of them.
                for kind in ("bare", "ours")[:: 1 if repeat % 2 == 0 else -1]:
                    seconds = run(arm, kind, args.rounds, args.seed + repeat)
                    runs.setdefault(arm, {}).setdefault(kind, []).append(seconds)
                    shown = f"{statistics.median(seconds):.3f} s a round (median)"
                    print(f"repeat {repeat} {arm:<9} {kind:<5} {shown}", flush=True)
    finally:
        ray.shutdown()
    overheads = {}
    for arm, kinds in runs.items():
        ratios = [
            statistics.median(with_ / without for without, with_ in zip(bare, ours, strict=True))
            for bare, ours in zip(kinds["bare"], kinds["ours"], strict=True)
        ]
        overheads[arm] = {"ratios": ratios, "median": statistics.median(ratios)}
        shown = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
        print(f"{arm:<9} overhead {statistics.median(ratios) - 1:+.1%} (median of {shown})")
    workload = {"rounds": args.rounds, "first_round": FIRST_ROUND, "space": "async_vs_sync"}
    result = {"workload": workload, "seconds_a_round": runs, "overhead": overheads}
    write(args.out, {**provenance(args), **result})


def run(arm: str, kind: str, rounds: int, seed: int) -> list[float]:
    """Seconds of each round from `FIRST_ROUND` to the last but one."""
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

    fixed = {"rounds": rounds, "eval.every": rounds + 1}
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
    return [after - before for before, after in pairwise(stamps.at[FIRST_ROUND - 2 : rounds - 1])]


if __name__ == "__main__":
    main()
