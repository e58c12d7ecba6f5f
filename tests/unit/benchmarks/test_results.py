"""Committed results state how they were measured, and pages link to results that exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import measure
import pytest
from measure import ROOT, measurements

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"benchmarks/results/(\w[\w.-]*\.json)")
PARTS = [
    pytest.param(part, id=f"{path.stem} {name}".rstrip())
    for path in RESULTS
    for name, part in measurements(json.loads(path.read_text())).items()
]


@pytest.mark.parametrize("result", PARTS)
def test_a_result_says_how_it_was_measured(result: dict[str, Any]):
    assert re.fullmatch("[0-9a-f]{40}", result["commit"])
    assert result["dirty"] is False
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["at"])
    assert {"cpu", "cores", "memory_gb"} <= result["hardware"].keys()
    assert {"python", "torch"} <= result["packages"].keys()
    assert "seed" in result


class Parsed(Exception):
    """The options of a command are valid."""


@pytest.mark.parametrize("result", PARTS)
def test_the_benchmark_of_a_result_still_accepts_its_command(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    python, *argv = shlex.split(result.get("again", result["command"]))
    assert python == "python"
    assert (ROOT / argv[0]).is_file()
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> None:
        _, unknown = parse(parser, *given)
        assert unknown == []
        raise Parsed

    # Every way to parse calls this method, so no benchmark can run.
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(Parsed):
        import_module(Path(argv[0]).stem).main()


def test_every_result_backs_a_page_and_every_page_links_to_results():
    linked = {name for page in PAGES for name in LINK.findall(page.read_text(encoding="utf-8"))}
    assert linked == {path.name for path in RESULTS}


def test_a_checkout_that_changes_while_a_benchmark_runs_makes_its_result_dirty(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(
        measure, "git", lambda *words, tree=ROOT: "1\n" if words[0] == "rev-parse" else ""
    )
    path = tmp_path / "x.json"
    measure.write(path, {"command": "x", "commit": "1", "dirty": False}, quiet=True)
    assert json.loads(path.read_text())["dirty"] is False
    assert capsys.readouterr().out == ""
    measure.write(path, {"command": "x", "commit": "0", "dirty": False})
    assert json.loads(path.read_text())["dirty"] is True
    assert "do not commit this file" in capsys.readouterr().out
