"""References `module:name` and `file.py:name` are loaded, or rejected with a one-line error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from grpo_trainable.plugins import (
    PluginError,
    is_reference,
    load,
    load_instance,
    source_of,
    users_line,
)


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("text", ["a.b:c", "my_rewards:Score", "/x y/r.py:score", "r.py:f"])
def test_a_module_or_a_file_and_a_name_are_a_reference(text):
    assert is_reference(text)


@pytest.mark.parametrize("text", ["a:", ":f", "a.b", "a..b:c", "a b:c", "r.py:1f", "a\0.py:f", ""])
def test_anything_else_is_no_reference(text):
    assert not is_reference(text)


def test_a_name_of_a_file_is_loaded_once_and_sees_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_plugin.py").write_text("VALUE = 7\n")
    file = tmp_path / "json.py"
    file.write_text("from neighbour_of_plugin import VALUE\ndef value(): return VALUE\n")

    value = load("loss.type", f"{file}:value")

    assert value() == 7
    assert load("loss.type", f"{file}:value") is value
    assert sys.modules["json"].__name__ == "json", "a user's json.py does not replace the library"
    assert hasattr(sys.modules["json"], "loads")


def test_a_file_that_was_changed_is_loaded_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    file.write_text("def value(): return 1\n")
    before = load("loss.type", f"{file}:value")
    written = file.stat()
    file.write_text("def value(): return 2\n")
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))  # an edit in the same second
    assert (before(), load("loss.type", f"{file}:value")()) == (1, 2)


def test_a_module_is_looked_for_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "module_of_mine.py").write_text("class Mine: pass\n")
    monkeypatch.chdir(tmp_path)
    assert load("task.name", "module_of_mine:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no\\nlicence')", "cannot be imported: RuntimeError: no licence"),
        ("def f(:", "cannot be imported: SyntaxError: "),
        ("exit(2)", "cannot be imported: SystemExit: 2"),
        ("f = 3", "cannot be imported: TypeError: f is not callable"),
        ("g = 3", "has no attribute 'f'"),
        ("def ff(): ...", "has no attribute 'f'; did you mean ff? it has ff"),
    ],
)
def test_what_cannot_be_imported_is_one_line_that_names_it(tmp_path, source, reason):
    file = tmp_path / "bad.py"
    file.write_text(source)
    for _attempt in (1, 2):
        with pytest.raises(PluginError) as caught:
            load("loss.advantage", f"{file}:f")
        line = str(caught.value)
        assert line.startswith(f"loss.advantage={file}:f: ")
        assert reason in line
        assert "\n" not in line


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PluginError, match=r"^engine=no\.py:f: .*FileNotFoundError: no file /"):
        load("engine", "no.py:f")
    with pytest.raises(PluginError, match="No module named 'no_such_module'"):
        load("engine", "no_such_module.inside:f")


def test_the_file_of_a_name_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "my_rewards"
    package.mkdir()
    for name in ("__init__.py", "words.py"):
        (package / name).write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    assert source_of("my_rewards.words:score") == str(package / "words.py")
    assert source_of("my_rewards:score") == str(package / "__init__.py")
    assert source_of("/some/file.py:score") == "/some/file.py"
    assert "my_rewards" not in sys.modules


def test_a_name_without_a_file_is_not_looked_for_further():
    assert source_of("sys:intern") is None
    assert source_of("no_such_package.rewards:score") is None


def test_a_wrong_name_is_answered_with_those_that_would_do(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from math import floor\nfrom dataclasses import field\nimport re\n"
        "def clipped(): ...\ndef _private(): ...\nclass Ratio: ...\nlimit = 3\n"
    )
    with pytest.raises(PluginError) as caught:
        load("loss.type", f"{file}:cliped")
    assert str(caught.value).endswith("'cliped'; did you mean clipped? it has clipped, Ratio")
    with pytest.raises(PluginError, match=r"'sqrt'; it has clipped, Ratio$"):
        load("loss.type", f"{file}:sqrt")
    with pytest.raises(PluginError, match=r"'limits'; did you mean limit\? it has limit$"):
        load_instance("transport", f"{file}:limits", int)
    with pytest.raises(PluginError, match=r"has no attribute 'limits'$"):
        load_instance("transport", f"{file}:limits", Path)


def test_an_option_is_written_as_on_a_command_line_and_a_setting_as_an_assignment():
    with pytest.raises(PluginError, match=r"^--space json:MINE: cannot be imported: "):
        load_instance("--space", "json:MINE", Path)
    with pytest.raises(PluginError, match=r"^transport=json:dumps: must be a .*Path, got a f"):
        load_instance("transport", "json:dumps", Path)


def test_the_innermost_line_of_the_users_code_is_found(tmp_path):
    (tmp_path / "helper_of_plugin.py").write_text(
        "import json\ndef read(x): return json.loads(x)\n"
    )
    (tmp_path / "mine.py").write_text(
        "from helper_of_plugin import read\n"
        "from grpo_trainable.config import parse_assignment\n"
        "def in_a_helper(): return read('no json')\n"
        "def in_generated_code(): exec('1 / 0')\n"
        "def in_the_package(): return parse_assignment('x')\n"
    )

    def line(name: str) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each function has its own error
            load("task.reward", f"{tmp_path}/mine.py:{name}")()
        return users_line(caught.value.with_traceback(caught.tb.tb_next))

    assert line("in_a_helper") == " (helper_of_plugin.py, line 2)"
    assert line("in_generated_code") == " (mine.py, line 4)"
    assert line("in_the_package") == " (mine.py, line 5)"


def test_without_code_of_the_user_there_is_no_line():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load("task.reward", "json:loads")("no json")
    assert users_line(caught.value.with_traceback(caught.tb.tb_next)) == ""
