"""The shell that Tune calls, with a fake trial whose round was abandoned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.result import RESULT_DUPLICATE

from grpo_trainable.protocol.stopping import Finishing, RoundAbandoned, Stopped
from grpo_trainable.storage.ray_private import _TrainingResult
from grpo_trainable.trainable import GRPOTrainable


class AbandonedTrial:
    """A trial that is stopped while it samples."""

    def __init__(self, rounds_trained: int, *, unsaved: bool) -> None:
        self.rounds_trained, self.unsaved = rounds_trained, unsaved
        self.notes: list[str] = []
        self.stoppable = SimpleNamespace(stopped=True)
        self.pipeline = SimpleNamespace(ended=False)
        self.stored = SimpleNamespace(remove_older=lambda rows_follow: [])

    def run_round(self) -> None:
        raise RoundAbandoned(self.rounds_trained + 1, 48.0)

    def take_notes(self) -> list[str]:
        return self.notes

    def note_checkpoints(self, notes: list[str], *, failed: bool = False) -> None:
        self.notes += notes
        self.unsaved = failed


class Trainable(GRPOTrainable):
    """A Trainable without a process, which records what happens."""

    def __init__(self, trial: Any, failing_writes: int = 0) -> None:
        self.trial, self._storage = trial, None
        self._looked_for_checkpoint = True
        self.last_pauses_s = (0.0, 0.0)
        self.failing_writes = failing_writes
        self.events: list[Any] = []

    def _stop_request(self) -> Any:
        return self

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        return self._save_to_storage()

    def _write_to_storage(self) -> _TrainingResult:
        self.events.append("write")
        if self.events.count("write") <= self.failing_writes:
            raise OSError(28, "No space left on device")
        checkpoint: Any = SimpleNamespace(path="/storage/checkpoint_000001")
        return _TrainingResult(checkpoint=checkpoint, metrics={})

    # ---- The request to stop ----

    def say(self, answer: Finishing | Stopped) -> None:
        self.events.append(answer)

    def wait_until_released(self) -> None:
        self.events.append("released")


def test_an_abandoned_round_leaves_a_checkpoint_and_no_row():
    trainable = Trainable(AbandonedTrial(6, unsaved=True))
    assert trainable.step() == {RESULT_DUPLICATE: True}
    path = "/storage/checkpoint_000001"
    answer = Stopped(round=6, saved=True, lost_s=48.0, checkpoint=path)
    assert trainable.events == ["write", answer, "released"]


@pytest.mark.parametrize("round_", [0, 6])
def test_nothing_is_written_if_there_is_nothing_new_to_save(round_):
    trainable = Trainable(AbandonedTrial(round_, unsaved=False))
    trainable.step()
    assert trainable.events == [Stopped(round=round_, saved=round_ > 0, lost_s=48.0), "released"]


@pytest.mark.parametrize(("failing", "saved"), [(2, True), (3, False)])
def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_then_reported(failing, saved):
    trainable = Trainable(AbandonedTrial(6, unsaved=True), failing)
    trainable.step()
    *writes, answer, _ = trainable.events
    assert writes == ["write"] * 3
    assert answer.saved is saved
    assert (answer.checkpoint is None) is not saved
    told = "the checkpoint could not be written (No space left on device); the previous one is kept"
    assert answer.notes == ([] if saved else [told])
