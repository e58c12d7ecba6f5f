"""The least job of Ray Tune with an actor that knows torch: what no start can be faster than.

    python benchmarks/startup_floor.py --name NAME --storage DIRECTORY

Started by benchmarks/startup.py, beside the real one. One trial with one actor, which imports torch
and computes nothing, on the bundles of a colocated trial, until it is interrupted. Ray has the
settings of `launch/tune.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray import tune

BUNDLES = [{"CPU": 0.1}, {"CPU": 0.95}]


@ray.remote(num_cpus=0.95)
class Worker:
    def version(self) -> str:
        import torch

        return torch.__version__


class Rows(tune.Callback):
    """Writes the rows where they are looked for; Tune itself copies its own there at times."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._file(trial).parent.mkdir(parents=True, exist_ok=True)
        self._file(trial).touch()

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
    ) -> None:
        self._file(trial).write_text(f"{result['torch']}\n")

    def _file(self, trial: Any) -> Path:
        return self._storage / str(trial) / "result.json"


class Least(tune.Trainable):
    """A round of it is nothing."""

    def setup(self, config: dict[str, Any]) -> None:
        self.worker = Worker.remote()

    def step(self) -> dict[str, Any]:
        return {"torch": ray.get(self.worker.version.remote())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--name", "--storage"):
        parser.add_argument(option, required=True)
    args = parser.parse_args()
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=os.cpu_count(),
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    tune.Tuner(
        tune.with_resources(Least, tune.PlacementGroupFactory(BUNDLES)),
        run_config=tune.RunConfig(
            name=args.name,
            storage_path=args.storage,
            callbacks=[Rows(Path(args.storage, args.name))],
            verbose=0,
        ),
    ).fit()


if __name__ == "__main__":
    main()
