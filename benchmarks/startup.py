"""Measure the seconds from the command to the first finished round of the default job.

Starts `launch/tune.py --space async_vs_sync` as a user does, waits for the first row of the first
trial in result.json, and interrupts the job. For comparison, the benchmark also starts

- a minimal Ray Tune job with an actor that imports torch (`--floor`): no job can start faster;
- with `--baseline DIRECTORY`, the same command in a checkout of another commit.

The jobs take turns, and the order alternates. Ratios are computed within a turn. A repeat takes
about half a minute.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import ROOT, commit_of, parser_of, provenance, run_benchmark, spread, write

NAME = "startup"
DEADLINE_S = 300.0
LOOK_EVERY_S = 0.01


def main() -> None:
    parser = parser_of(
        __doc__,
        "startup.json",
        seed="seed of the first trial",
        counts={"repeats": (5, "number of starts of each job")},
    )
    parser.add_argument("--baseline", type=Path, metavar="DIRECTORY", help="another checkout")
    parser.add_argument("--floor", action="store_true", help="run only the minimal job")
    for option in ("--name", "--storage"):
        parser.add_argument(option, help=argparse.SUPPRESS)  # options of the minimal job
    args = parser.parse_args()
    if args.floor:
        least_job(args.name, args.storage)
        return
    trees = {"here": ROOT}
    if args.baseline is not None:
        trees["baseline"] = args.baseline.resolve(strict=True)
    job = ["--space", "async_vs_sync", "--seed", str(args.seed)]
    commands = {name: [str(tree / "launch" / "tune.py"), *job] for name, tree in trees.items()}
    commands["floor"] = [__file__, "--floor"]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(-1, args.repeats):
        for name in sorted(commands, reverse=repeat % 2 == 0):
            found = start(commands[name], trees.get(name, ROOT))
            if repeat >= 0:  # in the first turn, Python compiles changed files
                seconds[name].append(found)
                print(f"{repeat} {name:<8} {found:6.2f} s to the first finished round", flush=True)
    ratios = {
        name: spread([ours / other for ours, other in zip(seconds["here"], own, strict=True)])
        for name, own in seconds.items()
        if name != "here"
    }
    for name, ratio in ratios.items():
        low, high = ratio["min"], ratio["max"]
        print(f"{ratio['median']:.2f} x the time of the {name} ({low:.2f}-{high:.2f})")
    about = {name: commit_of(tree) for name, tree in trees.items() if name != "here"}
    starts = {name: spread(own) for name, own in seconds.items()}
    write(args.out, {**provenance(args), **about, "starts": starts, "ratios": ratios})


def start(words: list[str], tree: Path) -> float:
    """Return the seconds from the start of a command to the first row of its first trial."""
    with tempfile.TemporaryDirectory() as storage:
        command = [sys.executable, *words, "--name", NAME, "--storage", storage]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        begin = time.perf_counter()
        with (
            open(Path(storage, "printed"), "w+") as printed,
            subprocess.Popen(
                command, stdout=printed, stderr=subprocess.STDOUT, cwd=tree, env=environment
            ) as process,
        ):
            try:
                while not any(
                    p.stat().st_size for p in Path(storage).glob(f"{NAME}/*/result.json")
                ):
                    if process.poll() is not None or time.perf_counter() > begin + DEADLINE_S:
                        printed.seek(0)
                        sys.exit(f"{' '.join(command)}: no finished round\n{printed.read()}")
                    time.sleep(LOOK_EVERY_S)
                return time.perf_counter() - begin
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(DEADLINE_S)


# ---- The minimal job ---------------------------------------------------------------------------


def least_job(name: str, storage: str) -> None:
    """Until interrupted, run one trial that has the resource bundles of a colocated trial.

    The only actor of the trial imports torch and computes nothing.
    """
    import ray
    from ray import tune

    @ray.remote(num_cpus=0.95)
    class Worker:
        def version(self) -> str:
            import torch

            return torch.__version__

    class Least(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.worker = Worker.remote()

        def step(self) -> dict[str, Any]:
            return {"torch": ray.get(self.worker.version.remote())}

    class Rows(tune.Callback):
        """Writes rows to the storage path immediately. Tune copies its own rows there later."""

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._file(trial).parent.mkdir(parents=True, exist_ok=True)
            self._file(trial).touch()

        def on_trial_result(
            self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
        ) -> None:
            self._file(trial).write_text(f"{result['torch']}\n")

        def _file(self, trial: Any) -> Path:
            return Path(storage, name, str(trial), "result.json")

    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # as launch/tune.py does
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=os.cpu_count(),
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    bundles = tune.PlacementGroupFactory([{"CPU": 0.1}, {"CPU": 0.95}])
    where = tune.RunConfig(name=name, storage_path=storage, callbacks=[Rows()], verbose=0)
    tune.Tuner(tune.with_resources(Least, bundles), run_config=where).fit()


if __name__ == "__main__":
    run_benchmark(main)
