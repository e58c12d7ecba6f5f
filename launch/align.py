"""Train a model with TRL: fine-tuning, a reward model, or DPO.

python launch/align.py sft --model MODEL --train-file answers.jsonl --out sft
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable import __version__, command_line
from grpo_trainable.command_line import FAILED, INTERRUPTED, OK, Parser, UsageError, number
from grpo_trainable.plugins import missing_library
from grpo_trainable.storage.digests import digest_of
from grpo_trainable.text import plural
from grpo_trainable.tools.alignment.stages import STAGES

if TYPE_CHECKING:
    from grpo_trainable.tools.alignment.rows import Rows
    from grpo_trainable.tools.alignment.run import Run

DESCRIPTION = """\
Train a Hugging Face model with a trainer of TRL, and write to OUT:

  model/         the trained model and its tokenizer (safetensors)
  report.html    loss, accuracy, margins and examples on one page
  result.json, held_out.jsonl    the figures, and every held-out row with its scores
  checkpoints/, tensorboard/     TRL's checkpoints, and its log for TensorBoard

Stages:

  sft            fine-tunes a language model on responses (SFTTrainer)
  reward-model   trains a model that scores responses, on pairs (RewardTrainer)
  dpo            trains a policy on pairs, without a reward model (DPOTrainer)

After an interruption or a crash, the same command continues from the newest checkpoint. The
command never contacts the Hugging Face hub."""
EXAMPLES = """\
examples:
  python launch/align.py sft --model MODEL --train-file answers.jsonl --out sft
  python launch/align.py reward-model --model sft/model --train-file pairs.jsonl --out reward
  python launch/align.py dpo --model sft/model --train-file pairs.jsonl --out dpo --set beta=0.2

