"""Commands report mistakes in one line, name themselves as started, and end quietly."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_trainable.command_line import (
    INTERRUPTED,
    OK,
    OUTPUT_CLOSED,
    USAGE,
    Parser,
    UsageError,
    command,
    number,
    output_dropped_on_error,
    program,
    run,
    time_span,
)
from grpo_trainable.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        ["launch/tune.py", "--settings"],
        ["launch/tune.py", "--list"],
        ["launch/report.py", "--help"],
        ["launch/verdict.py", "--help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_has_gone_gets_no_traceback(script):
    process = subprocess.Popen(
        [sys.executable, *script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # with unbuffered output, argparse would ignore that the output is closed
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None
    process.stdout.close()  # long before the command prints its first line
    _, error = process.communicate(timeout=60)
    assert error == b""
    assert process.returncode == OUTPUT_CLOSED == 141


GOES_ON = """
import sys
from pathlib import Path
from grpo_trainable.command_line import output_dropped_on_error, run

def body():
    with output_dropped_on_error():
        for stream in (sys.stdout, sys.stderr):
            for _ in range(3):
                print("x" * 10_000, file=stream, flush=True)
        Path(sys.argv[1]).write_text("done")
        print("the end")
        return 130

sys.exit(run("tune", body))
"""


@pytest.mark.slow
def test_work_that_must_not_end_goes_on_without_a_reader(tmp_path):
    """With `2>&1 | tee log`, Ctrl-C also ends `tee`, so nobody reads the output."""
    process = subprocess.Popen(
        [sys.executable, "-c", GOES_ON, str(tmp_path / "file")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == INTERRUPTED
    assert (tmp_path / "file").read_text() == "done"


def test_a_log_on_a_full_disk_stops_nothing(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with output_dropped_on_error():
            print("lost", flush=True)
            print("kept", file=sys.stderr)
        full.flush()  # the interpreter does this at exit
    assert capsys.readouterr().err == "kept\n"


def test_a_stream_that_was_replaced_meanwhile_stays():
    """A live table may end meanwhile, and restores the stream that it had replaced."""
    before, later = sys.stdout, io.StringIO()
    with output_dropped_on_error():
        assert sys.stdout is not before
        sys.stdout = later
    assert sys.stdout is later
    sys.stdout = before
    with output_dropped_on_error():
        pass
    assert sys.stdout is before


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/full"])
def test_output_that_leads_nowhere_does_not_change_the_exit_status(tmp_path, closed):
    script = tmp_path / "script.py"
    script.write_text(GOES_ON)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        f"{sys.executable} {script} {tmp_path / 'file'} {closed}",
        shell=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == INTERRUPTED, run.stderr
    assert "Traceback" not in run.stderr
    assert (tmp_path / "file").read_text() == "done"


def raising(error: BaseException):
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UsageError("--seed: no"), USAGE, "tune.py: --seed: no\n"),
        (ConfigError("lag=-1: no"), USAGE, "tune.py: lag=-1: no\n"),
        (KeyboardInterrupt(), INTERRUPTED, "tune.py: interrupted\n"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(error, status, text, capsys):
    assert run("tune", raising(error)) == status
    assert capsys.readouterr().err == text


def test_a_bug_is_not_taken_for_a_mistake():
    with pytest.raises(ValueError, match="a bug"):
        run("tune", raising(ValueError("a bug")))


def test_no_status_is_ok():
    assert run("tune", lambda: None) == OK


@pytest.mark.parametrize(
    ("started", "name", "words"),
    [
        ("launch/tune.py", "tune.py", ["python", "launch/tune.py"]),
        ("/a/launch/report.py", "tune.py", ["python", "/a/launch/tune.py"]),
        ("/usr/bin/pytest", "tune.py", ["python", "launch/tune.py"]),
        ("/usr/local/bin/grpo-tune", "grpo-tune", ["grpo-tune"]),
        ("/usr/local/bin/grpo-report", "grpo-tune", ["grpo-tune"]),
    ],
)
def test_messages_name_a_command_as_this_one_was_started(monkeypatch, started, name, words):
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.chdir(ROOT)
    assert program("tune") == name
    assert command("tune") == words


def test_a_program_outside_the_repository_names_the_entry_points(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["my_tuner.py"])
    monkeypatch.chdir(tmp_path)
    assert command("make_data") == ["grpo-make-data"]


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("+7", 7), ("12", 12)])
def test_integers_in_range_are_read(text, value):
    assert number(int, 1, 12)(text) == value


@pytest.mark.parametrize("text", ["0", "13", "-3", "1.5", "1e1", "1_0", " 1", "many", "", "inf"])
def test_anything_else_is_refused_with_what_is_valid(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"an integer in \[1, 12\], got"):
        number(int, 1, 12)(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "-0.1", "1_0.0"])
def test_numbers_are_finite(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a number >= 0"):
        number(float, 0)(text)
    assert number(float, 0)("2e-4") == 2e-4


def test_time_spans_are_read_in_seconds():
    assert [time_span(text) for text in ("2h", "90m", "3600s", "0.5h")] == [7200, 5400, 3600, 1800]
    for text in ("2", "h", "0h", "-1h", "2d", "1h30m"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 2h, 90m or 3600s"):
            time_span(text)


def test_options_are_never_abbreviated():
    parser = Parser(prog="tune.py")
    parser.add_argument("--samples")
    with pytest.raises(UsageError, match=r"--sampl.*--help"):
        parser.parse_args(["--sampl", "3"])
