"""Runs a search space: several complete GRPO systems under Ray Tune, and one table at the end."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable import command_line
from grpo_trainable.command_line import FAILED, INTERRUPTED, OK, Parser, UsageError, number
from grpo_trainable.config import schedule
from grpo_trainable.config.describe import settings
from grpo_trainable.text import plural
from search_spaces import SPACES
from search_spaces.presets import PRESETS
from tuning.checks import Missing
from tuning.directories import WRITABLE_BY_OTHERS
from tuning.nodes import Nodes, at_once
from tuning.notes import NUMBERS
from tuning.plan import Options, Plan
from tuning.preview import example_lines, in_short, preview

if TYPE_CHECKING:
    from reports.records import ExperimentRecord
    from reports.summary import Comparison
    from tuning.run import Failure

DESCRIPTION = """\
Run the trials of a search space under Ray Tune and compare them. Each trial is a complete GRPO
system that trains a language model; a row of metrics is kept for every round. Trials run in
randomised blocks: seed after seed, each seed's arms in an order drawn from the seed."""

EXAMPLES = """\
examples:
  python launch/tune.py --space async_vs_sync
  python launch/tune.py --space async_vs_sync --samples 1024
  python launch/tune.py --space async_vs_sync --iterations 4 --set arm=async_k1
  python launch/tune.py --space async_vs_sync --num-samples 3 --name three_seeds
  python launch/tune.py --resume --name three_seeds
  python launch/tune.py --preset course_keyword --dry-run
  python launch/tune.py --space async_vs_sync --set optim.lr=2e-4 --set loss.kl_coef=0.02 --dry-run

exit status: 0 every trial done, 1 a trial failed, 2 bad usage (nothing was started),
130 interrupted (go on with --resume)"""


SHOWN_ONLY = ("list", "settings", "dry_run")  # options that show something and run nothing


