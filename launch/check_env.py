"""Play a few episodes of an environment and report what would go wrong in training.

python launch/check_env.py my_game.py:Game --task my_game.py:Secrets
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from grpo_trainable import command_line
from grpo_trainable.command_line import FAILED, OK, Parser, UsageError, number
from grpo_trainable.config import GRPOConfig, parse_assignments, set_dotted, shown
from grpo_trainable.text import plural

if TYPE_CHECKING:
    from grpo_trainable.tools.environment_check import EnvironmentCheck, Report, Specification

DESCRIPTION = """\
Play a few episodes of the environment ENV, named as in env.name, in separate processes, and report
what would go wrong in training:

  fails         the environment raises an error, returns no Turn or too much text, or its process
                dies
  hangs         the environment does not answer within env.step_deadline_s
  prompt        the text that reset returns is not the prompt of the task
  differs       the same specification leads to different episodes, so responses cannot be
                compared
  remembers     an episode depends on the previous episode of the environment
  shares        episodes in one process affect each other, for example by sharing random numbers
  unsendable    a specification is not JSON, or JSON changes it
  retokenised   the policy would read a text that differs from the environment's text
  processes     the environment leaves processes behind

Each episode starts from a specification: the ground truth of one of the task's first training
examples, or the value of a --spec. Without --action, each action is a word from the
environment's text, a digit or an unusual string. The command starts neither Ray nor a policy."""
EXAMPLES = """\
examples:
  python launch/check_env.py guess
  python launch/check_env.py my_game.py:Game --task my_game.py:Secrets --action 3 --action 7
  python launch/check_env.py my_game.py:Game --spec '{"secret": 3}' --set env.step_deadline_s=60

exit status: 0 no fault found, 1 faults, 2 bad usage or the environment cannot be built"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("check_env", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = _arguments(argv)
    try:
        check, specifications = _plan(args)
        on_terminal = Console(stderr=True)
        turns = iter(
            track(
                specifications,
                "playing",
                console=on_terminal,
                disable=not on_terminal.is_terminal,
                transient=True,
            )
        )
        next(turns, None)
        report = check.run(specifications, lambda: next(turns, None))
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(_told(args.env, specifications, report))
    return FAILED if report.findings else OK


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    command = shlex.join(command_line.command("check_env"))
    parser = Parser(
        prog=command_line.program("check_env"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/check_env.py", command),
    )
    add = parser.add_argument
    add("env", metavar="ENV", help="guess, calculator, python, module:Class or file.py:Class")
    add(
        "--task",
        metavar="NAME",
        help="task whose first training examples give the specifications, named as in task.name",
    )
    add(
        "--spec",
        metavar="JSON",
        action="append",
        default=[],
        help="specification to play in place of the task's examples; may be given more than once",
    )
    add(
        "--action",
        metavar="TEXT",
        action="append",
        default=[],
        help="action to play instead of random words, without the string that ends an action; if "
        "given more than once, each action is drawn from these",
    )
    add(
        "--specs",
        metavar="N",
        type=number(int, 1),
        default=8,
        help="number of the task's examples to play (8)",
    )
    add("--seed", metavar="N", type=number(int, 0), default=0, help="seed for the actions (0)")
    add(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="setting of the trial, for example env.max_turns=20, or model.path=MODEL to check "
        "with the tokenizer of MODEL; may be given more than once",
    )
    return parser.parse_args(argv)


def _plan(args: argparse.Namespace) -> tuple[EnvironmentCheck, list[Specification]]:
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.tasks import TASKS
    from grpo_trainable.tasks.prompts import Prompts, build_task
    from grpo_trainable.tasks.stop_rules import stop_strings
    from grpo_trainable.tools.environment_check import EnvironmentCheck, Specification

    task = args.task or (args.env if args.env in TASKS else None)
    if task is None and not args.spec:
        raise UsageError(
            "neither --task nor --spec is given, so there is nothing to play; give one of them"
        )
    data: dict[str, Any] = {"env": {"name": args.env}}
    if task is not None:
        data["task"] = {"name": task}
    for key, value in parse_assignments(args.assignments).items():
        set_dotted(data, key, value)
    config = GRPOConfig.from_dict(data)
    tokenizer = policy_tokenizer(config.model)
    stop = ""
    specifications = [Specification(spec=_json(text)) for text in args.spec]
    if task is not None:
        built = build_task(config)
        prompts = Prompts(config, built, tokenizer)
        stop = next(iter(stop_strings(config, tokenizer, built)), "")
        specifications = specifications or [
            Specification(
                spec=prompts.ground_truth("train", index), prompt=prompts.said("train", index)
            )
            for index in range(args.specs)
        ]
    check = EnvironmentCheck(
        config.env,
        actions=args.action,
        stop=stop,
        seed=args.seed,
        retold=lambda text: tokenizer.decode(tokenizer.encode(text)),
        tokens=lambda text: len(tokenizer.encode(text)),
        most_tokens=config.rollout.max_new_tokens,
    )
    return check, specifications


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--spec {shown(text)}: must be JSON: {error}") from None


def _told(env: str, specifications: Sequence[Specification], report: Report) -> str:
    lines = [
        f"{env}: {plural(len(specifications), 'specification')}, "
        f"{plural(report.episodes, 'episode')}, {plural(len(report.seconds), 'answer')}"
    ]
    if report.seconds:
        middle, most = statistics.median(report.seconds), max(report.seconds)
        lines[0] += f", {1000 * middle:.1f} ms each (median; {1000 * most:.1f} ms at most)"
    if report.example:
        lines += ["", "an episode:", f"  reads  {shown(report.first)}"]
        for action, turn in report.example:
            end = ", over" if turn.done else f", reads {shown(turn.text)}"
            lines.append(f"  acts   {shown(action)}: reward {turn.reward:g}{end}")
    lines += ["", *(f"note: {note}" for note in report.notes)] if report.notes else []
    lines.append("")
    if not report.findings:
        return "\n".join([*lines, "found nothing that would go wrong in training"])
    for name in dict.fromkeys(finding.name for finding in report.findings):
        own = [finding for finding in report.findings if finding.name == name]
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        lines.append(f"fault {name}: {own[0].where}: {own[0].what}{more}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
