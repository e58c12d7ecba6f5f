"""Shared parts of all command lines: arguments, output, error messages and exit status.

This module imports only the standard library, so a command reports bad usage before slow imports.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from grpo_trainable.config import ConfigError, shown
from grpo_trainable.plugins import PluginError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# The status that a shell reports for a program that writes to a closed pipe.
OUTPUT_CLOSED = 128 + signal.SIGPIPE


class UsageError(Exception):
    """A user's mistake, found before work starts. The message is one line that says what to do."""


class Parser(argparse.ArgumentParser):
    """Parser that keeps line breaks, rejects abbreviated options, and raises UsageError."""

    def __init__(
        self, *, advice: Callable[[str], str | None] = lambda option: None, **options: Any
    ) -> None:
        """Make a parser.

        Args:
            advice: Function that returns advice for an unknown option, or None.
            options: Arguments of `argparse.ArgumentParser`.
        """
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)
        self._advice = advice

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse all arguments. Raise UsageError for an unknown option, with advice on it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        for option in unknown:
            advice = self._advice(option) if option.startswith("--") else None
            if advice is not None:
                raise UsageError(f"{option}: not an option; {advice}")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of exiting."""
        raise UsageError(f"{message} (--help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush standard output, then exit."""
        sys.stdout.flush()  # at this point, `run` can still handle a closed pipe
        super().exit(status, message)


class Once(argparse.Action):
    """Action of `argparse` for an option that must not be given twice."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store the value. Raise UsageError if the option already has a value."""
        before = getattr(namespace, self.dest)
        if before is not None:
            name = self.option_strings[0]
            both = f"{name} {values}: {name} {before} is given too"
            raise UsageError(f"{both}; remove one of the two")
        setattr(namespace, self.dest, values)


def number(
    kind: type, low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], Any]:
    """Return an argparse type for finite numbers in [low, high].

    Args:
        kind: int or float.
        low: The smallest valid number.
        high: The largest valid number.
        above: If True, `low` itself is not valid.
    """
    what = "an integer" if kind is int else "a number"
    span = f"in {'(' if above else '['}{low:g}, {high:g}]"
    if high == math.inf:
        span = f"{'above' if above else '>='} {low:g}"

    def read(text: str) -> Any:
        try:
            value = kind(text) if re.fullmatch(r"[-+.\deE]+", text) else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf or (above and value == low):
            raise argparse.ArgumentTypeError(f"must be {what} {span}, got {shown(text)}")
        return value

    return read


positive = number(float, 0, above=True)


def share(text: str) -> float:
    """Convert a share such as 0.05 to a number. This is an argparse type."""
    value = positive(text)
    # If a user gave 5 and meant 5 %, the margin would be 500 % and accept any loss.
    if value >= 1:
        percent = f"; for {value:g} %, write {value / 100:g}" if value < 100 else ""
        raise argparse.ArgumentTypeError(f"must be a number below 1, got {shown(text)}{percent}")
    return value


def add_verdict_options(
    parser: argparse.ArgumentParser, description: str
) -> argparse._ArgumentGroup:
    """Add a group with the options for verdicts on arms, and return the group.

    A verdict compares the held-out reward of an arm with that of the baseline.

    Args:
        parser: The parser of the command.
        description: Says what the command does with these options, and what it does without them.
    """
    group = parser.add_argument_group("verdicts", description)
    margin = group.add_mutually_exclusive_group()
    margin.add_argument(
        "--margin",
        metavar="REWARD",
        type=positive,
        help="largest acceptable loss of held-out reward",
    )
    margin.add_argument(
        "--margin-relative",
        metavar="SHARE",
        type=share,
        help="the same margin, as a share of the baseline's held-out reward, such as 0.05",
    )
    group.add_argument(
        "--baseline",
        metavar="ARM",
        help="the arm with which verdicts compare the other arms (the first arm)",
    )
    return group


def time_span(text: str) -> float:
    """Convert a time such as 2h, 90m or 3600s to seconds. This is an argparse type."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([hms])", text)
    seconds = float(found[1]) * {"h": 3600, "m": 60, "s": 1}[found[2]] if found else 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"must be a time above 0, such as 2h, 90m or 3600s, got {shown(text)}"
        )
    return seconds


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text: the first column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def command(name: str) -> list[str]:
    """Return the first words of the command line that runs the command `name`.

    If the current command is a file of `launch/`, the result is `python launch/NAME.py`, with the
    path of `launch/` as the user typed it. Another program gets this result only if the current
    directory contains that file of `launch/`. Otherwise, the result is the entry point of `name`,
    such as `grpo-tune`.
    """
    started = Path(sys.argv[0])
    entry_point = [f"grpo-{name.replace('_', '-')}"]
    if started.name.startswith("grpo-"):
        return entry_point
    if started.parent.name == "launch":
        return ["python", str(started.parent / f"{name}.py")]
    file = Path("launch", f"{name}.py")
    return ["python", str(file)] if file.exists() else entry_point


def program(name: str) -> str:
    """Return the prefix of messages from the command line `name`: `grpo-tune` or `tune.py`."""
    return Path(command(name)[-1]).name


def run(name: str, body: Callable[[], int | None]) -> int:
    """Run `body` and return its exit status; None means OK.

    A user's mistake is printed as one line on standard error. If the program that reads the output
    has ended (`| head`), nothing is printed.
    """
    try:
        status = body()
        if sys.stdout is not None:  # None if the shell closed standard output: `>&-`
            sys.stdout.flush()
        return OK if status is None else status
    except (UsageError, ConfigError, PluginError) as error:
        print(f"{program(name)}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"{program(name)}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more when it ends. That flush must not fail.
        if sys.stdout is not None:
            _discard(sys.stdout)
        return OUTPUT_CLOSED


# ---- Output that may fail ----------------------------------------------------------------------


@contextlib.contextmanager
def output_dropped_on_error() -> Iterator[None]:
    """Drop output that cannot be written, instead of raising an error, and continue.

    Use this for work that must continue even if Ctrl-C has ended `| tee`, or if the disk that holds
    the log is full.
    """
    guarded = {
        name: (stream, _Droppable(stream))
        for name in ("stdout", "stderr")
        # None if the shell closed the stream: `>&-`
        if (stream := getattr(sys, name)) is not None
    }
    for name, (_, droppable) in guarded.items():
        setattr(sys, name, droppable)
    try:
        yield
    finally:
        for name, (stream, droppable) in guarded.items():
            droppable.end()
            # A live table replaces the stream while the table runs. If a table started before this
            # block and ended inside it, the table has restored the stream already.
            if getattr(sys, name) is droppable:
                setattr(sys, name, stream)


class _Droppable:
    """Text stream whose `write` and `flush` raise no OSError."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text if possible, and return its length."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        self._try(self._stream.flush)

    def end(self) -> None:
        """Flush for the last time, and drop output that cannot be written."""
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)  # otherwise the interpreter's own last flush fails

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            _discard(self._stream)  # nobody reads the stream any more
        except OSError:
            return  # keep the stream: a full disk may have space later


def _discard(stream: IO[str]) -> None:
    """Redirect all later output of a stream to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
