"""The directory of an alignment run: its settings, its files, and its progress."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_trainable.tools.alignment.rows import Rows
from grpo_trainable.tools.alignment.stages import Stage
from grpo_trainable.tools.asked import record_or_match

ASKED = "align.json"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
RESULT = "result.json"
MODEL = "model"  # written last
# Transformers writes this file last. A checkpoint without it is incomplete.
STATE = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stage with its model, its data and the directory of its results."""

    stage: Stage
    model: Path  # the directory of the model that training starts from
    train: Rows
    held_out: Rows
    seed: int
    context: int | None  # context length of the model, in tokens
    settings: Mapping[str, Any]  # fields of TRL's config that the user has set
    asked: Mapping[str, Any]  # everything that determines the result, as plain data
    out: Path

    def begin(self) -> bool:
        """Make the directory of the run, or check that an existing one has the same settings.

        Returns:
            True if the run is new.

        Raises:
            ValueError: If the directory contains something else. The message is one line.
            OSError: If the directory cannot be written.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        is_new = not (self.out / ASKED).exists()
        record_or_match(self.out / ASKED, self.asked, what="a run", advice="Repeat")
        return is_new

    def abandon(self) -> None:
        """Remove a run that has not begun to train."""
        (self.out / ASKED).unlink()
        shutil.rmtree(self.out / TENSORBOARD, ignore_errors=True)
        for directory in (self.out / CHECKPOINTS, self.out):
            with suppress(OSError):  # the directory is missing or not empty
                directory.rmdir()

    @property
    def trained_model(self) -> Path:
        """Directory of the trained model. It exists only if the run is complete."""
        return self.out / MODEL

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint after which steps remain, or None.

        A checkpoint that a killed process left incomplete is removed. From a checkpoint of the last
        step, transformers would take one step too many, so an earlier checkpoint is returned.
        """
        found: dict[int, Path] = {}
        for directory in (self.out / CHECKPOINTS).glob("checkpoint-*"):
            try:
                state = json.loads((directory / STATE).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):
                shutil.rmtree(directory)
                continue
            if state["global_step"] < state["max_steps"]:
                found[state["global_step"]] = directory
        return found[max(found)] if found else None

    def read_result(self) -> dict[str, Any]:
        """Return the content of `result.json`. The run must be complete."""
        return json.loads((self.out / RESULT).read_text(encoding="utf-8"))
