"""What our callbacks cost: seconds of a round with them, over a round with Tune's default loggers.

Both kinds of logging take turns within one trial, round by round: in one round the Trainable adds
the details and `grpo_callbacks` write the row down, in the other it is bare and Tune's own loggers
write (result.json, progress.csv, TensorBoard). A round lasts from the end of one row's processing
in the driver to the end of the next, so it holds all that its kind of logging costs. Neighbouring
rounds make a pair, in the order ours, theirs, theirs, ours: a machine whose speed wanders within a
minute (all shared ones do) hits both alike, and responses that get shorter favour neither. The
overhead of a run is the median over its pairs. The workload is the default one, without evaluations
between the first and the last round, with its checkpoints.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

from measure import parser_of, provenance, run_benchmark, write

from grpo_trainable.threads import WAITING

FIRST_ROUND = 4  # an even one; those before it warm up


def main() -> None:
    parser = parser_of(
        __doc__,
        "logging_overhead.json",
        counts={"rounds": (64, "of each run"), "repeats": (3, "of each arm")},
    )
    args = parser.parse_args()

    os.environ.update(
        {
            "TUNE_GLOBAL_CHECKPOINT_S": "1",  # the launcher sets both
            "RAY_AIR_NEW_OUTPUT": "0",
            **WAITING,
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        }
    )
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": dict(WAITING)},
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    try:
        for repeat in range(args.repeats):
            for arm in ("sync", "async_k1"):
                result = run(arm, args.rounds, args.seed + repeat)
                runs.setdefault(arm, []).append(result)
                print(
                    f"repeat {repeat} {arm:<9} theirs {result['theirs_s']:.3f} s a round, "
                    f"overhead {result['overhead']:+.1%} (median of {result['pairs']} pairs, "
                    f"quartiles {result['quartiles'][0]:+.1%} to {result['quartiles'][1]:+.1%})",
                    flush=True,
                )
    finally:
        ray.shutdown()
    medians = {arm: statistics.median(r["overhead"] for r in rs) for arm, rs in runs.items()}
    for arm, median in medians.items():
        print(f"{arm:<9} overhead {median:+.1%} (median of {args.repeats})")
    workload = {"rounds": args.rounds, "first_round": FIRST_ROUND, "space": "async_vs_sync"}
    write(args.out, {**provenance(args), "workload": workload, "runs": runs, "overhead": medians})


def is_ours(round_: int) -> bool:
    """Whether a round has our callbacks: ours, theirs, theirs, ours, and so on."""
    return round_ % 4 in (0, 3)


def run(arm: str, rounds: int, seed: int) -> dict[str, Any]:
    from ray import tune
    from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

    from callbacks import grpo_callbacks
    from grpo_trainable.trainable import DetailedGRPO
    from grpo_trainable.trial import TrainedRound
    from search_spaces import SPACES

    class InTurn(DetailedGRPO):
        def _extra(self, trained: TrainedRound) -> dict[str, Any]:
            return super()._extra(trained) if is_ours(trained.report.round) else {}

    class Loggers(tune.Callback):
        """Hands each row to the loggers whose turn it is, and notes when they were done."""

        def __init__(self) -> None:
            self.ours = grpo_callbacks()
            self.theirs = [JsonLoggerCallback(), CSVLoggerCallback(), TBXLoggerCallback()]
            self.ends: list[float] = []

        def on_trial_start(self, *args: Any, **info: Any) -> None:
            for callback in (*self.ours, *self.theirs):
                callback.on_trial_start(*args, **info)

        def on_trial_result(self, *args: Any, **info: Any) -> None:
            mine = is_ours(info["result"]["training_iteration"])
            for callback in self.ours if mine else self.theirs:
                callback.on_trial_result(*args, **info)
            self.ends.append(time.perf_counter())

        def on_trial_complete(self, *args: Any, **info: Any) -> None:
            for callback in (*self.ours, *self.theirs):
                callback.on_trial_complete(*args, **info)

    fixed = {"rounds": rounds, "eval.every": rounds + 1}
    (config,) = SPACES["async_vs_sync"].trials({"arm": arm, **fixed}, [seed])
    loggers = Loggers()
    with tempfile.TemporaryDirectory() as storage:
        grid = tune.Tuner(
            InTurn,
            param_space=config.to_dict(),
            run_config=tune.RunConfig(
                name="overhead", storage_path=storage, verbose=0, callbacks=[loggers]
            ),
        ).fit()
        if grid.errors:
            raise SystemExit(f"{arm}: {grid.errors[0]}")
    # The last round has the last evaluation in it.
    seconds = {i + 2: after - before for i, (before, after) in enumerate(pairwise(loggers.ends))}
    firsts = range(FIRST_ROUND, rounds - 1, 2)
    pairs = [(n, n + 1) if is_ours(n) else (n + 1, n) for n in firsts]
    assert all(is_ours(ours) and not is_ours(theirs) for ours, theirs in pairs)
    ratios = [seconds[ours] / seconds[theirs] - 1 for ours, theirs in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "overhead": statistics.median(ratios),
        "pairs": len(pairs),
        "quartiles": [low, high],
        "ours_s": statistics.median(seconds[ours] for ours, _ in pairs),
        "theirs_s": statistics.median(seconds[theirs] for _, theirs in pairs),
    }


if __name__ == "__main__":
    run_benchmark(main)
