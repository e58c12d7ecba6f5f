"""Evaluate one policy on held-out prompts of a task, and write figures, responses and a page.

python launch/evaluate.py --checkpoint ~/ray_results/NAME/TRIAL --samples 8
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable import __version__, command_line
from grpo_trainable.command_line import FAILED, OK, Parser, UsageError, number
from grpo_trainable.config import CHECKS
from grpo_trainable.config.conditions import CONTROL
from grpo_trainable.config.parsing import advice_for_option
from grpo_trainable.text import plural

if TYPE_CHECKING:
    from grpo_trainable.config import GRPOConfig
    from grpo_trainable.storage.object_store import AnyPath
    from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy
    from grpo_trainable.tools.evaluation.evaluator import Evaluator
    from grpo_trainable.tools.evaluation.generation import Generation
    from reports.evaluations.record import EvaluationRecord

DESCRIPTION = """\
Sample responses of one policy to the held-out prompts of a task, score them, and write to OUT:

  evaluation.json                          mean reward, pass@k, majority@k, each with an interval
  generations.parquet, generations.jsonl   every response with its scores
  categories.md                            up to ten responses of each category (right, wrong, …)
  evaluation.html                          all of this as a page with filters

A checkpoint is evaluated with the settings of its trial, so the reward of the last checkpoint
equals the reward of the trial's last evaluation. A policy that --model names is evaluated with the
default settings. Ray is not started."""
EXAMPLES = """\
examples:
  python launch/evaluate.py                                    the shipped policy
  python launch/evaluate.py --checkpoint ~/ray_results/NAME/TRIAL
  python launch/evaluate.py --checkpoint ~/ray_results/NAME/TRIAL --samples 16 --prompts all
  python launch/evaluate.py --model my_policy --temperature 0 --out greedy
  python launch/evaluate.py --model my_policy --out after --against before

exit status: 0 evaluated, 1 a reward or the engine failed, 2 bad usage (nothing was sampled),
130 interrupted (nothing is written)"""


DRAWN_EVERY_S = 0.5  # seconds between updates of the progress bar
LINE_EVERY_S = 30.0  # seconds between lines about progress, if there is no terminal for a bar


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("evaluate", lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _advice(option: str) -> str | None:
    """Return advice on an unknown option.

    Return None if the advice would name a setting that only training reads.
    """
    from grpo_trainable.tools.evaluation.settings import is_read

    advice = advice_for_option(option)
    named = re.findall(r"--set ([\w.]+)=", advice or "")
    return advice if all(map(is_read, named)) else None


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options of the command."""
    parser = Parser(
        advice=_advice,
        prog=command_line.program("evaluate"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace(
            "python launch/evaluate.py", shlex.join(command_line.command("evaluate"))
        ),
    )
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint of a trial, or the trial's directory (for its last checkpoint); "
        "s3://BUCKET/PATH in an object store",
    )
    policy.add_argument(
        "--model",
        metavar="PATH",
        help="directory of a policy (default without --checkpoint: the shipped policy, or the "
        "policy that --set model.preset=… names)",
    )
    add = parser.add_argument
    add(
        "--task",
        metavar="NAME",
        help="task, as in --set task.name=NAME (default: the trial's, or keyword)",
    )
    add(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a setting that an evaluation reads, for example rollout.max_new_tokens=40 or "
        "task.eval_file=test.jsonl; may be given more than once",
    )
    add(
        "--prompts",
        metavar="N",
        type=_prompts,
        help="number of held-out prompts of the task, or all (default: the trial's, or 128; with "
        "--set task.eval_file=…, at most as many as that file has)",
    )
    add(
        "--samples",
        metavar="N",
        type=number(int, 1),
        help="responses per prompt; pass@k and majority@k need several (default: the trial's, or "
        "2)",
    )
    add(
        "--temperature",
        metavar="X",
        type=number(float, 0),
        help="sampling temperature; 0 always chooses the most likely token (default: the trial's, "
        f"or {_temperatures()})",
    )
    add(
        "--top-p",
        metavar="P",
        type=number(float, 0, 1),
        help="sample from the most likely tokens whose probabilities add up to P (default: the "
        "trial's, or 1, which is all tokens)",
    )
    add(
        "--seed",
        metavar="N",
        type=number(int, 0, 2**32 - 1),
        help="seed for sampling (default: the trial's, or 0)",
    )
    add("--out", metavar="OUT", help="new or empty output directory (evaluation-DATE-TIME)")
    add(
        "--against",
        metavar="DIR",
        help="directory of another evaluation to compare with, over the prompts that both "
        "evaluations share; the differences are reported with their intervals",
    )
    add(
        "--threads",
        metavar="N",
        type=number(int, 1),
        help="CPU threads (default: the trial's, or 1 per ten million parameters)",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="device (default: the device on which the trial sampled, or cuda if available)",
    )
    add(
        "--batch",
        metavar="N",
        type=number(int, 1),
        help="number of responses sampled together, at least --samples (default: as in the trial, "
        "or 64)",
    )
    add(
        "--dry-run",
        nargs="?",
        const="table",
        choices=("table", "json"),
        help="show the settings that the evaluation reads, then exit. table (also --dry-run "
        "without a value) is for people; json prints the whole config as one line of JSON",
    )
    return parser.parse_args(argv)


