"""Write the report of an experiment: an HTML page, its figures as JSON and its plots as PNG files.

python launch/report.py ~/ray_results/three_seeds
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, UsageError
from reports.report import ReportError, write_report
from reports.stored import at_hand
from tuning.directories import directory_named

DESCRIPTION = """\
Write EXPERIMENT_DIR/report.html, a page that compares the arms of an experiment: table, plots,
responses before and after training, and exact settings. Also write the page's figures to
EXPERIMENT_DIR/report.json, for programs, and its plots to EXPERIMENT_DIR/plots as PNG files. The
experiment may still be running, or may have been killed. In these cases, the page says what is
missing."""
EXAMPLES = """\
examples:
  python launch/report.py ~/ray_results/three_seeds

exit status: 0 the page is written, 2 there is nothing to report on or the page cannot be written"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return command_line.run("report", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    command = shlex.join(command_line.command("report"))
    parser = Parser(
        prog=command_line.program("report"),
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("python launch/report.py", command),
    )
    parser.add_argument(
        "experiment_dir",
        metavar="EXPERIMENT_DIR",
        help="directory of the experiment, as tune.py printed it",
    )
    given = parser.parse_args(argv).experiment_dir
    try:
        place = directory_named(given)
    except ValueError as error:
        raise UsageError(f"{given}: {error}") from None
    try:
        with at_hand(place) as directory:
            page = write_report(directory, _warn)
    except ReportError as error:
        raise UsageError(str(error)) from None
    print(place / page.name)


def _warn(text: str) -> None:
    print(f"{command_line.program('report')}: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
