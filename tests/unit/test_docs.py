"""The hand-written pages make true claims about the product."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_trainable.config import CHECKS
from grpo_trainable.config.engine_catalog import ENGINES
from search_spaces.spaces import SPACES

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALGORITHMS = (DOCS / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = ALGORITHMS.split("\n## ")[1:]
OF_THE_ALGORITHM = ("loss.", "optim.", "k_mode", "buffer_sampling", "weight_update")
CHOICES = [
    (key, value)
    for key, check in CHECKS.items()
    if key.startswith(OF_THE_ALGORITHM)
    for value in check.choices
]


@pytest.mark.parametrize(("key", "value"), CHOICES)
def test_algorithms_page_has_every_value_of_every_choice(key, value):
    about = [text for text in SECTIONS if f"`{key}`" in text or f"`{key}=" in text]
    assert any(f"`{value}`" in text for text in about), f"{key}={value} is not in algorithms.md"


@pytest.mark.parametrize(
    "name",
    sorted(
        set(
            re.findall(
                r"`((?:objective|distillation|losses|trust_regions|selection|advantages|"
                r"token_advantages|value_loss|rewards|aggregation|kl|ratios)\.\w+)`",
                ALGORITHMS,
            )
        )
    ),
)
def test_algorithms_page_names_functions_that_exist(name):
    module, function = name.split(".")
    assert callable(getattr(importlib.import_module(f"grpo_trainable.algo.{module}"), function))


def test_running_page_has_a_row_for_every_space():
    page = (DOCS / "running.md").read_text(encoding="utf-8")
    table = page.partition("| space | question |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SPACES)


ENGINE_ROWS = {
    name: row
    for row in (DOCS / "architecture" / "generator.md").read_text(encoding="utf-8").splitlines()
    for name in re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", row)
}


@pytest.mark.parametrize("engine", ENGINES)
def test_generator_page_has_what_an_engine_promises(engine):
    record, row = ENGINES[engine], ENGINE_ROWS[engine]
    assert ("the same bits" in row) == record.same_bits
    assert ("within 1e-4 of the learner's" in row) == (record.log_prob_error == 1e-4)


# ---- Pages that MkDocs does not build --------------------------------------------------------

ROOT = DOCS.parent
OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md"]


def links(page: str) -> list[str]:
    return re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return the link anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize(
    ("page", "link"), [(page, link) for page in OUTSIDE for link in links(page)]
)
def test_link_leads_somewhere(page, link):
    file, _, anchor = link.partition("#")
    path = ROOT / file if file else ROOT / page
    assert path.is_file()
    assert not anchor or anchor in anchors(path)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


PATHS = re.compile(
    r"`((?:grpo_trainable|callbacks|launch|reports|tuning|search_spaces|benchmarks|docs|tests)/[\w./]+)"
)
PAGES = [*(ROOT / page for page in OUTSIDE), *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    named = set(PATHS.findall(page.read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not (ROOT / path.rstrip(".")).exists()] == []


@pytest.mark.slow
def test_page_of_every_file_is_as_generated():
    script = [sys.executable, str(DOCS / "files.py")]
    generated = subprocess.run(script, capture_output=True, encoding="utf-8", check=True).stdout
    page = (DOCS / "architecture" / "files.md").read_text(encoding="utf-8")
    assert page == generated, "python docs/files.py > docs/architecture/files.md"


def test_page_of_every_file_has_every_file_with_words():
    page = (DOCS / "architecture" / "files.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", page, re.MULTILINE))
    packages = ("grpo_trainable", "launch", "tuning", "reports", "callbacks", "search_spaces")
    files = {
        path.relative_to(ROOT).as_posix()
        for name in packages
        for path in (ROOT / name).rglob("*.py")
    }
    assert {file for file in files - rows.keys() if not file.endswith("/__init__.py")} == set()
    assert [file for file, words in rows.items() if not words] == []


def test_what_the_shipped_policy_solves_is_what_was_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "micro.json").read_text())["greedy"]
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    for how, name in (("greedy", "pass@1"), ("sampled", "pass@1"), ("sampled", "pass@8")):
        own = found[how][name]
        assert f"| {own['value']:.3f} ({own['low']:.3f}-{own['high']:.3f}) |" in page
    assert (found["workload"]["policy"], found["workload"]["problems"]) == ("arithmetic", 512)
