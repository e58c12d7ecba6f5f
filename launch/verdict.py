"""Say whether each arm may replace the baseline, and what the arm costs.

python launch/verdict.py ~/ray_results/three_seeds --margin 0.03
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, UsageError, add_verdict_options, number
from reports.experiment import ExperimentError, read_experiment
from reports.intervals import MOST_SEEDS
from reports.margin_tests import FIRST_LOOK
from reports.menu import Menu, MenuError, VerdictOptions, menu_of, recorded_options
from reports.menu_text import menu_data, table
from reports.parquet_reader import read_all
from reports.report import ReportError
from reports.stored import at_hand
from reports.summary import compare
from tuning.directories import directory_named, is_running

DESCRIPTION = """\
Compare the held-out rewards of an experiment's arms with the rewards of a baseline, and print a
menu: the speed and the cost of each arm, and a verdict. An arm is no worse if its loss of reward is
below the margin, with a confidence of 95 % over all arms. If an arm is undecided, the menu says how
many more seeds, minutes and device-hours a decision would probably take. An arm whose trials did
not do what its settings say fails its audit and has no verdict (docs/howto/verdict.md)."""
EXAMPLES = """\
examples:
  python launch/verdict.py ~/ray_results/three_seeds --margin 0.03
  python launch/verdict.py ~/ray_results/three_seeds --margin-relative 0.05 --baseline sync
  python launch/verdict.py ~/ray_results/three_seeds --margin 0.03 --max-seeds 20 --json

exit status: 0 each arm is either no worse or better, 2 bad usage or no verdict at all, 3 an arm is
worse, 4 an arm is undecided or fails its audit, and none is worse"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("verdict", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parse_arguments(argv)
    try:
        place = directory_named(args.experiment)
    except ValueError as error:
        raise UsageError(f"{args.experiment}: {error}") from None
    try:
        running = is_running(place)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read ({error.strerror})") from None
    if running:
        raise UsageError(
            f"{place}: a command is running this experiment; its report shows the results so far, "
            "and a verdict is possible when the command has ended"
        )
    try:
        with at_hand(place) as directory:
            menu = menu_in(directory, args)
    except (ReportError, ExperimentError, MenuError) as error:
        raise UsageError(str(error)) from None
    print(json.dumps(menu_data(menu), indent=1) if args.json else table(menu))
    return menu.status


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed options of the command."""
    command = shlex.join(command_line.command("verdict"))
    parser = Parser(
        prog=command_line.program("verdict"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/verdict.py", command),
    )
    add = parser.add_argument
    add("experiment", metavar="EXPERIMENT", help="directory of the experiment")
    add_verdict_options(parser, "by default, the values that tune.py was given")
    add(
        "--max-seeds",
        metavar="N",
        type=number(int, FIRST_LOOK, MOST_SEEDS),
        help="judge the seeds so far. The verdict is valid however often you look, up to a total "
        "of N seeds. Choose N before the first look. Without this option, a verdict needs all "
        "planned seeds",
    )
    add("--json", action="store_true", help="print the menu as JSON")
    return parser.parse_args(argv)


def menu_in(directory: Path, args: argparse.Namespace) -> Menu:
    """Return the menu of the experiment in a directory.

    Raises:
        ExperimentError: There is no experiment.
        MenuError: There is no verdict.
    """
    experiment = read_experiment(directory)
    recorded = recorded_options(experiment.description)
    given = VerdictOptions(
        margin=args.margin,
        margin_relative=args.margin_relative,
        baseline=args.baseline or recorded.baseline,
        max_seeds=args.max_seeds or recorded.max_seeds,
    )
    if recorded.max_seeds not in (None, given.max_seeds):
        raise MenuError(
            f"--max-seeds {given.max_seeds}: the experiment was started with {recorded.max_seeds}, "
            "and the maximum must be chosen before the first look"
        )
    if not given.has_margin:
        given = replace(given, margin=recorded.margin, margin_relative=recorded.margin_relative)
    if not given.has_margin:
        raise MenuError(
            "--margin is missing; set it to the largest loss of held-out reward that you accept, "
            "such as --margin 0.03"
        )
    comparison = compare(experiment.trials, experiment.not_begun)
    return menu_of(experiment, comparison, read_all(experiment.trials), given)


if __name__ == "__main__":
    sys.exit(main())
