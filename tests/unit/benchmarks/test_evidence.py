"""`make evidence` with quick items: which items run, and what keeps the command from starting."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import evidence
import measure
import pytest
from evidence import ITEMS, Item

from grpo_trainable.command_line import UsageError
from grpo_trainable.telemetry.machine_load import Disturbance, Meter

SCRIPT = """
import json, pathlib, sys
result, commit, status = sys.argv[1:]
with open("{runs}", "a") as runs:
    runs.write(pathlib.Path(result).name + " ")
pathlib.Path(result).write_text(json.dumps({{"command": "x", "commit": commit, "dirty": False}}))
print("the output of the item")
sys.exit(int(status))
"""


RAN: list[str] = []  # items that the last command ran


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that runs quick items at a commit.

    The function returns the names of the items that ran, and the content of the written file.
    """
    script, runs, out = tmp_path / "item.py", tmp_path / "runs", tmp_path / "evidence.json"
    script.write_text(SCRIPT.format(runs=runs))
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(evidence, "is_dirty", lambda: False)
    monkeypatch.setattr(evidence, "check_machine", lambda: None)
    monkeypatch.setattr(evidence, "write", lambda path, result, **how: save(path, result))

    def run(statuses: dict[str, int], commit: str = "1") -> tuple[list[str], dict[str, Any]]:
        origin = {"command": "x", "commit": commit, "dirty": False}
        monkeypatch.setattr(evidence, "provenance", lambda args: dict(origin))
        monkeypatch.setattr(sys, "argv", ["evidence.py", "--out", str(out)])
        runs.write_text("")
        items = [
            Item(
                name, 1.0, str(script), f"{tmp_path / name}.json {commit} {status}", f"{name}.json"
            )
            for name, status in statuses.items()
        ]
        try:
            evidence.main(items)
        finally:
            RAN[:] = [name.removesuffix(".json") for name in runs.read_text().split()]
        return list(RAN), json.loads(out.read_text())

    return run


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result))


def test_items_run_in_order_and_their_times_add_up(bench, capsys):
    ran, record = bench({"one": 0, "two": 0})
    assert ran == ["one", "two"]
    assert list(record["items"]) == ["one", "two"]
    times = [item["wall_clock_s"] for item in record["items"].values()]
    assert record["wall_clock_s"] == pytest.approx(sum(times))
    printed = capsys.readouterr().out
    assert "2/2 two: 1 min planned" in printed
    assert "about 0 min left" in printed
    assert "the output of the item" not in printed


def test_the_same_command_continues_with_the_items_that_are_not_complete(bench, capsys):
    with pytest.raises(SystemExit, match=r"two: exit status 3; see .*two\.log"):
        bench({"one": 0, "two": 3, "three": 0})
    assert RAN == ["one", "two"]
    ran, record = bench({"one": 0, "two": 0, "three": 0})
    assert ran == ["two", "three"]
    assert list(record["items"]) == ["one", "two", "three"]


def test_another_commit_runs_everything_again(bench):
    bench({"one": 0, "two": 0})
    ran, record = bench({"one": 0, "two": 0}, commit="2")
    assert ran == ["one", "two"]
    assert record["commit"] == "2"


def test_a_result_that_was_replaced_since_is_measured_again(bench, tmp_path: Path):
    bench({"one": 0, "two": 0})
    save(tmp_path / "one.json", {"command": "x", "commit": "0", "dirty": False})
    assert bench({"one": 0, "two": 0})[0] == ["one"]


def test_a_changed_checkout_is_refused(bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evidence, "is_dirty", lambda: True)
    with pytest.raises(UsageError, match="uncommitted changes"):
        bench({"one": 0})
    assert RAN == []


@pytest.mark.parametrize(("foreign_s", "refused"), [(0.5, False), (2.0, True)])
def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, foreign_s, refused):
    # In five seconds, two cores have ten core-seconds. `load.fraction` would be 0, because the
    # process that takes the reading only sleeps and never waits for a core.
    load = Disturbance(foreign_s, waited_s=0.0, denied_s=0.0, cores=2, quota=2.0, seconds=5.0)
    monkeypatch.setattr(evidence, "LISTENED_S", 0.0)
    monkeypatch.setattr(Meter, "take", lambda self: load)
    if refused:
        with pytest.raises(UsageError, match="other work uses 20% of this machine"):
            evidence.check_machine()
    else:
        evidence.check_machine()


def test_all_items_take_at_most_an_hour_and_write_different_results():
    assert sum(item.minutes for item in ITEMS) <= 60
    assert len({(item.result, item.part) for item in ITEMS}) == len(ITEMS)
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert all((measure.ROOT / item.script).is_file() for item in ITEMS)


def test_the_committed_results_of_the_set_have_one_commit():
    record = measure.read(measure.RESULTS / "evidence.json")
    measured = [item for item in ITEMS if item.name in record.get("items", {})]
    assert {item.written["commit"] for item in measured} <= {record.get("commit")}


def test_a_part_of_a_result_counts_only_with_its_commit(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    save(tmp_path / "micro.json", {"packing": {"commit": "1", "dirty": False}})
    origin, done = {"commit": "1", "dirty": False}, {"packing": {}, "learners": {}}
    packing, learners = (evidence.micro(claim, 1.0, "") for claim in ("packing", "learners"))
    assert evidence.is_complete(packing, done, origin)
    assert not evidence.is_complete(learners, done, origin)
    assert not evidence.is_complete(packing, {}, origin)


@pytest.mark.slow
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_the_benchmark_of_an_item_accepts_its_options(item: Item, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*item.command, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(measure.ROOT / item.script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
