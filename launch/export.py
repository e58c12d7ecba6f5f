"""Write a trained policy as a Hugging Face directory, or its adapters as a peft directory.

python launch/export.py ~/ray_results/lag/GRPO_x/checkpoint_000003 my_model
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, UsageError
from grpo_trainable.text import plural
from grpo_trainable.tools.export import Exported, ExportError, export, export_adapters
from tuning.directories import directory_named

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath

DESCRIPTION = """\
Write the policy of a checkpoint to the directory OUT, in the form that transformers and vLLM load:

  AutoModelForCausalLM.from_pretrained("OUT"), AutoTokenizer.from_pretrained("OUT")

A policy of this package becomes a Llama. A Hugging Face model keeps its architecture, tokenizer and
chat template. LoRA adapters are merged into the model. With --adapters, only the adapters are
written:

  PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "OUT")"""
EXAMPLES = """\
examples:
  python launch/export.py ~/ray_results/lag/GRPO_x/checkpoint_000003 my_model
  python launch/export.py ~/ray_results/lag/GRPO_x my_model --dtype bfloat16
  python launch/export.py ~/ray_results/lag/GRPO_x my_adapters --adapters

exit status: 0 OUT is written, 2 there is nothing to export or OUT cannot be written"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("export", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    args = _arguments(argv)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    out = Path(args.out).expanduser()
    try:
        write = export_adapters if args.adapters else export
        done = write(_source(args.checkpoint), out, dtype)
    except ExportError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror or error}") from None
    print(_summary(done, out))


def _source(text: str) -> AnyPath:
    try:
        return directory_named(text)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    command = shlex.join(command_line.command("export"))
    parser = Parser(
        prog=command_line.program("export"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/export.py", command),
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint, or the directory of a trial (for its newest complete checkpoint); both "
        "may be in an object store (s3://BUCKET/PATH). A policy that pretrain.py wrote also works",
    )
    parser.add_argument("out", metavar="OUT", help="directory to write to, new or empty")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the LoRA adapters, in the format of peft; needs a trial that trained "
        "adapters (model.lora_rank)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type in which weights are stored (default: the type in which the policy was trained)",
    )
    return parser.parse_args(argv)


def _summary(done: Exported, out: Path) -> str:
    dtype = str(done.dtype).removeprefix("torch.")
    trained = "" if done.round is None else f", trained for {plural(done.round, 'round')}"
    return (
        f"{done.source}{trained}\n{out}: {done.architecture}, {done.parameters:,} parameters "
        f"in {dtype}\nto train from it: --set model.path={shlex.quote(str(out))}"
    )


if __name__ == "__main__":
    sys.exit(main())
