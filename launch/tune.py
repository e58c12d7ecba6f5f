"""Run the trials of a search space under Ray Tune, then print a table that compares them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_trainable import command_line
from grpo_trainable.command_line import (
    FAILED,
    INTERRUPTED,
    OK,
    Once,
    Parser,
    UsageError,
    add_verdict_options,
    number,
    time_span,
)
from grpo_trainable.config import ConfigError, schedule
from grpo_trainable.config.describe import settings
from grpo_trainable.config.parsing import advice_for_option
from grpo_trainable.plugins import PluginError
from grpo_trainable.text import plural
from reports.document import NO_MATPLOTLIB
from search_spaces import SPACES
from search_spaces.presets import PRESETS
from tuning.checks import ADAPTERS, Missing
from tuning.directories import WRITABLE_BY_OTHERS, held
from tuning.nodes import Nodes, at_once
from tuning.plan import Options, Plan
from tuning.preview import example_lines, in_short, preview
from tuning.prompt_notes import NUMBERS

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath
    from reports.menu import Menu
    from reports.records import ExperimentRecord
    from reports.summary import Comparison
    from tuning.run import Failure

DESCRIPTION = """\
Run the trials of a search space under Ray Tune and compare them. Each trial is a complete GRPO
system that trains a language model and writes a row of metrics for every round. Trials run in
randomised blocks: all arms with the first seed, then all arms with the next seed, and so on. The
order of the arms in a block is random and depends only on the seed."""

EXAMPLES = """\
examples:
  python launch/tune.py --space async_vs_sync
  python launch/tune.py --space async_vs_sync --samples 1024
  python launch/tune.py --space async_vs_sync --iterations 4 --set arm=async_k1
  python launch/tune.py --space async_vs_sync --num-samples 3 --name three_seeds
  python launch/tune.py --resume --name three_seeds
  python launch/tune.py --extend --name three_seeds --num-samples 6
  python launch/tune.py --preset course_keyword --dry-run
  python launch/tune.py --space async_vs_sync --set optim.lr=2e-4 --set loss.kl_coef=0.02 --dry-run