def main(argv: Sequence[str] | None = None) -> int:
    # SIGTERM ends the command as Ctrl-C does until the trials run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A resume refuses state that others could have written. Ray's processes inherit it.
    os.umask(os.umask(0) | WRITABLE_BY_OTHERS)
    return command_line.run("tune", lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    if args.list:
        print_spaces()
        print_presets()
        return OK
    if args.settings is not None:
        print(settings(args.settings), end="")
        return OK
    plan = plan_of(args)
    try:
        plan.check()
    except Missing:
        if args.dry_run is not None:  # it may be meant for another machine
            print_trials(plan, args.dry_run, complete=False)
        raise
    if args.dry_run is not None:
        print_trials(plan, args.dry_run)
        return OK
    plan.prepare_directory()
    try:
        with command_line.output_dropped_on_error():
            return run(plan)
    except UsageError:  # the cluster is not what the trials need, and none was started
        plan.withdraw()
        raise


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    command = shlex.join(command_line.command("tune"))
    parser = Parser(
        prog=command_line.program("tune"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/tune.py", command),
    )
    add = parser.add_argument
    add(
        "--space",
        metavar="SPACE",
        help="the question to ask: a name that --list shows, or a file of yours that defines a "
        "SearchSpace, my_space.py or my_space.py:NAME (docs/howto/search-space.md)",
    )
    add(
        "--preset",
        metavar="PRESET",
        help="settings that belong together, for which neither an arm nor --set has a value of its "
        f"own: {', '.join(PRESETS)} (--list says what they are). Without --space one trial of "
        "them runs",
    )
    add(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="fix a config key in every trial, for example optim.lr=2e-4, or arm=async_k1 to run "
        "one arm only; may be given many times; --settings lists the keys. A relative path means "
        "the current directory",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--samples",
        metavar="RESPONSES",
        type=number(int, 1),
        help="how long a trial is: its responses, cut into each arm's own rounds; evaluations then "
        "fall at equal samples as well. Not --num-samples, which is how many seeds there are",
    )
    length.add_argument(
        "--iterations",
        metavar="ROUNDS",
        type=number(int, 1),
        help="how long a trial is: its rounds, however many responses an arm's round has",
    )
    add(
        "--num-samples",
        metavar="SEEDS",
        type=number(int, 1),
        help="how many seeds each arm runs with (1). Not --samples, which is how long a trial is",
    )
    add("--seed", metavar="N", type=number(int, 0), help="the first seed (0)")
    add("--name", metavar="NAME", help="of the experiment (the space's and the time)")
    add(
        "--storage",
        metavar="DIR",
        help="where experiments are kept: a directory of this machine (~/ray_results), or "
        "s3://BUCKET/PATH, with credentials and AWS_ENDPOINT_URL in the environment "
        "(docs/howto/storage.md)",
    )
    add(
        "--resume",
        nargs="?",
        const="must",
        choices=("auto", "never", "must"),
        help="go on with the experiment --name: must (the bare option) refuses when there is none, "
        "auto starts it then, never (the default) refuses when there is one. Its state is pickle, "
        "so it is refused when others own it or can write to it. Settings and data files must be "
        "what they were; --max-failures and --max-concurrent may change",
    )
    add(
        "--checkpoint-every",
        metavar="N",
        type=number(int, 1),
        help="rounds between checkpoints (10)",
    )
    add(
        "--max-failures",
        metavar="N",
        type=number(int, 0),
        help="retries of a failed trial, counted anew by each --resume (2)",
    )
    add(
        "--scheduler",
        choices=("fifo", "asha", "pbt"),
        help="of Tune (fifo); asha stops trials that learn less than the others from a quarter of "
        "the samples; pbt lets the worse trials of one arm go on from the better ones with another "
        "optim.lr and, where the loss reads it, loss.clip",
    )
    add(
        "--max-concurrent",
        metavar="N",
        type=number(int, 1),
        help="trials at a time. The default is 1, because trials beside each other slow each other "
        "and their speeds could not be compared; with asha and pbt it is as many as fit",
    )
    add("--address", metavar="ADDRESS", help="of a running Ray cluster; default: start one here")
    add(
        "--verbose",
        action="store_true",
        help="a line for every change of version, the seconds of each stage at a trial's end, and "
        "what Ray and the actors log",
    )
    add("--list", action="store_true", help="show the search spaces and the presets and end")
    add(
        "--settings",
        nargs="?",
        const="",
        metavar="WORD",
        help="show the keys of --set with default, range and meaning, all or those with WORD in "
        "name or meaning, and end",
    )
    add(
        "--dry-run",
        nargs="?",
        const="table",
        choices=("table", "json"),
        help="check all that can be checked without Ray, show the trials and end: as a table of "
        "what they differ in (the bare option), or each one's whole config as a line of JSON",
    )
    defaults = asdict(Options())
    del defaults["assignments"]  # argparse needs a list for it
    parser.set_defaults(**defaults)
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace) -> Plan:
    given = {name: value for name, value in vars(args).items() if name not in SHOWN_ONLY}
    return Plan(Options(**given))


def print_spaces() -> None:
    width = max(map(len, SPACES))
    for space in SPACES.values():
        print(f"{space.name:<{width}}  {space.question} ({plural(len(space.arms), 'arm')})")


def print_presets() -> None:
    print("\nwith --preset:")
    width = max(map(len, PRESETS))
    for preset in PRESETS.values():
        paper = f" ({preset.address})" if preset.address else ""
        print(f"{preset.name:<{width}}  {preset.meaning}{paper}")


def print_trials(plan: Plan, form: str, *, complete: bool = True) -> None:
    """`form`: table, or json for programs, which find nothing else on standard output. `complete`:
    whether nothing that the trials need is missing; where something is, an error follows."""
    if form == "json":
        print(*(json.dumps(trial.to_dict()) for trial in plan.trials), sep="\n")
        for note in remarks(plan):
            print(note, file=sys.stderr)
        return
    print(f"{plan.space.name}: {plan.space.question}")
    order = ", in the order in which they run" if len(plan.trials) > 1 else ""
    print(f"{plural(len(plan.trials), 'trial')}{order}:\n")
    print(preview(plan.trials))
    if complete:
        print(*example_lines(plan.trials[0]), sep="\n")
    told = [] if plan.memory is None else [plan.memory]
    print(*("", *told, *notes(plan)), sep="\n")
    print("--dry-run json prints each trial's whole config")
    print(f"\n{in_short(plan.trials)}")
    if complete:
        count = len(remarks(plan))
        more = f"; {plural(count, 'note')} above" if count else ""
        print(f"checked, no error, nothing was started{more}")


def run(plan: Plan) -> int:
    """The exit status of the trials, once they have run and their table is printed."""
    from callbacks.console import stop_live_table
    from tuning.interrupt import Interrupt
    from tuning.run import fit, ray_started

    interrupt = Interrupt(partial(say_last_words, plan), stop_live_table)
    try:
        with ray_started(plan, interrupt) as nodes:
            print(*opening(plan, nodes), sep="\n", flush=True)
            failed = fit(plan)
            return summarise(plan, failed, interrupted=interrupt.received)
    except KeyboardInterrupt:
        print(go_on(plan), flush=True)
        return INTERRUPTED


def say_last_words(plan: Plan) -> None:
    """Print what each interrupted trial goes on from, and how to go on, where Tune does not end."""
    from reports.experiment import read_experiment
    from tuning.interrupt import left_off

    print(go_on(plan), flush=True)  # first, since the time to read what is saved may not suffice
    if isinstance(plan.directory, Path):
        trials = read_experiment(plan.directory).trials
        print(*left_off(trials, len(plan.trials)), sep="\n", flush=True)


def opening(plan: Plan, nodes: Nodes) -> list[str]:
    """What is said before the trials start."""
    lines = [
        f"{plan.space.name}: {plan.space.question}",
        f"{plural(len(plan.trials), 'trial')}, kept in {plan.directory}",
    ]
    by_default = plan.limits["max_concurrent"] is None and plan.max_concurrent == 1
    if by_default and at_once(plan.trials, nodes) > 1:
        lines.append(
            "one trial at a time, so that none slows another; --max-concurrent N runs more"
        )
    return [*lines, *notes(plan)]


def notes(plan: Plan) -> list[str]:
    """What the user may not have meant, or could not know: arms, samples, prompts."""
    lines = [f"not available here: {arm} ({why})" for arm, why in plan.not_available.items()]
    if len({trial.rounds * schedule.responses_per_round(trial) for trial in plan.trials}) > 1:
        lines.append(
            "note: the arms do not train on equal samples; --samples N gives each of them N "
            "responses"
        )
    seeds = plan.options.num_samples
    if seeds >= min(schedule.responses_per_round(trial) for trial in plan.trials):
        lines.append(
            f"note: --num-samples {seeds} asks for {seeds} seeds of every arm; trials of {seeds} "
            f"responses are --samples {seeds}"
        )
    return [*lines, *plan.told]


def remarks(plan: Plan) -> list[str]:
    """The notes without those that are only numbers to know."""
    return [note for note in notes(plan) if not note.startswith(NUMBERS)]


def summarise(plan: Plan, failed: Sequence[Failure], *, interrupted: bool) -> int:
    from reports.report import ReportError
    from reports.stored import at_hand

    command = shlex.join([*command_line.command("report"), str(plan.directory)])
    try:
        with at_hand(plan.directory) as directory:
            tell(plan, directory, failed, command, interrupted=interrupted)
    except ReportError as error:
        again = [go_on(plan)] if interrupted or failed else []
        print(f"no table, no report: {error}; then: {command}", *again, sep="\n", flush=True)
    if interrupted:
        return INTERRUPTED
    return FAILED if failed else OK


def tell(
    plan: Plan, directory: Path, failed: Sequence[Failure], command: str, *, interrupted: bool
) -> None:
    """Prints what came out, and writes the report. `directory`: the experiment on this machine.
    `command`: what writes the report."""
    from reports.experiment import read_experiment
    from reports.summary import compare, table
    from tuning.interrupt import left_off

    experiment = read_experiment(directory)
    comparison = compare(experiment.trials)
    print()
    print(table(comparison))
    print()
    here = directory == plan.directory
    if here:
        print(f"tensorboard --logdir {shlex.quote(str(directory))}")
    for failure in failed:
        where = plan.directory / failure.directory / "error.txt"
        print(f"failed: {failure.error}\n        see {where}")
    if interrupted:  # which leaves no time for a report
        print(f"report of what is there: {command}")
        if here:  # a copy of what an object store has is without checkpoints
            print(*left_off(experiment.trials, len(plan.trials)), sep="\n")
    if interrupted or failed:
        print(go_on(plan), flush=True)
    if not interrupted:
        report(plan, experiment, comparison, command)


def report(plan: Plan, experiment: ExperimentRecord, comparison: Comparison, command: str) -> None:
    """Writes the report and prints its path, or the `command` that writes it later."""
    from reports.report import ReportError, write_report_of

    try:
        page = write_report_of(experiment, comparison)
        print(f"report: {plan.directory / page.name}", flush=True)
    except ReportError as error:
        print(f"no report: {error}; then: {command}", flush=True)
    except Exception:
        # The trials are what the command was for; their outcome is its exit status.
        traceback.print_exc()
        print(f"no report: the error above; to try again: {command}", flush=True)


def go_on(plan: Plan) -> str:
    """Says how to go on with what was interrupted or failed: by the experiment, which knows its
    settings and limits, and the cluster, which it does not."""
    address = plan.options.address
    parts = [
        *(*command_line.command("tune"), "--space", plan.space_source, "--resume", "must"),
        *("--name", plan.name, "--storage", str(plan.storage)),
        *(() if address is None else ("--address", address)),
    ]
    return f"go on with: {shlex.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
