"""Writes the report of an experiment: one HTML page, its figures as JSON, its plots as PNG files.

python launch/report.py ~/ray_results/three_seeds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launch.directories import local_directory
from reports.page import ReportError, write_report

OK, USAGE = 0, 2
DESCRIPTION = """\
Write EXPERIMENT_DIR/report.html, one page that compares the arms of an experiment: table, plots,
responses before and after training, exact settings. The page's figures are written to
EXPERIMENT_DIR/report.json, for programs, and the plots to EXPERIMENT_DIR/plots as PNG files. An
experiment that still runs, or that was killed, can be reported on as well; the page names what is
missing."""
EXAMPLES = """\
examples:
  python launch/report.py ~/ray_results/three_seeds

exit status: 0 the page is written, 2 there is nothing to report on or the page cannot be written"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message} (--help explains)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(
        prog="report.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiment_dir", metavar="EXPERIMENT_DIR", help="as tune.py printed it")
    try:
        directory = parser.parse_args(argv).experiment_dir
        print(write_report(experiment_directory(directory)))
    except ReportError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return USAGE
    return OK


def experiment_directory(text: str) -> Path:
    try:
        return local_directory(text)
    except ValueError as error:
        raise ReportError(f"{text}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
