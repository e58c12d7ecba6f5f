"""The files of an evaluation can be read again, and hostile responses stay text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from evaluations import answered, generation, record, unscored

from reports.evaluations.categories import categories_page, examples, fenced
from reports.evaluations.files import (
    EvaluationError,
    prepare_directory,
    read_evaluation,
    write_evaluation,
)
from reports.evaluations.page import data_block, render_page
from reports.evaluations.pairs import differences

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> ``` \u202e\u0007 <!-- "
    "]]> {{x}} \"' &amp; javascript:alert(1)\n# heading\n| a | b |"
)


@pytest.fixture
def hostile():
    return record(
        [
            generation(
                0, 0, response=HOSTILE, prompt=HOSTILE, answer=HOSTILE, ground_truth=HOSTILE
            ),
            generation(0, 1, 0.0, response="", prompt=HOSTILE, ground_truth=HOSTILE),
            unscored(1, 0, error=HOSTILE),
            generation(1, 1, 0.0, format_reward=0.0, response="x" * 9000, finished=False),
        ]
    )


def written(directory: Path, evaluation, *others) -> Path:
    prepare_directory(directory)
    write_evaluation(directory, evaluation, *others)
    return directory


@pytest.mark.slow
def test_what_was_written_is_read_back(hostile, tmp_path):
    out = written(tmp_path / "mine", hostile)
    assert read_evaluation(out) == hostile
    assert {path.name for path in out.iterdir()} == {
        *("evaluation.json", "evaluation.html", "categories.md"),
        *("generations.parquet", "generations.jsonl"),
    }


@pytest.mark.slow
def test_jsonl_and_parquet_hold_the_same_rows(hostile, tmp_path):
    out = written(tmp_path / "mine", hostile)
    with (out / "generations.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    table = pq.read_table(out / "generations.parquet").to_pylist()
    assert [{**row, "ground_truth": json.loads(row["ground_truth"])} for row in table] == lines
    assert lines[0]["response"] == HOSTILE
    assert [row["category"] for row in lines] == ["correct", "wrong_answer", None, "wrong_format"]


@pytest.mark.slow
def test_a_graded_evaluation_has_no_page_of_categories(tmp_path):
    out = written(tmp_path / "mine", answered([[0.5]]))
    assert not (out / "categories.md").exists()
    assert "There are no categories" in (out / "evaluation.html").read_text()


def test_a_directory_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    prepare_directory(tmp_path / "mine")
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(EvaluationError, match="mine: is not empty"):
        prepare_directory(tmp_path / "mine")
    with pytest.raises(EvaluationError, match="file: cannot be used"):
        prepare_directory(tmp_path / "mine" / "file")


def test_a_directory_without_an_evaluation_is_told_so(tmp_path):
    with pytest.raises(EvaluationError, match=r"contains no evaluation: evaluation\.json"):
        read_evaluation(tmp_path)
    with pytest.raises(EvaluationError, match="contains no evaluation"):
        read_evaluation(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("evaluation.json", b"{", "evaluation.json"),
        ("evaluation.json", b"[]", "has format list"),
        ("evaluation.json", b'{"format": 2}', "has format 2, but this program reads format 1"),
        ("evaluation.json", b'{"format": 1, "config": {}}', "'policy'"),
        (
            "evaluation.json",
            b'{"format": 1, "policy": {}, "config": {"task": null}}',
            "contains no readable evaluation",
        ),
        (
            "evaluation.json",
            b'{"format": 1, "policy": {}, "config": {}, "files": 3}',
            "contains no readable evaluation",
        ),
        ("generations.parquet", b"PAR1", "contains no readable evaluation"),
    ],
)
def test_a_damaged_evaluation_is_refused_in_one_line(name, content, text, tmp_path):
    out = written(tmp_path / "mine", answered([[1]]))
    (out / name).write_bytes(content)
    with pytest.raises(EvaluationError) as caught:
        read_evaluation(out)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_link_is_not_followed(tmp_path):
    out = written(tmp_path / "mine", answered([[1]]))
    (out / "generations.parquet").rename(tmp_path / "elsewhere")
    (out / "generations.parquet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EvaluationError, match="is a link"):
        read_evaluation(out)


# ---- The page --------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


@pytest.mark.slow
def test_hostile_responses_make_no_element_and_no_attribute(hostile):
    harmless = record(
        [
            generation(0, 0, answer="x"),
            generation(0, 1, 0.0),
            unscored(1, 0),
            generation(1, 1, 0.0, format_reward=0.0, finished=False),
        ]
    )
    pages = [Elements(render_page(own, None, [])) for own in (hostile, harmless)]
    tags = [[tag for tag, _ in page.found if tag != "span"] for page in pages]
    assert tags[0] == tags[1]  # except for the span that says how much was cut off
    assert not [name for page in pages for _, own in page.found for name in own if name[:2] == "on"]


@pytest.mark.slow
def test_only_the_pages_own_script_may_run(hostile):
    page = render_page(hostile, None, [])
    elements = Elements(page)
    data, script = elements.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Policy" content="([^"]*)"', page)[1])
    assert policy == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    kinds = [own.get("type") for tag, own in elements.found if tag == "script"]
    assert kinds == ["application/json", None]
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert json.loads(data)["rows"]


def test_the_data_of_the_page_are_the_responses(hostile):
    block = data_block(hostile)
    assert "<" not in block
    data = json.loads(block)
    rows = [dict(zip(data["fields"], row, strict=True)) for row in data["rows"]]
    assert rows[0]["response"] == HOSTILE.replace("\u202e", "[U+202E]").replace("\u0007", "␇")
    assert [row["category"] for row in rows] == [
        *("correct", "wrong_answer", "unscored", "wrong_format")
    ]
    assert rows[2]["reward"] is None
    assert rows[3]["response"].endswith("x … 5000 more characters")
    assert [data["prompts"][row["prompt"]]["index"] for row in rows] == [0, 0, 1, 1]


@pytest.mark.slow
def test_the_page_says_what_is_missing_and_compares(hostile):
    before = answered([[0, 0], [0, 1]], name="before <b>")
    after = answered([[1, 1], [1, 1]])
    page = render_page(after, before, differences(after, before))
    assert "Compared with before &lt;b&gt;" in page
    assert "+0.750" in page
    assert "Missing or doubtful" not in page
    assert "the reward failed on 1 of 4 responses" in render_page(hostile, None, [])


# ---- Markdown --------------------------------------------------------------------------------


def test_a_fence_is_longer_than_any_run_of_backticks():
    assert fenced("a") == "```text\na\n```"
    assert fenced("a ````` b").startswith("``````text\n")


def test_the_table_of_categories_counts_all_and_shows_ten_of_each():
    page = categories_page(answered([[1.0, 0.0]] * 12))
    assert "| correct | format 1, answer 1 | 12 | 50.0% |" in page
    assert page.count("### Prompt") == 20
    assert "\n10 of 12.\n" in page
    assert "\n0 of 0.\n" in page


def test_examples_are_of_different_prompts_as_far_as_there_are():
    own = [generation(p, r) for p in (3, 5) for r in range(7)]
    assert [(g.prompt_index, g.response_index) for g in examples(own)] == [
        *((3, 0), (5, 0), (3, 1), (5, 1), (3, 2), (5, 2), (3, 3), (5, 3), (3, 4), (5, 4))
    ]
    assert [g.prompt_index for g in examples([generation(p) for p in range(30)])] == [*range(10)]


def test_hostile_markdown_stays_in_its_fence(hostile):
    outside, fence = [], None
    for line in categories_page(hostile).splitlines():
        if fence is None and line.startswith("```"):
            fence = line.removesuffix("text")
        elif fence is not None and line == fence:
            fence = None
        elif fence is None:
            outside.append(line)
    assert fence is None
    assert not [line for line in outside if "alert" in line or line == "# heading"]