def _temperatures() -> str:
    """Return the default temperature of each task, as in `0.8; 1 for math`."""
    check = CHECKS["eval.temperature"]
    others: dict[float, list[str]] = {}
    for task, default in check.of_tasks.items():
        # The task `control` has no language model, and only language models are evaluated.
        if task != CONTROL:
            others.setdefault(default, []).append(task)
    own = [f"{value:g} for {', '.join(tasks)}" for value, tasks in others.items()]
    return "; ".join([f"{check.default:g}", *own])


def _prompts(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return number(int, 1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or all") from None


def _main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    with _one_line_mistakes():
        plan = _plan(args)
    if args.dry_run is not None:
        _show(plan, args.dry_run)
        return OK
    with _one_line_mistakes():
        evaluator = _evaluator(args, plan)
    for line in plan.told:
        print(line, flush=True)
    with closing(evaluator):
        return _evaluate(plan, evaluator, argv)


def _show(plan: _Plan, form: str) -> None:
    """Print the settings as a table, or as `json` for programs."""
    from grpo_trainable.tools.evaluation.settings import is_read
    from tuning.preview import settings_of

    if form == "json":
        print(json.dumps(plan.config.to_dict()))
        for line in plan.told:
            print(line, file=sys.stderr)  # standard output contains only JSON
        return
    print(f"seed={plan.config.seed}\n\n{settings_of(plan.config, is_read)}")
    print(*("", *plan.told, "--dry-run json prints the whole config"), sep="\n")


@contextmanager
def _one_line_mistakes() -> Iterator[None]:
    """Turn errors about a user's mistake into UsageError, before anything is sampled."""
    from grpo_trainable.engines.engine import EngineError
    from grpo_trainable.storage.checkpointing import CheckpointError
    from grpo_trainable.tasks.input_files import InputChanged

    try:
        yield
    except (ValueError, CheckpointError, InputChanged, EngineError) as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The policy to evaluate, its settings, and the directory for the result."""

    config: GRPOConfig
    told: Sequence[str]  # lines about the policy and its prompts
    trained: TrainedPolicy | None
    out: Path
    against: EvaluationRecord | None


def _plan(args: argparse.Namespace) -> _Plan:
    from grpo_trainable.tasks.prompts import build_task
    from grpo_trainable.tools.evaluation.checkpoint import read_trained_policy
    from grpo_trainable.tools.evaluation.evaluator import with_all_prompts
    from grpo_trainable.tools.evaluation.settings import evaluation_config
    from reports.evaluations.files import read_evaluation
    from tuning.checks import about_adapter
    from tuning.prompt_notes import numbers_held_out

    trained = None
    if args.checkpoint is not None:
        trained = read_trained_policy(_any_path("--checkpoint", args.checkpoint))
    options = {
        "--model": args.model,
        "--task": args.task,
        "--prompts": None if args.prompts == "all" else args.prompts,
        "--samples": args.samples,
        "--temperature": args.temperature,
        "--top-p": args.top_p,
        "--seed": args.seed,
    }
    config = evaluation_config(trained, args.assignments, options, os.getcwd())
    task = build_task(config)
    named = {text.partition("=")[0].strip() for text in args.assignments}
    names_file = config.task.eval_file is not None and "task.eval_file" in named
    if args.prompts == "all":
        if "eval.prompts" in named:
            raise UsageError("--prompts all contradicts --set eval.prompts")
        config = with_all_prompts(config, task)
    elif args.prompts is None and "eval.prompts" not in named and names_file:
        # Evaluate no prompt of the file twice.
        whole = with_all_prompts(config, task)
        config = min(config, whole, key=lambda each: each.eval.prompts)
    if args.batch is not None and args.batch < config.eval.samples:
        raise UsageError(
            f"--batch {args.batch}: must be >= {config.eval.samples}, because all responses to a "
            "prompt are sampled together"
        )
    against = None
    if args.against is not None:
        against = read_evaluation(_directory("--against", args.against))
    out = _directory("--out", args.out or time.strftime("evaluation-%Y%m%d-%H%M%S"))
    told = [*about_adapter(config.model), *numbers_held_out(config, task)]
    return _Plan(config=config, told=told, trained=trained, out=out, against=against)


def _any_path(option: str, text: str) -> AnyPath:
    """Return the directory that `text` names, on this machine or in an object store."""
    from tuning.directories import directory_named

    try:
        return directory_named(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None


def _directory(option: str, text: str) -> Path:
    from tuning.directories import local_directory

    try:
        return local_directory(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None


def _evaluator(args: argparse.Namespace, plan: _Plan) -> Evaluator:
    """Build the evaluator, and make the directory for the result."""
    import torch

    from grpo_trainable.telemetry.actor_process import keep_freed_memory
    from grpo_trainable.tools.evaluation.evaluator import (
        Evaluator,
        sampling_device,
        sampling_threads,
    )
    from grpo_trainable.tools.evaluation.policy import load_evaluated_policy
    from reports.evaluations.files import prepare_directory

    keep_freed_memory()
    device = sampling_device(args.device, plan.trained)
    policy = load_evaluated_policy(plan.config, plan.trained)
    threads = sampling_threads(args.threads, plan.trained, policy.parameters)
    torch.set_num_threads(threads)
    # This also limits the tokenizers library, which would start one thread per core.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    evaluator = Evaluator(plan.config, policy, device=device, batch=args.batch)
    try:
        if plan.against is not None:
            _refuse_other_prompts(evaluator, plan.against)
        prepare_directory(plan.out)
    except BaseException:
        evaluator.close()
        raise
    return evaluator


def _refuse_other_prompts(evaluator: Evaluator, against: EvaluationRecord) -> None:
    theirs = {own.prompt for own in against.generations}
    if theirs.isdisjoint(evaluator.prompts):
        raise UsageError(f"--against {against.name}: has no prompt in common with this evaluation")


def _evaluate(plan: _Plan, evaluator: Evaluator, argv: Sequence[str]) -> int:
    """Sample, write and print. Return FAILED if the engine failed or too many rewards failed."""
    from grpo_trainable.engines.engine import EngineError
    from grpo_trainable.tasks.input_files import input_digests, input_files
    from reports.evaluations.changes import takes_part
    from reports.evaluations.files import DATA, PAGE, write_evaluation
    from reports.evaluations.pairs import differences
    from reports.evaluations.record import EvaluationRecord
    from reports.evaluations.summary import console_lines

    started = time.time()
    files = input_digests(plan.config, keys=set(filter(takes_part, input_files(plan.config))))
    try:
        generations = _sampled(evaluator)
    except EngineError as error:
        return _failed(str(error))
    record = EvaluationRecord(
        name=plan.out.name,
        policy=evaluator.policy.to_dict(),
        config=plan.config.to_dict(),
        generations=generations,
        origin=_origin(argv, started) | {"files": files},
    )
    paired = [] if plan.against is None else differences(record, plan.against)
    try:
        write_evaluation(plan.out, record, plan.against, paired)
    except OSError as error:
        return _failed(f"{plan.out}: cannot write there ({error.strerror})")
    print(*console_lines(record, plan.against, paired), "", sep="\n")
    print(plan.out / PAGE)
    print(plan.out / DATA, flush=True)
    task = plan.config.task
    allowed = 0.0 if task.strict else task.max_error_rate * len(generations)
    return _failed(record.problems[0]) if len(record.errors) > allowed else OK


def _failed(reason: str) -> int:
    print(f"{command_line.program('evaluate')}: {reason}", file=sys.stderr)
    return FAILED


def _sampled(evaluator: Evaluator) -> list[Generation]:
    """Return all responses, and show progress on standard error.

    On a terminal, progress is a bar. Otherwise, a line appears every half minute.
    A batch may take minutes. Meanwhile, the number of sampled tokens is shown.
    """
    import torch
    from tqdm import tqdm

    threads = plural(torch.get_num_threads(), "thread")
    generations: list[Generation] = []
    tokens, next_line_at = 0, time.monotonic() + LINE_EVERY_S
    with tqdm(
        total=evaluator.responses,
        unit="response",
        disable=None,
        miniters=0,
        mininterval=DRAWN_EVERY_S,
    ) as bar:

        def sampled_one() -> None:
            nonlocal tokens, next_line_at
            tokens += 1
            at = f"token {tokens} of a batch"
            bar.set_description_str(at, refresh=False)
            bar.update(0)
            if bar.disable and time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + LINE_EVERY_S
                done = f"{len(generations)} of {evaluator.responses} responses"
                line = f"{time.strftime('%H:%M:%S')}  {done}, {at}, {threads}"
                print(line, file=sys.stderr, flush=True)

        for batch in evaluator.batches(sampled_one):
            tokens = 0
            generations += batch
            bar.update(len(batch))
            rewards = [own.reward for own in generations if own.reward is not None]
            if rewards:
                bar.set_postfix_str(f"reward {sum(rewards) / len(rewards):.3f}", refresh=False)
    return generations


def _origin(argv: Sequence[str], started: float) -> dict[str, Any]:
    from reports.evaluations.files import running_commit
    from tuning.plan import surroundings

    around = surroundings()
    return {
        "created": around["started"],
        "command": shlex.join([*command_line.command("evaluate"), *argv]),
        "seconds": round(time.time() - started, 2),
        "grpo_trainable": __version__,
        "commit": running_commit(),
        "packages": around["packages"],
        "machine": around["machine"],
    }


if __name__ == "__main__":
    sys.exit(main())
