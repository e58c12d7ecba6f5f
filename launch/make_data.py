"""Write a prompt set with a language model.

python launch/make_data.py keyword my_prompts --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, UsageError, number
from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords
from grpo_trainable.text import plural
from grpo_trainable.tools.prompt_sets.endpoint import Endpoint, EndpointError, EndpointWriter
from grpo_trainable.tools.prompt_sets.keyword import MOST_ATTEMPTS, Item, items
from grpo_trainable.tools.prompt_sets.making import EVAL, TRAIN, Made, PromptSet, Writer

DESCRIPTION = """\
Let a language model write prompts for the keyword task. Each prompt requests a story with given
keywords. The command writes train.jsonl, eval.jsonl and prompts.parquet to OUT. A fifth of the
prompts are held out; a hash of the keywords decides which. If prompts differ only in case or
punctuation, only one of them is kept. If the command is killed, run the same command again to
continue."""
EXAMPLES = """\
examples:
  python launch/make_data.py keyword my_prompts --model Qwen/Qwen2.5-0.5B-Instruct
  python launch/make_data.py keyword my_prompts --endpoint http://localhost:8000/v1 --named qwen
  python launch/tune.py --space async_vs_sync --set task.train_file=my_prompts/train.jsonl \\
      --set task.eval_file=my_prompts/eval.jsonl