exit status: 0 every trial is done, 1 a trial failed, 2 bad usage (nothing was started),
130 interrupted (continue with --resume)"""


REFUSALS = (UsageError, ConfigError, PluginError)  # errors that a plan raises
SHOWN_ONLY = ("list", "settings", "dry_run")  # options that show something and run nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    # Until the trials start, SIGTERM ends the command as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Files must not be writable by other users; otherwise, a resume would reject them. Ray's
    # processes inherit the umask.
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
        if args.dry_run is not None:  # the trials may be meant for another machine
            print_trials(plan, args.dry_run, complete=False)
        raise
    if args.dry_run is not None:
        print_trials(plan, args.dry_run)
        return OK
    plan.prepare_directory()
    try:
        with held(plan.directory), command_line.output_dropped_on_error():
            return run(plan)
    except UsageError:  # the cluster does not suit the trials, and no trial was started
        plan.withdraw()
        raise


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options of the command."""
    command = shlex.join(command_line.command("tune"))
    parser = Parser(
        advice=advice_for_option,
        prog=command_line.program("tune"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/tune.py", command),
    )
    add = parser.add_argument
    add(
        "--space",
        metavar="SPACE",
        help="the question to ask: a name that --list shows, or your own file that defines a "
        "SearchSpace, given as my_space.py or my_space.py:NAME (docs/howto/search-space.md)",
    )
    add(
        "--preset",
        action=Once,
        metavar="PRESET",
        help="named settings; arms and --set override them (--list describes the presets). "
        f"Without --space, one trial with these settings runs. Valid: {', '.join(PRESETS)}",
    )
    add(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a config key in every trial, for example optim.lr=2e-4; arm=async_k1 runs only "
        "that arm, and arm=sync,async_k1 these two. May be given once for each key. "
        "--settings lists the keys. A relative path is relative to the current directory",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--samples",
        metavar="RESPONSES",
        type=number(int, 1),
        help="number of responses that every trial trains on; the number of rounds of each arm "
        "follows from it. All arms are evaluated after equal numbers of responses. Not the same as "
        "--num-samples, the number of seeds",
    )
    length.add_argument(
        "--iterations",
        metavar="ROUNDS",
        type=number(int, 1),
        help="length of a trial in rounds, regardless of the number of responses in a round",
    )
    add(
        "--num-samples",
        metavar="SEEDS",
        type=number(int, 1),
        help="number of seeds for each arm (1). Not the same as --samples, the length of a trial",
    )
    add("--seed", metavar="N", type=number(int, 0), help="the first seed (0)")
    verdicts = add_verdict_options(
        parser,
        "with a margin, each arm gets a verdict, at the end of the output and at the top of the\n"
        "report (docs/howto/verdict.md)",
    )
    verdicts.add_argument(
        "--until-decided",
        action="store_true",
        help="with a margin: after the seeds of --num-samples, add one seed at a time until every "
        "arm has a verdict. Once an arm has a verdict, the arm gets no more seeds "
        "(docs/howto/verdict.md)",
    )
    verdicts.add_argument(
        "--max-seeds",
        metavar="N",
        type=number(int, 1),
        help="with --until-decided: largest number of seeds of an arm (20)",
    )
    verdicts.add_argument(
        "--budget",
        metavar="TIME",
        type=time_span,
        help="with --until-decided: time of all trials together, for example 2h, 90m or 3600s. A "
        "seed that would probably exceed this time is not added. --resume may change the budget",
    )
    add(
        "--name",
        metavar="NAME",
        help="name of the experiment (default: the space's name and the time)",
    )
    add(
        "--storage",
        metavar="DIR",
        help="where to keep experiments: a directory on this machine (~/ray_results), or "
        "s3://BUCKET/PATH, with credentials and AWS_ENDPOINT_URL in the environment "
        "(docs/howto/storage.md)",
    )
    add(
        "--resume",
        nargs="?",
        const="must",
        choices=("auto", "never", "must"),
        help="continue the experiment that --name names. must (also --resume without a value): "
        "fail if there is no such experiment. auto: start the experiment if it does not exist. "
        "never (the default): fail if the experiment exists. The experiment's state is a pickle, "
        "so a resume is refused if other users own the state or can write to it. Settings and data "
        "files must be unchanged; --max-failures and --max-concurrent may change",
    )
    add(
        "--extend",
        action="store_true",
        help="add trials to the finished experiment that --name names: seeds, up to a total of "
        "--num-samples, and arms (--arm). Settings and files must be unchanged. An interrupted "
        "extension continues with --resume (docs/howto/verdict.md)",
    )
    add(
        "--arm",
        dest="added_arms",
        metavar="ARM",
        nargs="+",
        action="extend",
        default=[],
        help="with --extend: arms of the search space to add, with every seed of the experiment. "
        "--arm A B, --arm A,B and --arm A --arm B all add two arms",
    )
    add(
        "--accept-changed-code",
        action="store_true",
        help="with --resume: continue although a file with your own code, such as a reward, has "
        "changed since trials trained with it. Before any trial has finished a round, a resume "
        "accepts changed code without this option",
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
        help="retries of a failed trial; each --resume starts the count again (2)",
    )
    add(
        "--scheduler",
        choices=("fifo", "asha", "pbt"),
        help="Tune scheduler (fifo). asha compares held-out rewards after equal numbers of "
        "samples, from a quarter of the samples on, and continues only the best quarter of the "
        "trials. pbt lets the worse trials of an arm continue from the better ones with a "
        "different optim.lr and, if the loss reads it, a different loss.clip",
    )
    add(
        "--max-concurrent",
        metavar="N",
        type=number(int, 1),
        help="number of trials that run at the same time. The default is 1, because trials that "
        "run together slow each other down, so their speeds cannot be compared. With asha and "
        "pbt, the default is as many trials as fit",
    )
    add(
        "--tracker",
        dest="trackers",
        choices=("wandb", "mlflow", "trackio"),
        action="append",
        default=[],
        help="also send the metrics of each round to W&B, MLflow or Trackio, as one run for each "
        "trial, and attach the report when the experiment ends. Needs the extra of the same name. "
        "May be given more than once (docs/howto/trackers.md)",
    )
    add(
        "--callback",
        dest="callbacks",
        metavar="FILE.py:CLASS",
        action="append",
        default=[],
        help="add your own Tune callback, a class that is instantiated without arguments. May be "
        "given more than once (docs/howto/trackers.md)",
    )
    add(
        "--address",
        metavar="ADDRESS",
        help="address of a running Ray cluster (by default, Ray is started on this machine)",
    )
    add(
        "--verbose",
        action="store_true",
        help="also print a line for every change of an actor's policy version, two example "
        "responses from each evaluation, the seconds of each stage at the end of a trial, and the "
        "logs of Ray and the actors",
    )
    add("--list", action="store_true", help="show the search spaces and the presets, then exit")
    add(
        "--settings",
        nargs="?",
        const="",
        metavar="WORD",
        help="show the keys of --set with their defaults, ranges and meanings, then exit: all "
        "keys, or those with WORD in their name or meaning",
    )
    add(
        "--dry-run",
        nargs="?",
        const="table",
        choices=("table", "json"),
        help="run all checks that do not need Ray, show the trials, then exit. table (also "
        "--dry-run without a value) shows how the trials differ; json prints the whole config of "
        "each trial as one line of JSON",
    )
    defaults = asdict(Options())
    for option in ("assignments", "added_arms", "trackers", "callbacks"):
        del defaults[option]  # argparse appends to a list, and these defaults are tuples
    parser.set_defaults(**defaults)
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan that the options describe."""
    given = {name: value for name, value in vars(args).items() if name not in SHOWN_ONLY}
    return Plan(Options(**given))


def print_spaces() -> None:
    """Print the search spaces with their questions."""
    print("with --space:")
    width = max(map(len, SPACES))
    for space in SPACES.values():
        print(f"{space.name:<{width}}  {space.question} ({plural(len(space.arms), 'arm')})")


def print_presets() -> None:
    """Print the presets with their papers."""
    print("\nwith --preset:")
    width = max(map(len, PRESETS))
    for preset in PRESETS.values():
        paper = f" ({preset.address})" if preset.address else ""
        print(f"{preset.name:<{width}}  {preset.meaning}{paper}")


def print_trials(plan: Plan, form: str, *, complete: bool = True) -> None:
    """Print the trials of the plan.

    Args:
        plan: The plan.
        form: `table`, or `json` for programs. With `json`, standard output contains only JSON.
        complete: False if the trials need something that is missing. In that case, an error follows
            the output.
    """
    if form == "json":
        print(*(json.dumps(trial.to_dict()) for trial in plan.trials), sep="\n")
        for note in remarks(plan):
            print(note, file=sys.stderr)
        return
    print(f"{plan.space.name}: {plan.space.question}")
    scheduler = plan.options.scheduler
    under = "" if scheduler == "fifo" else f" under the scheduler {scheduler}"
    order = ", in the order in which they start" if len(plan.trials) > 1 else ""
    print(f"{plural(len(plan.trials), 'trial')}{under}{order}:\n")
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
        print(f"all checks passed, nothing was started{more}")


def run(plan: Plan) -> int:
    """Run the trials, print their table, and return the exit status."""
    from callbacks.save_on_interrupt import requested
    from tuning.run import fit, ray_started

    try:
        with ExitStack() as locks, ray_started(plan) as nodes:
            print(*opening(plan, nodes), sep="\n", flush=True)
            failed = fit(plan)
            while not (failed or requested.is_set()):
                block = plan_of_next_block(plan)
                if block is None:
                    break
                plan = block
                # The new plan has replaced experiment.json, so lock the new file too.
                locks.enter_context(held(plan.directory))
                failed = fit(plan)
            return summarise(plan, failed, interrupted=requested.is_set())
    except KeyboardInterrupt:
        print(go_on(plan), flush=True)
        return INTERRUPTED


def plan_of_next_block(plan: Plan) -> Plan | None:
    """Plan the next block of seeds, write the plan to experiment.json, and return it.

    Print the verdicts so far, and the probable cost of reaching the missing verdicts. Return None
    without `--until-decided`, or if no more seeds are to be added.
    """
    from reports.experiment import ExperimentError
    from reports.menu import MenuError
    from reports.report import ReportError
    from tuning.blocks import Limits, duration, next_block

    options = plan.options
    if not options.until_decided:
        return None
    assert options.max_seeds is not None
    limits = Limits(max_seeds=options.max_seeds, budget_s=plan.limits["budget"])
    try:
        experiment, menu = verdicts_so_far(plan.directory)
        block = next_block(experiment, menu, options.num_samples, limits)
        if isinstance(block, str):
            print(f"no more seeds: {block}", flush=True)
            return None
        seed = options.seed + options.num_samples
        arms = ", ".join(block.arms)
        print(f"next: seed {seed} of {arms}, about {duration(block.seconds)}", flush=True)
        return with_one_more_seed(plan, block.arms)
    except (*REFUSALS, ExperimentError, MenuError, ReportError) as error:
        # Some messages begin with --extend, but the user has not given this option.
        print(f"no more seeds: {str(error).removeprefix('--extend: ')}", flush=True)
        return None


def with_one_more_seed(plan: Plan, arms: Sequence[str]) -> Plan:
    """Plan one more seed of some arms, write the plan to experiment.json, and return it.

    Raises:
        UsageError, ConfigError, PluginError: The experiment cannot be extended.
    """
    options = plan.options
    following = Plan(
        Options(
            name=plan.name,
            storage=str(plan.storage),
            num_samples=options.num_samples + 1,
            address=options.address,
            verbose=options.verbose,
            extend=True,
        ),
        only=arms,
    )
    following.shipped = plan.shipped  # the input files of all blocks are the same
    following.check(holds_lock=True)
    following.prepare_directory()
    return following


def verdicts_so_far(place: AnyPath) -> tuple[ExperimentRecord, Menu]:
    """Read an experiment and judge its arms. Print the result in sentences.

    Raises:
        ExperimentError: The experiment's directory cannot be read.
        MenuError: There are no verdicts.
        ReportError: The experiment's object store cannot be read.
    """
    from reports.experiment import read_experiment
    from reports.menu import menu_of, recorded_options
    from reports.menu_text import paragraph
    from reports.parquet_reader import read_all
    from reports.stored import at_hand
    from reports.summary import compare

    with at_hand(place) as directory:
        experiment = read_experiment(directory)
        comparison = compare(experiment.trials, experiment.not_begun)
        recorded = recorded_options(experiment.description)
        menu = menu_of(experiment, comparison, read_all(experiment.trials), recorded)
    text = textwrap.fill(" ".join(paragraph(menu)), 100, break_on_hyphens=False)
    print(f"\n{text}", flush=True)
    return experiment, menu


def opening(plan: Plan, nodes: Nodes) -> list[str]:
    """Return the lines to print before the trials start."""
    lines = [
        f"{plan.space.name}: {plan.space.question}",
        f"{plural(len(plan.trials), 'trial')}, stored in {plan.run_directory}",
    ]
    by_default = plan.limits["max_concurrent"] is None and plan.max_concurrent == 1
    if by_default and at_once(plan.trials, nodes) > 1:
        lines.append(
            "trials run one after another, so that they do not slow each other down; "
            "--max-concurrent N runs N trials at the same time"
        )
    return [*lines, *notes(plan)]


def notes(plan: Plan) -> list[str]:
    """Return notes about possible surprises, such as missing arms or unequal samples."""
    lines = [f"not available here: {arm} ({why})" for arm, why in plan.not_available.items()]
    if find_spec("matplotlib") is None:
        lines.append(f"note: no report will be written, because {NO_MATPLOTLIB}")
    if len({trial.rounds * schedule.responses_per_round(trial) for trial in plan.trials}) > 1:
        lines.append(
            "note: the arms do not train on equal numbers of samples; --samples N gives each arm "
            "N responses"
        )
    seeds = plan.options.num_samples
    if seeds >= min(schedule.responses_per_round(trial) for trial in plan.trials):
        lines.append(
            f"note: --num-samples {seeds} requests {seeds} seeds of every arm; for trials of "
            f"{seeds} responses use --samples {seeds}"
        )
    return [*lines, *plan.told]


def remarks(plan: Plan) -> list[str]:
    """Return the notes, except those that only state facts about prompts and adapters."""
    return [note for note in notes(plan) if not note.startswith((NUMBERS, ADAPTERS))]


def summarise(plan: Plan, failed: Sequence[Failure], *, interrupted: bool) -> int:
    """Print the results, write the report, and return the exit status."""
    from reports.report import ReportError
    from reports.stored import at_hand

    command = shlex.join([*command_line.command("report"), str(plan.directory)])
    try:
        with at_hand(plan.directory) as directory:
            tell(plan, directory, failed, command, interrupted=interrupted)
    except ReportError as error:
        again = [go_on(plan)] if interrupted or failed else []
        wrong = f"cannot show the table or write the report: {error}; to try again: {command}"
        print(wrong, *again, sep="\n", flush=True)
    if interrupted:
        return INTERRUPTED
    return FAILED if failed else OK


def tell(
    plan: Plan, directory: Path, failed: Sequence[Failure], command: str, *, interrupted: bool
) -> None:
    """Print the results and write the report.

    Args:
        plan: The plan.
        directory: Directory of the experiment, or of its local copy if the experiment is in an
            object store.
        failed: The trials that failed.
        command: The command that writes the report.
        interrupted: True after Ctrl-C or SIGTERM.
    """
    from reports.experiment import read_experiment
    from reports.summary import compare, table
    from tuning.interrupt import left_off

    experiment = read_experiment(directory)
    comparison = compare(experiment.trials, experiment.not_begun, plan.options.baseline)
    print()
    print(table(comparison))
    print()
    here = directory == plan.directory
    if here:
        print(f"tensorboard --logdir {shlex.quote(str(directory))}")
    for failure in failed:
        where = plan.run_directory / failure.directory / "error.txt"
        print(f"failed: {failure.trial}: {failure.error}\n        see {where}")
    if interrupted:  # a report takes seconds, and a job scheduler may soon kill the command
        if any(trial.rows for trial in experiment.trials):
            print(f"for a report of the results: {command}")
        if here:  # a copy from an object store has no checkpoints
            planned = len(experiment.trials) + len(experiment.not_begun)
            print(*left_off(experiment.trials, planned), sep="\n")
    left = plan.options.until_decided or not experiment.all_done
    if failed or (interrupted and left):
        print(go_on(plan), flush=True)
    if not interrupted:
        report(plan, experiment, comparison, command)


def report(plan: Plan, experiment: ExperimentRecord, comparison: Comparison, command: str) -> None:
    """Write the report and print its path, or print the `command` that writes it later.

    Then print the menu (or the reason why there are no verdicts) and a line for each tracker.
    """
    from reports.menu_text import menu_or_reason, table
    from reports.own_files import changed_code
    from reports.parquet_reader import read_all
    from reports.report import ReportError, write_report_of
    from reports.verdicts import before_and_after
    from tuning.report_attachment import attach

    try:
        files = read_all(experiment.trials)
        try:
            page = write_report_of(experiment, comparison, files)
            print(f"report: {plan.directory / page.name}", flush=True)
        except ReportError as error:
            again = f"; to try again: {command}" if experiment.arms else ""
            print(f"no report: {error}{again}", flush=True)
        menu, reason = menu_or_reason(experiment, comparison, files, plan.directory)
        shown = [] if menu is None else ["", table(menu)]
        said = [*before_and_after(experiment, files), changed_code(experiment)]
        print(*shown, *filter(None, [*said, reason]), sep="\n", flush=True)
        # The trackers come last, so a slow tracker delays nothing else.
        for line in attach(experiment, comparison, plan.options.trackers, plan.name):
            print(line, flush=True)
        for line in use_of_model(plan.directory, experiment):
            print(line, flush=True)
    except Exception:
        # A failed report does not change the exit status, which says how the trials ended.
        traceback.print_exc()
        print(f"no report: see the error above; to try again: {command}", flush=True)


def use_of_model(place: AnyPath, experiment: ExperimentRecord) -> list[str]:
    """Return lines with commands that use the model of a completed trial, if there is one.

    Args:
        place: Directory of the experiment, which may be in an object store.
        experiment: The experiment.
    """
    from reports.page import evaluation_of

    trained = experiment.with_policy
    if trained is None:
        return []
    path = "/".join([str(place), *trained.path])
    evaluate = shlex.join(evaluation_of(trained, path))
    export = shlex.join([*command_line.command("export"), path, "my_model"])
    return [f"evaluate a trained model: {evaluate}", f"export it: {export}"]


def go_on(plan: Plan) -> str:
    """Return the line that says how to continue an interrupted or failed experiment.

    The line names the experiment, whose files record its settings and limits. The line also names
    the cluster, which these files do not record.
    """
    address = plan.options.address
    parts = [
        *(*command_line.command("tune"), "--space", plan.space_source, "--resume", "must"),
        *("--name", plan.name, "--storage", str(plan.storage)),
        *(() if address is None else ("--address", address)),
    ]
    return f"continue with: {shlex.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