exit status: 0 OUT is complete, 1 the training failed, 2 bad usage (nothing was trained),
130 interrupted"""
INSTALL = "pip install -e '.[align]'"
PACKAGES = ("accelerate", "datasets", "torch", "transformers", "trl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("align", lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options of the command."""
    parser = Parser(
        prog=command_line.program("align"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace(
            "python launch/align.py", shlex.join(command_line.command("align"))
        ),
    )
    add = parser.add_argument
    add("stage", choices=STAGES, help="the kind of training")
    add(
        "--model",
        metavar="PATH",
        required=True,
        help="directory of a Hugging Face model, or the hub name of a model that is already "
        "downloaded",
    )
    add(
        "--train-file",
        metavar="FILE",
        required=True,
        help="JSONL or Parquet file with the rows to train on. Columns for sft: prompt and "
        "completion, or messages, or text. Columns for the other stages: chosen and rejected, with "
        "or without prompt. Values are texts or lists of messages",
    )
    add(
        "--eval-file",
        metavar="FILE",
        help="file with the held-out rows (default: a tenth of the rows of --train-file, but at "
        "most 1,000 rows)",
    )
    add(
        "--out",
        metavar="OUT",
        required=True,
        help="new directory, or the directory of an interrupted run",
    )
    add(
        "--seed",
        metavar="N",
        type=number(int, 0, 2**32 - 1),
        default=0,
        help="seed for the choice of the held-out rows, for the order of the rows, and for the "
        "initial weights of a reward model's head (0)",
    )
    add(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a field of TRL's SFTConfig, RewardConfig or DPOConfig, for example "
        "learning_rate=1e-5 or num_train_epochs=1; may be given more than once",
    )
    return parser.parse_args(argv)


def _main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    # The libraries read these variables at import.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        run = _planned(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with _held(run) as is_new, command_line.output_dropped_on_error():
        if run.trained_model.is_dir():
            print(f"{run.out}: is already complete")
        else:
            status = _train(run, argv, is_new=is_new)
            if status != OK:
                return status
        _print_answer(run)
        return OK


def _planned(args: argparse.Namespace) -> Run:
    """Check the options and files, and return the run.

    Raises:
        ValueError: An option or a file is wrong. The message is one line.
    """
    from grpo_trainable.models.hf.json_files import context_length, text_config
    from grpo_trainable.tools.alignment.base_model import base_model
    from grpo_trainable.tools.alignment.run import Run
    from grpo_trainable.tools.alignment.trainer_settings import (
        converted,
        refuse_beyond_context,
        split_assignments,
    )

    stage = STAGES[args.stage]
    texts = split_assignments(args.assignments)
    _refuse_missing_extra()
    try:
        model = base_model(os.path.expanduser(args.model), stage)
    except ValueError as error:
        raise ValueError(f"--model {error}") from None
    train, held_out = _rows(args, model, template="chat_template_path" in texts)
    import trl  # pyright: ignore[reportMissingImports]

    context = context_length(text_config(model))
    settings = converted(getattr(trl, stage.config), texts)
    refuse_beyond_context(settings, context)
    return Run(
        stage=stage,
        model=model,
        train=train,
        held_out=held_out,
        seed=args.seed,
        context=context,
        settings=settings,
        asked=_asked(args, model, texts),
        out=Path(args.out).expanduser().absolute(),
    )


def _refuse_missing_extra() -> None:
    missing = missing_library("trl", INSTALL)
    if missing is not None:
        old = sys.version_info < (3, 11)
        raise ValueError(f"{missing}{' with Python 3.11 or newer' if old else ''}")


def _rows(args: argparse.Namespace, model: Path, *, template: bool) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows.

    Args:
        args: The options.
        model: The directory of the model.
        template: True: a setting names the chat template.
    """
    from grpo_trainable.tools.alignment.base_model import refuse_missing_template
    from grpo_trainable.tools.alignment.rows import hold_out, read_rows

    stage = STAGES[args.stage]
    train = read_rows("--train-file", args.train_file, stage)
    if args.eval_file is None:
        try:
            train, held_out = hold_out(train, args.seed)
        except ValueError as error:
            raise ValueError(f"--train-file {args.train_file}: {error}") from None
    else:
        held_out = read_rows("--eval-file", args.eval_file, stage)
        if held_out.layout != train.layout:
            raise ValueError(
                f"--eval-file {args.eval_file}: has rows of {held_out.layout}, but --train-file "
                f"has rows of {train.layout}"
            )
    if train.conversations and not template:
        refuse_missing_template(model)
    return train, held_out


def _asked(
    args: argparse.Namespace, model: Path, texts: Mapping[str, str]
) -> dict[str, str | int | None]:
    """Return everything that determines the result."""
    from grpo_trainable.models.hf.files import model_files
    from grpo_trainable.tasks.row_files import data_files

    asked: dict[str, str | int | None] = {
        "stage": args.stage,
        "model": str(model),
        "train_file": os.path.abspath(args.train_file),
        "eval_file": None if args.eval_file is None else os.path.abspath(args.eval_file),
        "seed": args.seed,
    }
    asked |= {f"--set {key}": text for key, text in texts.items()}
    digests = {f"model/{name}": digest_of("--model", model / name) for name in model_files(model)}
    for key, path in (("train_file", args.train_file), ("eval_file", args.eval_file)):
        if path is not None:
            files = data_files(key, path).items()
            digests |= {name.removeprefix("task."): digest_of(key, file) for name, file in files}
    return asked | {f"SHA-256 of {name}": digest for name, digest in digests.items()}


@contextmanager
def _held(run: Run) -> Iterator[bool]:
    """Make the directory of the run and hold a lock on it. Yield True if the directory is new."""
    from grpo_trainable.tools.alignment.run import ASKED
    from tuning.directories import held

    try:
        is_new = run.begin()
    except ValueError as error:
        raise UsageError(f"--out {error}") from None
    except OSError as error:
        raise UsageError(f"--out {error.filename or run.out}: {error.strerror or error}") from None
    with held(run.out, ASKED):
        yield is_new


def _train(run: Run, argv: Sequence[str], *, is_new: bool) -> int:
    """Train, measure and write the result."""
    from grpo_trainable.tools.alignment.run import TENSORBOARD

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.out / TENSORBOARD)
    from grpo_trainable.tools.alignment.training import (
        Diverged,
        Interrupted,
        RefusedByTRL,
        build_trainer,
        notes_on_data,
        train,
    )

    checkpoint = run.newest_checkpoint()
    try:
        trainer = build_trainer(run)
    except RefusedByTRL as error:
        if is_new:
            run.abandon()  # so the corrected command can use the same directory
        raise UsageError(str(error)) from None
    begun = "" if checkpoint is None else f", from {checkpoint.name}"
    notes = notes_on_data(run, trainer)

    def announce() -> None:
        print(
            f"{run.stage.name}: {plural(len(run.train.rows), 'row')} to train on, "
            f"{len(run.held_out.rows)} held out, on {trainer.args.device.type}{begun}",
            *notes,
            sep="\n",
            flush=True,
        )

    name = command_line.program("align")
    try:
        train(trainer, checkpoint, announce)
        _finish(run, trainer, notes, argv)
    except RefusedByTRL as error:
        if is_new:
            run.abandon()
        raise UsageError(str(error)) from None
    except Interrupted as stopped:
        print(
            f"{name}: interrupted {stopped}; the same command continues from there", file=sys.stderr
        )
        return INTERRUPTED
    except Diverged as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(
            f"{name}: {error}; the same command continues from the newest checkpoint",
            file=sys.stderr,
        )
        return FAILED
    return OK


def _finish(run: Run, trainer: Any, notes: Sequence[str], argv: Sequence[str]) -> None:
    """Measure the trained model, and write the result and the model."""
    from grpo_trainable.tools.alignment.measuring import measure
    from grpo_trainable.tools.alignment.training import save_model
    from reports.alignment.files import write_result
    from reports.alignment.record import AlignmentRecord

    record = AlignmentRecord(
        name=run.out.name,
        asked=run.asked,
        train_rows=len(run.train.rows),
        steps=trainer.state.max_steps,
        parameters=trainer.model.num_parameters(),
        log=trainer.state.log_history,
        held_out=measure(run, trainer),
        notes=notes,
        origin=_origin(argv),
    )
    write_result(run.out, record)
    save_model(run, trainer)


def _origin(argv: Sequence[str]) -> dict[str, Any]:
    from reports.evaluations.files import running_commit

    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([*command_line.command("align"), *argv]),
        "grpo_trainable": __version__,
        "commit": running_commit(),
        "packages": {"python": platform.python_version(), **packages},
        "machine": platform.platform(),
    }


def _print_answer(run: Run) -> None:
    """Print the result of a complete run in one sentence, then the paths of its files."""
    from reports.alignment.files import PAGE

    print(run.read_result()["answer"])
    print(run.out / PAGE)
    print(run.trained_model)
    path = shlex.quote(str(run.trained_model))
    if run.stage.writes_text:
        print(f"to train from it: --set model.path={path}", flush=True)
    else:
        print(f"to train on its rewards: --set task.reward=model:{path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