exit status: 0 the set is written, 1 the model or its endpoint failed (prompts so far are kept),
2 bad usage, 130 interrupted (the same command continues)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("make_data", lambda: _main(argv))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed options of the command."""
    tune, own = (shlex.join(command_line.command(name)) for name in ("tune", "make_data"))
    examples = EXAMPLES.replace("python launch/tune.py", tune)
    parser = Parser(
        prog=command_line.program("make_data"),
        description=DESCRIPTION,
        epilog=examples.replace("python launch/make_data.py", own),
    )
    add = parser.add_argument
    add("task", metavar="TASK", choices=("keyword",), help="task that the prompts are for: keyword")
    add("out", metavar="OUT", help="directory to write to: new, or left by an interrupted run")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model",
        metavar="PATH",
        help="directory of a Hugging Face causal language model, or its name on the hub",
    )
    model.add_argument(
        "--endpoint",
        metavar="URL",
        help="URL of an OpenAI-compatible endpoint, up to and including /v1; its key is read from "
        "the environment",
    )
    add("--named", metavar="NAME", help="name of the model at the endpoint")
    add("--words", metavar="FILE", help="UTF-8 file of keywords, one per line (the shipped nouns)")
    add(
        "--prompts",
        metavar="N",
        type=number(int, 1),
        default=1000,
        help="number of prompts to write (1000)",
    )
    add(
        "--keywords-per-prompt",
        metavar="N",
        type=number(int, 1),
        default=1,
        help="keywords in each prompt (1)",
    )
    add(
        "--seed",
        metavar="N",
        type=number(int, 0, 2**32 - 1),
        default=0,
        help="seed for the order of the keywords and for sampling (0)",
    )
    add(
        "--temperature",
        metavar="X",
        type=number(float, 0.01),
        default=0.8,
        help="sampling temperature (0.8)",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=number(int, 1),
        default=80,
        help="maximum number of tokens in an answer (80)",
    )
    add(
        "--attempts",
        metavar="N",
        type=number(int, 1, MOST_ATTEMPTS),
        default=4,
        help="maximum number of attempts per prompt; an attempt succeeds if the first line of the "
        "answer has 15 to 400 characters and contains every keyword (4)",
    )
    add("--batch", metavar="N", type=number(int, 1), default=32, help="prompts per batch (32)")
    add(
        "--no-chat",
        action="store_true",
        help="with --model: instead of chat messages, give the model examples to continue; for a "
        "model without a chat template",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="with --model: device that the model runs on (cpu)",
    )
    add(
        "--key-variable",
        metavar="NAME",
        default="OPENAI_API_KEY",
        help="with --endpoint: environment variable that holds the API key; the variable may be "
        "unset (OPENAI_API_KEY)",
    )
    add(
        "--workers",
        metavar="N",
        type=number(int, 1, 256),
        default=8,
        help="with --endpoint: number of simultaneous requests (8)",
    )
    add(
        "--per-minute",
        metavar="N",
        type=number(float, 0.01),
        help="with --endpoint: maximum number of requests per minute",
    )
    add(
        "--timeout",
        metavar="S",
        type=number(float, 0.01),
        default=60.0,
        help="with --endpoint: maximum number of seconds for an answer (60)",
    )
    add(
        "--retries",
        metavar="N",
        type=number(int, 0),
        default=5,
        help="with --endpoint: number of retries after a temporary failure, with increasing "
        "delays (5)",
    )
    return parser.parse_args(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = parse_arguments(argv)
    if args.endpoint is not None and args.named is None:
        raise UsageError("--endpoint needs --named, the name of the model at the endpoint")
    out = Path(args.out).expanduser()
    try:
        wanted = _items(args)
        with closing(_writer(args)) as writer:  # an error here leaves no file behind
            prompts = PromptSet(out, _asked(args, wanted), wanted)
            _write(prompts, writer, args, len(wanted))
            made = prompts.finish()
    except EndpointError as error:
        print(f"{command_line.program('make_data')}: {error}", file=sys.stderr)
        print(
            "the prompts so far are kept; run the same command again to continue", file=sys.stderr
        )
        return command_line.FAILED
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror or error}") from None
    print(_summary(made, out))
    return command_line.OK


def _items(args: argparse.Namespace) -> list[Item]:
    try:
        words = read_keywords(args.words or NOUNS_FILE)
    except ValueError as error:  # the error names the task's setting, not the option
        raise ValueError(str(error).replace("task.keywords_file=", "--words ")) from None
    return list(items(words, args.prompts, args.keywords_per_prompt, args.seed))


def _asked(args: argparse.Namespace, wanted: Sequence[Item]) -> dict[str, object]:
    """Return the options and the keywords that determine the prompt set.

    The options for reaching an endpoint are not included, because they may change between two runs.
    """
    return {
        "task": args.task,
        "model": args.model or args.named,
        "chat": not args.no_chat,
        "seed": args.seed,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "attempts": args.attempts,
        "keywords": [list(item.keywords) for item in wanted],
    }


def _writer(args: argparse.Namespace) -> Writer:
    if args.endpoint is not None:
        endpoint = Endpoint(
            url=args.endpoint,
            model=args.named,
            key=os.environ.get(args.key_variable),
            timeout_s=args.timeout,
            retries=args.retries,
            per_minute=args.per_minute,
        )
        return EndpointWriter(
            endpoint,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            workers=args.workers,
        )
    from grpo_trainable.engines.engine import EngineError
    from grpo_trainable.tools.prompt_sets.local import LocalWriter

    try:
        return LocalWriter(
            args.model,
            chat=not args.no_chat,
            seed=args.seed,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            device=args.device,
        )
    except EngineError as error:
        raise ValueError(str(error)) from None


def _write(prompts: PromptSet, writer: Writer, args: argparse.Namespace, total: int) -> None:
    from tqdm import tqdm

    with tqdm(total=total, initial=prompts.done, unit="prompt") as bar:
        prompts.write(writer, batch=args.batch, attempts=args.attempts, progress=bar.update)


def _summary(made: Made, out: Path) -> str:
    train, held_out = (shlex.quote(str(out / name)) for name in (TRAIN, EVAL))
    return (
        f"{out}: {plural(made.train, 'prompt')} to train on, {made.eval} held out; left out: "
        f"{plural(made.repeated, 'repeated prompt')}, {made.rejected} without a usable answer\n"
        f"to train on them: --set task.train_file={train} --set task.eval_file={held_out}"
    )


if __name__ == "__main__":
    sys.exit(main())
