"""The tables in the README and the quickstart match the report next to the quickstart."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tables import arms_of_log

from grpo_trainable.command_line import align

ROOT = Path(__file__).resolve().parents[3]
REPORT = json.loads((ROOT / "docs" / "quickstart" / "report.json").read_text())


def table(page: str) -> dict[str, dict[str, str]]:
    """Return a page's first text table that has a column `arm`, as arm -> column -> cell."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if re.match(r"arm\s+rounds\s", line))
    rows = []
    for line in lines[first:]:
        if line.startswith("```"):
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    header, *others = rows
    return {row[0]: dict(zip(header, row, strict=True)) for row in others}


def ratio(arm: str, key: str) -> str:
    if arm == REPORT["baseline"]:
        return "1.00x"
    own = REPORT["pairs"][arm][key]
    return f"{own['value']:.2f}x ({own['low']:.2f}-{own['high']:.2f})"


def test_the_quickstarts_table_is_that_of_its_report():
    found = table("docs/quickstart.md")
    assert found.keys() == REPORT["arms"].keys()
    for arm, cells in found.items():
        own = REPORT["arms"][arm]
        before, after = (own[f"reward_{end}"]["median"] for end in ("before", "after"))
        assert cells["rounds"] == f"{own['rounds']['median']:.0f}"
        assert cells["samples/s"] == f"{own['samples_per_s']['median']:.0f}"
        assert cells["speed-up"] == ratio(arm, "speed_up")
        assert cells["at equal cost"] == ratio(arm, "equal_cost")
        assert cells["held-out reward"] == f"{before:.3f} -> {after:.3f}"


def test_readmes_table_is_a_part_of_the_quickstarts():
    whole = table("docs/quickstart.md")
    for arm, cells in table("README.md").items():
        assert cells.items() <= whole[arm].items()


def test_the_report_is_the_one_whose_origin_is_recorded():
    origin = json.loads((ROOT / "benchmarks" / "results" / "quickstart.json").read_text())
    content = (ROOT / "docs" / "quickstart" / "report.json").read_bytes()
    assert origin["report_json_sha256"] == hashlib.sha256(content).hexdigest()


def test_the_table_of_a_log_may_have_empty_cells():
    cells = [
        ["arm", "rounds", "speed-up", "held-out reward"],
        ["sync", "12", "", "0.352 -> 0.867"],
        ["async_k1", "", "1.37x (1.34-1.39)", ""],
    ]
    header, *rows = cells
    found = arms_of_log(f"so far\n\narm without a table\n\n{align(cells)}\nNot a row of it.\n")
    assert found == [dict(zip(header, row, strict=True)) for row in rows]
