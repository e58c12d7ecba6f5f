"""Runs in MLflow, on a server or in a local database."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from callbacks.trackers.tracked_run import Report, State, TrackedTrial
from grpo_trainable.config import flatten

TAG = "grpo_trainable.trial"  # the tag by which a resumed trial finds its run
ROUND = "round"  # a metric that each round has; the last one to be written
STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MOST_PARAMS = 100  # limits of MLflow: parameters in a request, and characters of a value
LONGEST_VALUE = 6000
# By default, MLflow repeats a failed request for minutes, and training would wait. The callback
# sends the rounds again later.
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def check() -> None:
    """Accept every machine: MLflow reports a wrong address when the first run is opened."""


class Run:
    """The run of a trial in MLflow. A resumed trial finds its run by a tag."""

    def __init__(self, trial: TrackedTrial) -> None:
        """Open the run, record settings that it lacks, and mark it as running."""
        for name, value in QUICK.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):  # they log each table of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", trial.experiment)
        experiment_id = _experiment_id(self._client, experiment)
        found = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{trial.id}'")
        if found:
            run = found[0]
        else:
            tags = {TAG: trial.id, "grpo_trainable.experiment": trial.experiment}
            run = self._client.create_run(experiment_id, tags=tags, run_name=trial.name)
        self._id = run.info.run_id
        self._log_settings(trial.settings, known=run.data.params)
        self._client.update_run(self._id, status="RUNNING")
        steps = [metric.step for metric in self._history(ROUND)]
        self.next_round = max(steps, default=0) + 1
        # A killed process may have written a part of the next round, but only into a store of
        # plain files: a database takes all metrics of a round or none.
        self._part_of_next = set(run.data.metrics)

    def _log_settings(self, settings: Mapping[str, object], known: Mapping[str, str]) -> None:
        params = [
            Param(key, str(value)[:LONGEST_VALUE])
            for key, value in flatten(settings).items()
            if key not in known
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])

    def _history(self, name: str) -> list[Metric]:
        return self._client.get_metric_history(self._id, name)

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Send a round as the step of its number, in one request."""
        now = int(time.time() * 1000)
        written = {name for name in self._part_of_next if self._has(name, round_)}
        self._client.log_batch(
            self._id,
            [
                Metric(name, value, now, round_)
                for name, value in [*metrics.items(), (ROUND, float(round_))]
                if name not in written
            ],
        )
        self._part_of_next = set()
        self.next_round = round_ + 1

    def _has(self, name: str, round_: int) -> bool:
        return any(metric.step == round_ for metric in self._history(name))

    def attach(self, report: Report) -> None:
        """Log the report's files, and its table as a file that MLflow shows as a table."""
        for name, path in report.files.items():
            directory = f"report/{name}".rpartition("/")[0]
            self._client.log_artifact(self._id, str(path), directory)
        table = {"columns": list(report.columns), "data": [list(row) for row in report.rows]}
        self._client.log_dict(self._id, table, "report/table.json")

    def close(self, state: State) -> None:
        """Record how the trial ended. Each request has been answered already."""
        self._client.set_terminated(self._id, STATUS[state])


def _experiment_id(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, and create the experiment if there is none."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another command may have created it
        if found is None:
            raise
        return found.experiment_id
