"""Send the metrics of a trial to Weights & Biases, online or offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from callbacks.trackers.tracked_run import PROJECT, State, TrackedTrial, TrackerError, clean

OFFLINE = ("offline", "disabled", "dryrun")  # modes that need no login
WAIT_S = 30.0  # limit on waits for the server, during which the other trials wait too


def check_login() -> None:
    """Check that this machine is logged in to W&B, or that W&B is offline.

    Raises:
        TrackerError: There is no API key.
    """
    offline = wandb.setup().settings.mode in OFFLINE
    if not offline and not wandb.login(prompt=False, verify=False):
        raise TrackerError(
            "wandb: there is no API key; run: wandb login, or set the environment variable "
            "WANDB_MODE=offline"
        )


class Run:
    """The run of a trial in W&B.

    Online, a resumed trial continues its run. The server reports the next round.

    Offline, W&B writes a new directory each time a run is opened. A resumed trial writes all its
    rounds into the new directory, and removes the former directories of the run. So one
    `wandb sync` of the remaining directory sends each round once.
    """

    def __init__(self, trial: TrackedTrial) -> None:
        """Open the run."""
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=trial.id,
            name=trial.name,
            group=trial.experiment,
            config=dict(trial.settings),
            resume="allow",
            allow_val_change=True,
            reinit="create_new",  # several trials may have open runs at the same time
            settings=wandb.Settings(
                console="off",  # the command's output is about all trials
                silent=True,
                disable_git=True,
                x_disable_stats=True,  # the driver's load comes from all trials
                init_timeout=WAIT_S,
                finish_timeout=WAIT_S,
                finish_timeout_raises=True,
            ),
        )
        self._artifact = clean(f"report-{trial.experiment}")
        self.next_round: int = max(1, self._run.starting_step)
        if self._run.offline:
            for directory in self._former_directories():
                shutil.rmtree(directory, ignore_errors=True)

    def _former_directories(self) -> Iterator[Path]:
        """Yield the directories that earlier processes have written for this offline run."""
        settings = self._run.settings
        for file in Path(settings.wandb_dir).glob(f"offline-run-*/run-{settings.run_id}.wandb"):
            if file.parent.name != Path(settings.sync_dir).name:
                yield file.parent

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Send a round as the step with the same number."""
        self._run.log(dict(metrics), step=round_, commit=True)
        self.next_round = round_ + 1

    def attach(self, report: Mapping[str, Path]) -> None:
        """Log the report as an artifact. W&B stores equal reports of several runs only once."""
        artifact = wandb.Artifact(self._artifact, type="report")
        for name, path in report.items():
            artifact.add_file(str(path), name)
        self._run.log_artifact(artifact)

    def close(self, state: State) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if state == "finished" else 1)
