"""What every command line shares: how it reads arguments, shows what it found, reports a mistake,
and ends.

The standard library only: a command answers bad usage before anything slow is imported.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_trainable.config import ConfigError, shown
from grpo_trainable.plugins import PluginError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
OUTPUT_CLOSED = (
    128 + signal.SIGPIPE
)  # what a shell reports for a program that writes to a closed pipe


class UsageError(Exception):
    """A mistake that is known before anything starts, in one line that says what to do."""


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of its texts, accepts no abbreviated option, raises UsageError."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # `run` can still see that nobody reads it
        super().exit(status, message)


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a finite number of `kind`, int or float, in [low, high]."""
    what = "an integer" if kind is int else "a number"
    span = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"

    def read(text: str) -> Any:
        try:
            value = kind(text) if re.fullmatch(r"[-+.\deE]+", text) else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {what} {span}, got {shown(text)}")
        return value

    return read


def align(rows: Sequence[Sequence[str]]) -> str:
    """The rows as text in columns; the first is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def command(name: str) -> list[str]:
    """The words that start the command line `name` in the way the present one was started: by its
    entry point, or as a file of the repository."""
    by_entry_point = Path(sys.argv[0]).name.startswith("grpo-")
    return [f"grpo-{name.replace('_', '-')}"] if by_entry_point else ["python", f"launch/{name}.py"]


def program(name: str) -> str:
    """What messages of the command line `name` begin with: `grpo-tune` or `tune.py`."""
    return Path(command(name)[-1]).name


def run(name: str, body: Callable[[], int | None]) -> int:
    """The exit status of `body`, None standing for OK. A mistake of the user's is one line on
    standard error; where the reader of the output has gone (`| head`) nothing is printed."""
    try:
        status = body()
        sys.stdout.flush()
        return OK if status is None else status
    except (UsageError, ConfigError, PluginError) as error:
        print(f"{program(name)}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"{program(name)}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
