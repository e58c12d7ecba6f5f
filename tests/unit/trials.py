"""Tune trials as callbacks see them: a directory, a config, a checkpoint to start from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import torch
from checkpoints import write_checkpoint
from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint

from grpo_trainable.protocol.round_records import RoundDetails, Row
from grpo_trainable.protocol.versions import VersionChange
from grpo_trainable.storage.checkpointing import TrialState, read_checkpoint
from grpo_trainable.storage.object_store import AnyPath
from grpo_trainable.storage.trial_storage import TrialStorage, path_on
from grpo_trainable.telemetry.metrics import KL_TO, NAMES, RATIO_EDGES, ActorSpan
from grpo_trainable.telemetry.timers import Span
from grpo_trainable.trainable import GRPOTrainable


class FakeTrial:
    """A trial that is hashed by identity like Tune's own, because loggers keep files by trial."""

    trainable_name = "GRPO"

    def __init__(self, directory: Path, **config: Any) -> None:
        self.trial_id = directory.name
        self.config = {"arm": "sync", "seed": 0, "rounds": 8, "callbacks": {}, **config}
        self.path = self.local_path = str(directory)
        self.storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem())
        self.run_metadata = SimpleNamespace(checkpoint_manager=_CheckpointManager(None))
        self.status = "RUNNING"
        self.evaluated_params = {"arm": self.config["arm"]}
        # Like the last result in Tune, which has the id even before the first report.
        self.last_result: dict[str, Any] = {"trial_id": self.trial_id}
        self.num_failures = self.max_failures = 0
        self.is_saving = False
        self.custom_dirname: str | None = None
        self.error_file = str(directory / "error.txt")

    @property
    def latest_checkpoint_result(self) -> Any:
        return self.run_metadata.checkpoint_manager.latest_checkpoint_result

    def __str__(self) -> str:
        return self.trial_id

    def init_local_path(self) -> None:
        Path(self.local_path).mkdir(parents=True, exist_ok=True)

    def get_trainable_cls(self) -> type:
        return GRPOTrainable

    def is_finished(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")

    def update_last_result(self, result: dict[str, Any]) -> None:
        self.last_result = result

    def on_checkpoint(self, checkpoint_result: Any) -> None:
        self.run_metadata.checkpoint_manager.register_checkpoint(checkpoint_result)

    def checkpoint_at(self, iteration: int | None) -> None:
        metrics = {"training_iteration": iteration}
        self.run_metadata.checkpoint_manager._latest_checkpoint_result = (
            iteration and SimpleNamespace(metrics=metrics)
        )


def row(round_: int, **values: Any) -> dict[str, Any]:
    """Return a row of a trial with every metric; most are 0."""
    return {
        **dict.fromkeys(sorted(NAMES), 0.0),
        "training_iteration": round_,
        "time_total_s": 2.0 * round_,
        "config": {"arm": "sync"},
        "eval/round": 0.0,
        "version/learner": float(round_),
        **values,
    }


def detailed(round_: int, *, metrics: dict[str, Any] | None = None, **values: Any) -> Row:
    """Return a row with these metrics and with the details that `values` describe."""
    return Row.of(row(round_, **metrics or {}), details(round_, **values))


def details(round_: int, **values: Any) -> RoundDetails:
    """Return two responses to one prompt, and the spans of a generator and a learner in turn.

    Round r takes seconds 10 r to 10 r + 9.
    """
    start = 10.0 * round_
    spans = [
        ("trial", "trial", "round", 0, 9),
        ("generator", "generator-0", "idle", 0, 1),
        ("generator", "generator-0", "rollout", 1, 5),
        ("learner", "learner", "idle", 0, 5),
        ("learner", "learner", "optimize", 5, 9),
    ]
    fields: dict[str, Any] = {
        "round": round_,
        "config": {"arm": "sync"},
        "rollouts": {
            **_responses(round_, 2),
            "cursor": [round_ - 1] * 2,
            "response_index": [0, 1],
            "advantage": [1.0, -1.0],
            "uses": [1, 1],
            "version": [round_ - 1] * 2,
            "weights_round": [round_ - 1] * 2,
            "lag": [0, 0],
            "first_use": [True, True],
            "behaviour_log_prob": [-3.0, -4.0],
            "policy_log_prob": [-2.5, -4.5],
            "reference_log_prob": [None, None],
        },
        "evaluations": {},
        "steps": gradient_steps(round_),
        "versions": [
            VersionChange(
                at=start + 9,
                role="learner",
                actor="learner",
                version=round_,
                weights_round=round_,
            )
        ],
        "spans": [
            ActorSpan(role, actor, Span(stage, start + low, start + high))
            for role, actor, stage, low, high in spans
        ],
        "notes": [],
        "lags": {0: 1},
        "ratio_counts": [0] * 30 + [8] + [0] * 30,
    }
    assert len(fields["ratio_counts"]) == len(RATIO_EDGES) - 1
    return RoundDetails(**{**fields, **values})


def gradient_steps(round_: int) -> dict[str, list[Any]]:
    """Return two steps per round. Before the second step, each KL of the policy is 0.5 nats."""
    kl = {f"kl_{other}{kind}_nats": [0.0, 0.5] for other in KL_TO for kind in ("", "_k3")}
    names = ("loss", "grad_norm", "entropy_nats", "clip_fraction", "ratio_max", "lr")
    critic = ("critic_loss", "critic_clip_fraction", "critic_grad_norm")
    return {
        "weights_bounded_fraction": [0.0, 0.5],
        "round": [round_] * 2,
        "step": [1, 2],
        "version": [2 * round_ - 2, 2 * round_ - 1],
        "skipped": [False, False],
        "bounded_tokens": [0, 3],
        **{name: [0.25, 0.75] for name in names},
        **{name: [None, None] for name in critic},
        **kl,
    }


def held_out(round_: int, count: int = 3) -> dict[str, list[Any]]:
    return _responses(round_, count)


def _responses(round_: int, count: int) -> dict[str, list[Any]]:
    return {
        "round": [round_] * count,
        "cursor": list(range(count)),
        "response_index": [0] * count,
        "task": [None] * count,
        "prompt": [f"prompt {i}" for i in range(count)],
        "response": [f"response {i} of {round_}" for i in range(count)],
        "ground_truth": ['"fox"'] * count,
        "reward": [1.0] + [0.0] * (count - 1),
        "format_reward": [1.0] * count,
        "answer_reward": [1.0] + [0.0] * (count - 1),
        "finished": [True] * count,
        "tokens": [4] * count,
        "parts": [None] * count,
        "turns": [None] * count,
    }


# ---- Checkpoints ---------------------------------------------------------------------------------


def saved(trial: FakeTrial, number: int, round_: int, **state: Any) -> Path:
    """Write a complete checkpoint that Tune has recorded."""
    path = Path(trial.path) / f"checkpoint_{number:06d}"
    state["pipeline"] = {"learner_round": round_}
    tensors = {"a": torch.full((64,), float(round_))}
    write_checkpoint(path, TrialState(state=state, policy=tensors, optimizer={}, groups=[]))
    note(trial, path, round_)
    return path


def note(trial: FakeTrial, path: Path, round_: int) -> None:
    checkpoint = Checkpoint(path=str(path), filesystem=pyarrow.fs.LocalFileSystem())
    result = _TrainingResult(checkpoint=checkpoint, metrics={"training_iteration": round_})
    trial.run_metadata.checkpoint_manager.register_checkpoint(result)


class Restored:
    """A trial restored as a Trainable restores it, but without starting actors."""

    def __init__(self, trial: FakeTrial) -> None:
        self.round = 0
        context = SimpleNamespace(
            storage_filesystem=trial.storage.storage_filesystem, trial_fs_path=trial.path
        )
        storage = TrialStorage(
            context,  # pyright: ignore[reportArgumentType]
            keep=None,
            has_settings=lambda config: config == trial.config,
        )
        self.notes = storage.go_on(trial.latest_checkpoint_result, self._restore, rows_follow=True)

    def _restore(self, result: Any) -> int:
        checkpoint = getattr(result, "checkpoint", result)
        path: AnyPath = path_on(checkpoint.filesystem, checkpoint.path)
        self.round = read_checkpoint(path).state["pipeline"]["learner_round"]
        return self.round


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its content."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
