"""The command launch/align.py without TRL: its options, and its one-line errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hf_models import write_json_files

from launch import align


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command, and returns the exit status and standard error.

    The command finds a model, a file of rows and all libraries, unless a test removes them.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch/align.py"])
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")  # restored after the test
    monkeypatch.setattr(align, "missing_library", lambda name, install: None)
    write_json_files(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    row = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 2)

    def run(*argv: str, stage: str = "sft") -> tuple[int, str]:
        given = {"--model": "model", "--train-file": "rows.jsonl", "--out": "out"}
        given |= dict(zip(argv[::2], argv[1::2], strict=True))
        options = [word for pair in given.items() for word in pair]
        status = align.main([stage, *options])
        return status, capsys.readouterr().err

    return run


def refused(result: tuple[int, str], words: str) -> None:
    status, error = result
    assert status == 2
    assert error.startswith("align.py: ")
    assert error.count("\n") == 1
    assert words in error
    assert not Path("out").exists()


def test_the_help_names_each_stage(capsys):
    with pytest.raises(SystemExit):
        align.main(["--help"])
    out = capsys.readouterr().out
    assert all(stage in out for stage in ("sft ", "reward-model ", "dpo "))


def test_a_missing_option_or_an_unknown_stage_is_refused(capsys):
    assert align.main(["sft"]) == 2
    assert "--model, --train-file, --out" in capsys.readouterr().err
    assert align.main(["ppo"]) == 2
    assert "invalid choice: 'ppo'" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_the_command_that_installs_it(command, monkeypatch):
    said = "the library trl is not installed; run: pip install -e '.[align]'"
    monkeypatch.setattr(align, "missing_library", lambda name, install: said)
    refused(command(), said)


def test_a_missing_model_is_refused_by_its_option(command):
    refused(command("--model", "none"), "--model none: no such directory")


def test_rows_of_another_stage_are_refused(command):
    refused(command(stage="dpo"), "--train-file rows.jsonl: line 1: has the columns prompt")


def test_held_out_rows_of_another_layout_are_refused(command):
    Path("other.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    words = "--eval-file other.jsonl: has rows of text as texts, but --train-file has rows of"
    refused(command("--eval-file", "other.jsonl"), words)


def test_a_single_row_cannot_be_divided(command):
    Path("rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    refused(command(), "--train-file rows.jsonl: has 1 row; at least 2 are needed")


def test_a_malformed_setting_is_refused(command):
    refused(command("--set", "beta"), "--set beta: must have the form KEY=VALUE")
