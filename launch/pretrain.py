"""Makes a policy to start GRPO from: corpus, tokenizer, weights and a card that says how good.

    python launch/pretrain.py --out DIR                   the story policy, about 10 minutes
    python launch/pretrain.py --out DIR --corpus FILE     one of your own texts

The story corpus comes in an order, and the order is what makes it work: documents that all hold
their keyword teach copying; then come documents of which only a share holds it, and that share sets
the inclusion rate that GRPO starts from. Without the first ones the policy is fluent but never
copies, and GRPO learns nothing. All are of one length, so that nothing but the keyword itself tells
a story that holds it from one that does not.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from grpo_trainable import command_line
from grpo_trainable.actors.process import keep_freed_memory
from grpo_trainable.command_line import Parser, UsageError, number
from grpo_trainable.models.transformer import PRESETS
from grpo_trainable.pretraining.corpus import HELD_OUT_SHARE
from grpo_trainable.pretraining.pretrain import pretrain
from grpo_trainable.pretraining.recipe import Recipe
from grpo_trainable.pretraining.training import DECAY_SHARE


def _parser() -> argparse.ArgumentParser:
    default = Recipe()
    command = shlex.join(command_line.command("pretrain"))
    parser = Parser(
        prog=command_line.program("pretrain"),
        description=(__doc__ or "").replace("python launch/pretrain.py", command),
        epilog=f"Use the result with: {shlex.join(command_line.command('tune'))} "
        "--set model.path=DIR\n"
        "The card (DIR/card.md) says how fluent the policy is and how often it includes its "
        "keyword:\nthat must be neither 0 nor 1, since GRPO learns from differences between "
        "responses to one prompt.",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="where config.json, policy.safetensors (float16), tokenizer.json, card.json and "
        "card.md go; files of those names there are replaced",
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        help="JSONL, one object a line with `prompt` and `response`, instead of our stories; used "
        f"in random order, {HELD_OUT_SHARE:.0%}% of it held out to measure the loss. Texts are cut "
        "to the model's context",
    )
    parser.add_argument(
        "--steps",
        type=number(int, 1),
        default=default.steps,
        metavar="N",
        help=f"gradient steps (default {default.steps}); fewer make a worse policy sooner",
    )
    parser.add_argument(
        "--batch-size",
        type=number(int, 1),
        default=default.batch_size,
        metavar="N",
        help=f"documents a step (default {default.batch_size})",
    )
    parser.add_argument(
        "--lr",
        type=number(float, 1e-8, 1),
        default=default.lr,
        metavar="X",
        help=f"peak learning rate (default {default.lr:g}); it falls over the last "
        f"{DECAY_SHARE:.0%}% of the steps",
    )
    parser.add_argument(
        "--front-share",
        type=number(float, 0, 1),
        default=default.front_share,
        metavar="X",
        help="share of the story corpus that comes first and always holds its keywords: copying is "
        f"learned from it (default {default.front_share:g})",
    )
    parser.add_argument(
        "--keyword-share",
        type=number(float, 0, 1),
        default=default.keyword_share,
        metavar="X",
        help="share of the later documents that hold their keywords: it sets the inclusion rate "
        f"that GRPO starts from (default {default.keyword_share:g})",
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default=default.preset,
        help=f"shape of the policy (default {default.preset}, about a million parameters)",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0, 2**32 - 1),
        default=default.seed,
        metavar="N",
        help="of corpus, weights and order: the same seed and thread count give the same bits on "
        f"one machine (default {default.seed})",
    )
    parser.add_argument(
        "--threads",
        type=number(int, 1),
        default=1,
        metavar="N",
        help="CPU threads (default 1)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.run("pretrain", lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> None:
    args = _parser().parse_args(argv)
    # Inside tokenizers too: otherwise it starts a thread a core.
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name in asdict(Recipe())}
    command = shlex.join(["python", "launch/pretrain.py", *argv])
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        card = pretrain(out, Recipe(**settings), args.corpus, command)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(
        f"held-out loss {card['held_out_loss_nats']:.3f} nats/token, held-out keywords included in "
        f"{card['held_out_inclusion_rate']:.3f} of {card['held_out_inclusion_responses']} responses"
    )
    print(f"{out}/card.md has samples; use it with: --set model.path={shlex.quote(str(out))}")


if __name__ == "__main__":
    sys.exit(main())
