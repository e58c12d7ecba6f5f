"""Send the metrics of a trial to MLflow, on a server or in a local database."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from callbacks.trackers.tracked_run import State, TrackedTrial
from grpo_trainable.config import flatten

TAG = "grpo_trainable.trial"  # the tag by which a resumed trial finds its run
ROUND = "round"  # a metric whose value is the number of the round
STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MOST_PARAMS = 100  # MLflow's limits: parameters per request and, below, characters per value
LONGEST_VALUE = 6000
# By default, MLflow repeats a failed request for minutes, and training would wait.
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Run:
    """The run of a trial in MLflow. A resumed trial finds its run by a tag."""

    def __init__(self, trial: TrackedTrial) -> None:
        """Open the run, record settings that it lacks, and mark it as running."""
        for name, value in QUICK.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):  # both libraries log each table of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", trial.experiment)
        known = self._client.get_experiment_by_name(experiment)
        # If another command creates the experiment at this moment, the callback tries again later.
        id_ = known.experiment_id if known else self._client.create_experiment(experiment)
        found = self._client.search_runs([id_], f"tags.`{TAG}` = '{trial.id}'")
        if found:
            run = found[0]
        else:
            tags = {TAG: trial.id, "grpo_trainable.experiment": trial.experiment}
            run = self._client.create_run(id_, tags=tags, run_name=trial.name)
        self._id = run.info.run_id
        self._log_settings(trial.settings, known=run.data.params)
        self._client.update_run(self._id, status="RUNNING")
        self.next_round = int(run.data.metrics.get(ROUND, 0)) + 1

    def _log_settings(self, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
        params = [
            Param(_accepted(key), str(value)[:LONGEST_VALUE])
            for key, value in flatten(settings).items()
            if _accepted(key) not in known
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Send a round in one request, which MLflow stores or rejects as a whole."""
        now = int(time.time() * 1000)
        values = {**metrics, ROUND: float(round_)}
        self._client.log_batch(
            self._id,
            [Metric(_accepted(name), value, now, round_) for name, value in values.items()],
        )
        self.next_round = round_ + 1

    def attach(self, report: Mapping[str, Path]) -> None:
        """Log the files of the report to MLflow's directory `report`."""
        for name, path in report.items():
            directory = f"report/{name}".rpartition("/")[0]
            self._client.log_artifact(self._id, str(path), directory)

    def close(self, state: State) -> None:
        """Record how the trial ended. No rounds are waiting, because each request was answered."""
        self._client.set_terminated(self._id, STATUS[state])


def _accepted(name: str) -> str:
    """Return a name without characters that MLflow rejects."""
    return re.sub(r"[^\w\-. :/]", "-", name)
