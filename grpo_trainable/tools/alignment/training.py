"""Train a stage with TRL's trainer, from its newest checkpoint, and write the trained model."""

from __future__ import annotations

import logging
import math
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_trainable.plugins import one_line
from grpo_trainable.storage.atomic import new_directory
from grpo_trainable.tools.alignment.run import CHECKPOINTS, Run
from grpo_trainable.tools.alignment.trainer_settings import own_defaults

DRAWN_EVERY_S = 0.5  # seconds between updates of the progress bar


class RefusedByTRL(ValueError):
    """TRL cannot train with these settings and rows. The message is one line."""


class Diverged(RuntimeError):
    """The loss is not a number any more. The message is one line."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the training after a checkpoint. The message says which step it reached."""


def build_trainer(run: Run) -> Any:
    """Return TRL's trainer, with the data tokenized and the model loaded.

    Raises:
        RefusedByTRL: If TRL refuses a setting or a row, or drops every row because of its length.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    # Otherwise a resume warns that eval_steps, which is a share of all steps, was a number.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    try:
        trainer = _trainer(run)
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise RefusedByTRL(f"{run.stage.trainer} of TRL: {one_line(error)}") from error
    if not (len(trainer.train_dataset) and len(trainer.eval_dataset)):
        raise RefusedByTRL(
            "no row to train on, or no held-out row, fits into "
            f"max_length={trainer.args.max_length}"
        )
    return trainer


def _trainer(run: Run) -> Any:
    fields = own_defaults(run.settings, run.context, gpu=torch.cuda.is_available())
    config = getattr(trl, run.stage.config)(
        output_dir=str(run.out / CHECKPOINTS), seed=run.seed, disable_tqdm=True, **fields
    )
    trainer = getattr(trl, run.stage.trainer)(
        model=str(run.model),
        args=config,
        train_dataset=datasets.Dataset.from_list(list(run.train.rows)),
        eval_dataset=datasets.Dataset.from_list(list(run.held_out.rows)),
        callbacks=[_Progress()],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every log as a dictionary
    return trainer


def dropped_rows(run: Run, trainer: Any) -> list[str]:
    """Return a note if TRL has dropped training rows that are too long."""
    count = len(run.train.rows)
    dropped = count - len(trainer.train_dataset)
    if not dropped or getattr(trainer.args, "packing", False):  # packed rows cannot be counted
        return []
    return [
        f"{dropped} of {count} training rows are longer than max_length={trainer.args.max_length}, "
        "so they are left out"
    ]


def train(run: Run, trainer: Any, checkpoint: Path | None) -> None:
    """Train to the end, and write the log and the model of the run.

    Args:
        run: The run.
        trainer: The result of `build_trainer`.
        checkpoint: The checkpoint to continue from, or None to start at the first step.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came. The last step has a checkpoint.
        Diverged: The loss is not a number.
        OSError: A file cannot be written.
    """
    with warnings.catch_warnings(), _stop_on_signal() as stop:
        # TRL uses a name that newer versions of transformers deprecate.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.state
    if stop.asked and state.global_step < state.max_steps:
        raise Interrupted(f"after step {state.global_step} of {state.max_steps}")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    run.write_training(
        {
            "steps": state.max_steps,
            "parameters": parameters,
            "beta": getattr(trainer.args, "beta", None),
            "max_length": trainer.args.max_length,
            "batch": trainer.args.per_device_eval_batch_size,
            "notes": dropped_rows(run, trainer),
            "log": state.log_history,
        }
    )
    # Trainer.save_model would also write a pickle of the settings.
    with new_directory(run.trained_model) as directory:
        trainer.model.save_pretrained(directory)
        trainer.processing_class.save_pretrained(directory)


class _StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends the training after the step in which a signal came."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Ask for a checkpoint and for the end."""
        if self.asked:
            control.should_save = control.should_training_stop = True


@contextmanager
def _stop_on_signal() -> Iterator[_StopOnSignal]:
    """Let the first Ctrl-C or SIGTERM stop the training, and the second one end it at once."""
    stop = _StopOnSignal()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        signal.signal(number, signal.default_int_handler)

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress(TrainerCallback):
    """Shows a bar on a terminal, and ends a training whose loss is not a number."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Open the bar at the step that the training continues from."""
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            unit="step",
            disable=None,
            mininterval=DRAWN_EVERY_S,
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Advance the bar."""
        self._bar.update(1)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Show that held-out rows are measured."""
        if self._bar is not None:
            self._bar.set_description_str("held-out rows", refresh=False)
            self._bar.update(0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Show the loss, or raise Diverged if it is not a number."""
        losses = {key: (logs or {}).get(key) for key in ("loss", "eval_loss")}
        for key, value in losses.items():
            if isinstance(value, float) and math.isnan(value):
                raise Diverged(
                    f"{key} is not a number at step {state.global_step}: use a smaller "
                    "learning_rate, or another --out"
                )
        if self._bar is not None:
            shown = [f"{key} {value:.3f}" for key, value in losses.items() if value is not None]
            self._bar.set_description_str("", refresh=False)
            self._bar.set_postfix_str(", ".join(shown[:1]), refresh=False)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Close the bar."""
        self._bar.close()
