"""Make a policy to start GRPO from: corpus, tokenizer, weights, and a card that states its quality.

    python launch/pretrain.py --out DIR                        writes stories (about 10 minutes)
    python launch/pretrain.py --out DIR --corpus arithmetic    solves word problems (10 minutes)
    python launch/pretrain.py --out DIR --corpus games         makes random moves (about 1 minute)
    python launch/pretrain.py --out DIR --corpus FILE          learns your own texts

The order of the story corpus matters. In the first part, every document contains its keyword, so
the policy learns to copy. In the later part, only a share of the documents contain their keyword.
That share sets the inclusion rate that GRPO starts from. Without the first part, the policy is
fluent but never copies, and GRPO learns nothing. All documents have the same length, so stories
with and without their keyword differ only in the keyword.

The games corpus contains episodes of two kinds: a guessing game, and questions that may be answered
with a calculator. The players make random legal moves. A share of them use the hints of the game or
the results of the calculator.

The arithmetic corpus consists of word problems, each with a step-by-step calculation and the
answer. In the first part, every document is correct, so the policy learns to calculate. In the
later part, only a share of the calculations are correct, and only a share of the answers are marked
as the reward requires. So the policy can calculate but does not always do so, and GRPO can change
this.
The problems for training and for evaluation are written to the policy's directory, as train.jsonl
and heldout.jsonl.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, UsageError, number
from grpo_trainable.models.model_config import PRESETS
from grpo_trainable.telemetry.actor_process import keep_freed_memory
from grpo_trainable.tools.pretraining.corpus import Corpus
from grpo_trainable.tools.pretraining.file_corpus import HELD_OUT_SHARE
from grpo_trainable.tools.pretraining.pretrain import make_corpus, pretrain
from grpo_trainable.tools.pretraining.recipe import (
    RECIPES,
    ArithmeticRecipe,
    GamesRecipe,
    Recipe,
    StoryRecipe,
)
from grpo_trainable.tools.pretraining.training import DECAY_SHARE


def _parser() -> argparse.ArgumentParser:
    command = shlex.join(command_line.command("pretrain"))
    parser = Parser(
        prog=command_line.program("pretrain"),
        description=(__doc__ or "").replace("python launch/pretrain.py", command),
        epilog=f"Use the result with: {shlex.join(command_line.command('tune'))} "
        "--set model.path=DIR\n"
        "The card (DIR/card.md) says how fluent the policy is and how often it earns the reward.\n"
        "This rate must be neither 0 nor 1, because GRPO learns from differences between responses "
        "to one prompt.",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="directory for config.json, policy.safetensors (float16), tokenizer.json, card.json "
        "and card.md; existing files with these names are replaced",
    )
    parser.add_argument(
        "--corpus",
        metavar="NAME|FILE",
        default="stories",
        help=f"{', '.join(RECIPES)} (default stories), or a JSONL file, one object per line with "
        f"`prompt` and `response`. Its lines are used in random order, and {HELD_OUT_SHARE:.0%}% "
        "of them are held out to measure the loss. Texts are cut to the model's context length",
    )
    _add_general(parser)
    _add_of_corpora(parser)
    parser.add_argument(
        "--threads",
        type=number(int, 1),
        default=1,
        metavar="N",
        help="CPU threads (default 1)",
    )
    return parser


def _add_general(parser: argparse.ArgumentParser) -> None:
    """Add the options that every recipe has."""
    parser.add_argument(
        "--steps",
        type=number(int, 1),
        metavar="N",
        help=f"gradient steps ({_defaults('steps')}); fewer steps take less time and make a worse "
        "policy",
    )
    parser.add_argument(
        "--batch-size",
        type=number(int, 1),
        metavar="N",
        help=f"documents per step ({_defaults('batch_size')})",
    )
    parser.add_argument(
        "--lr",
        type=number(float, 1e-8, 1),
        metavar="X",
        help=f"peak learning rate ({_defaults('lr')}); it falls over the last {DECAY_SHARE:.0%}% "
        "of the steps",
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help=f"shape of the policy ({_defaults('preset')}, about a million parameters)",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0, 2**32 - 1),
        metavar="N",
        help="seed for the corpus, its order and the weights; the same seed and number of threads "
        f"give the same bits on one machine ({_defaults('seed')})",
    )


def _add_of_corpora(parser: argparse.ArgumentParser) -> None:
    """Add the options that belong to one corpus."""
    stories, arithmetic, games = StoryRecipe(), ArithmeticRecipe(), GamesRecipe()
    parser.add_argument(
        "--front-share",
        type=number(float, 0, 1),
        metavar="X",
        help="share of the documents that are in the first part, where every document earns the "
        f"reward and so teaches copying or calculating ({_defaults('front_share')})",
    )
    parser.add_argument(
        "--keyword-share",
        type=number(float, 0, 1),
        metavar="X",
        help="share of the later stories that contain their keywords, which sets the inclusion "
        f"rate that GRPO starts from (default {stories.keyword_share:g})",
    )
    parser.add_argument(
        "--largest",
        type=number(int, 10, 999),
        metavar="N",
        help=f"largest number in a word problem, results included (default {arithmetic.largest})",
    )
    parser.add_argument(
        "--operations",
        type=number(int, 1, 3),
        metavar="N",
        help=f"largest number of operations in a word problem (default {arithmetic.operations})",
    )
    parser.add_argument(
        "--careful-share",
        type=number(float, 0, 1),
        metavar="X",
        help="share of the later word problems that are calculated correctly (default "
        f"{arithmetic.careful_share:g})",
    )
    parser.add_argument(
        "--format-share",
        type=number(float, 0, 1),
        metavar="X",
        help="share of the later word problems whose answer is marked as the reward requires "
        f"(default {arithmetic.format_share:g})",
    )
    for option, what, default in (
        ("listening", "players of the guessing game who follow its hints", games.listening_share),
        (
            "calling",
            "players with a calculator who call it before they answer",
            games.calling_share,
        ),
        (
            "copying",
            "calculator calls after which the player answers with the result",
            games.copying_share,
        ),
    ):
        parser.add_argument(
            f"--{option}-share",
            type=number(float, 0, 1),
            metavar="X",
            help=f"share of {what} (default {default:g})",
        )


def _defaults(setting: str) -> str:
    """Return the default of a setting, followed by the corpora that have a different default."""
    stories = getattr(StoryRecipe(), setting)
    others = {name: getattr(made(), setting, stories) for name, made in RECIPES.items()}
    own = (f", {_plain(value)} for {name}" for name, value in others.items() if value != stories)
    return f"default {_plain(stories)}{''.join(own)}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("pretrain", lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> None:
    args = _parser().parse_args(argv)
    recipe = _recipe(args)
    # This also limits the tokenizers library, which would start one thread per core.
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    command = shlex.join(["python", "launch/pretrain.py", *argv])
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        corpus = make_corpus(args.corpus, recipe)
        measured = pretrain(out, recipe, corpus, command)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(measured.headline)
    print(f"{out}/card.md contains samples. To train from this policy: {_use(out, corpus)}")


def _use(out: Path, corpus: Corpus) -> str:
    """Return the options of a trial that starts from the policy."""
    settings = {"model.path": "{out}", **corpus.settings}
    given = (f"{key}={value.format(out=out)}" for key, value in settings.items())
    return shlex.join(word for setting in given for word in ("--set", setting))


def _recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe of the chosen corpus with the given settings.

    Raises:
        UsageError: A setting belongs to another corpus.
    """
    kind = RECIPES.get(args.corpus, Recipe)
    known = {name: {item.name for item in fields(made)} for name, made in RECIPES.items()}
    options = vars(args).items()
    settings = set().union(*known.values())
    given = {name: value for name, value in options if name in settings and value is not None}
    for name in given.keys() - {item.name for item in fields(kind)}:
        corpora = " or ".join(corpus for corpus, names in known.items() if name in names)
        raise UsageError(
            f"--{name.replace('_', '-')}: has no effect with --corpus {args.corpus}; needs "
            f"--corpus {corpora}"
        )
    return kind(**given)


if __name__ == "__main__":
    sys.exit(main())
