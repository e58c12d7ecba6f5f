"""Train a stage with TRL's trainer, from its newest checkpoint, and write the trained model."""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_trainable.models.hf.json_files import has_chat_template
from grpo_trainable.plugins import one_line
from grpo_trainable.storage.atomic import new_directory
from grpo_trainable.tools.alignment.run import CHECKPOINTS, Run
from grpo_trainable.tools.alignment.trainer_settings import own_defaults

ROW = "row"  # column with the index of a held-out row; TRL keeps this column


class RefusedByTRL(ValueError):
    """TRL cannot train with these settings and rows. The message is one line."""


class Diverged(RuntimeError):
    """The loss is no longer a number. The message is one line."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the training after a checkpoint. The message names the last step."""


def build_trainer(run: Run) -> Any:
    """Return TRL's trainer, with the data tokenized and the model loaded.

    Raises:
        RefusedByTRL: If TRL refuses a setting or a row, or drops every row because of its length.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    # Our eval_steps is a share of all steps, but a checkpoint contains a number of steps. Without
    # this line, a resume would warn of the difference.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    # TRL uses a name that newer versions of transformers deprecate.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    fields = own_defaults(run.settings, run.context, gpu=torch.cuda.is_available())
    held_out = [{**row, ROW: i} for i, row in enumerate(run.held_out.rows)]
    try:
        tokenizer = _tokenizer(run)
        # TRL adds the end-of-text token to the rows as text. The tokenizer of an exported policy
        # would split that text.
        splits, tokenizer.split_special_tokens = tokenizer.split_special_tokens, False
        config = getattr(trl, run.stage.config)(
            output_dir=str(run.out / CHECKPOINTS),
            seed=run.seed,
            disable_tqdm=True,
            **fields,
        )
        trainer = getattr(trl, run.stage.trainer)(
            model=str(run.model),
            args=config,
            train_dataset=datasets.Dataset.from_list([dict(row) for row in run.train.rows]),
            eval_dataset=datasets.Dataset.from_list(held_out),
            processing_class=tokenizer,
        )
        tokenizer.split_special_tokens = splits
        trainer.remove_callback(transformers.PrinterCallback)  # it prints every metric
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise RefusedByTRL(f"{run.stage.trainer} of TRL: {one_line(error)}") from error
    if not (len(trainer.train_dataset) and len(trainer.eval_dataset)):
        raise RefusedByTRL(f"no training or held-out row fits into max_length={config.max_length}")
    return trainer


def _tokenizer(run: Run) -> Any:
    """Return the model's tokenizer. Drop the chat template if training does not use it."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        run.model, trust_remote_code=False, local_files_only=True
    )
    if _drops_template(run):
        tokenizer.chat_template = None
        tokenizer.init_kwargs.pop("chat_template", None)  # else `null` would be written
    return tokenizer


def _drops_template(run: Run) -> bool:
    """Return True if the model has a chat template, but the rows are texts.

    With its template, the written model would read prompts in a format on which it was not trained.
    A template that the user has set is kept.
    """
    given = run.settings.get("chat_template_path") is not None
    return not run.train.conversations and not given and has_chat_template(run.model)


def notes_on_data(run: Run, trainer: Any) -> list[str]:
    """Return notes about unused columns, shared rows, the chat template, and overlong rows."""
    unused = dict.fromkeys([*run.train.unused, *run.held_out.unused])
    notes = [f"columns that are not used: {', '.join(unused)}"] if unused else []
    trained = {json.dumps(row) for row in run.train.rows}
    if both := sum(json.dumps(row) in trained for row in run.held_out.rows):
        notes.append(
            f"{both} of {len(run.held_out.rows)} held-out rows are also trained on, so the "
            "held-out figures look too good"
        )
    if _drops_template(run):
        notes.append(
            "the rows are texts, so the model is trained and written without its chat template; to "
            "keep the template, write the rows as conversations"
        )
    if any(getattr(trainer.args, name, False) for name in ("packing", "eval_packing")):
        return notes  # packed rows cannot be counted
    parts = {
        "training": (run.train.rows, trainer.train_dataset),
        "held-out": (run.held_out.rows, trainer.eval_dataset),
    }
    return notes + [
        f"{len(rows) - len(kept)} of {len(rows)} {name} rows do not fit into "
        f"max_length={trainer.args.max_length}, so they are left out"
        for name, (rows, kept) in parts.items()
        if len(kept) < len(rows)
    ]


def train(trainer: Any, checkpoint: Path | None, began: Callable[[], object]) -> None:
    """Train up to the last step.

    Args:
        trainer: The result of `build_trainer`.
        checkpoint: The checkpoint to continue from, or None to start at the first step.
        began: Called before the first step, once the trainer and its trackers have started.

    Raises:
        RefusedByTRL: The trainer or a tracker of `report_to` cannot start.
        Interrupted: Ctrl-C or SIGTERM came. The last step has a checkpoint.
        Diverged: The loss is not a number.
        OSError: A file cannot be written.
    """
    with _stop_on_signal() as callback:
        callback.began = began
        trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except Exception as error:
            if callback.has_begun:
                raise
            raise RefusedByTRL(f"the training cannot start: {one_line(error)}") from error
    state = trainer.state
    if callback.asked and state.global_step < state.max_steps:
        raise Interrupted(f"after step {state.global_step} of {state.max_steps}")


def save_model(run: Run, trainer: Any) -> None:
    """Write the trained model and its tokenizer as safetensors and JSON."""
    # Trainer.save_model would also write a pickle of the settings.
    with new_directory(run.trained_model) as directory:
        trainer.model.save_pretrained(directory)
        trainer.processing_class.save_pretrained(directory)


class Watch(TrainerCallback):
    """Prints each loss, and ends the training after a signal or if a loss is not a number."""

    asked = False  # True: a signal came
    has_begun = False  # True: the callbacks of all trackers have started
    began: Callable[[], object]

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Record that the trackers' callbacks, which come before this one, have started."""
        self.has_begun = True
        self.began()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """After a signal, ask for a checkpoint and stop the training."""
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Print a loss, or raise Diverged if it is not a number."""
        for key, name in (("loss", "loss"), ("eval_loss", "held-out loss")):
            loss = (logs or {}).get(key)
            if loss is None:
                continue
            if math.isnan(loss):
                raise Diverged(
                    f"the {name} is not a number at step {state.global_step}: use a smaller "
                    "learning_rate, and another --out"
                )
            print(f"step {state.global_step} of {state.max_steps}: {name} {loss:.4g}", flush=True)


@contextmanager
def _stop_on_signal() -> Iterator[Watch]:
    """Let the first Ctrl-C or SIGTERM stop the training, and the second one end it at once."""
    callback = Watch()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, frame: FrameType | None) -> None:
        callback.asked = True
        signal.signal(number, signal.default_int_handler)

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield callback
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
