"""The page of an evaluation in a browser: filters find the right responses, and no text is run."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import browse, needs_browser
from evaluations import generation, record, unscored

from grpo_trainable.tools.evaluation.generation import Generation
from reports.evaluations.page import render_page

pytestmark = needs_browser
EVIL = "</script><script>console.error('run')</script><img src=x onerror=\"console.error('run')\">"
# This script uses the filters of a page, and records what the page shows after each change.
DRIVE = """<script>addEventListener("load", async () => {
  const element = (id) => document.getElementById(id);
  const told = [];
  const tell = () => told.push({
    count: element("count").textContent,
    first: element("list").querySelector('[data-part="response"]')?.textContent,
    cards: element("list").children.length,
    marks: element("list").querySelectorAll("mark").length,
    width: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
  });
  const choose = async (choices) => {
    for (const [id, value] of Object.entries(choices)) {
      element(id).value = value;
      element(id).dispatchEvent(new Event("input"));
    }
    await new Promise((done) => setTimeout(done, 400));
    tell();
  };
  tell();
  for (const choices of STEPS) {
    if (choices === "next") {
      document.querySelectorAll(".pager button")[1].click();
      tell();
    } else {
      await choose(choices);
    }
  }
  document.body.dataset.told = JSON.stringify(told);
});</script>"""


def driven(page: str, steps: list[Any], directory: Path) -> list[dict[str, Any]]:
    """Return what the page shows at first and after each step."""
    free = re.sub(r"<meta http-equiv[^>]*>", "", page)  # this tag would forbid the script
    (directory / "page.html").write_text(
        free + DRIVE.replace("STEPS", json.dumps(steps)), encoding="utf-8"
    )
    document, console = browse(directory / "page.html", directory / "profile")
    assert console == []
    told = re.search(r'data-told="([^"]*)"', document)
    assert told is not None, document[:2000]
    return json.loads(html.unescape(told[1]))


def many() -> list[Generation]:
    """Return 10,000 responses to 2,500 prompts.

    A quarter of the responses are right, one in ten is cut off, and one differs from all others.
    """
    found = [
        generation(
            i // 4,
            i % 4,
            float(i % 4 == 0),
            response=f"Story {i}. " + "The hen ran home. " * 60,
            finished=i % 10 != 0,
            tokens=5 + i % 50,
        )
        for i in range(10_000)
    ]
    found[4321] = generation(1080, 1, 0.5, response="The NEEDLE, found.", tokens=3)
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(record(many()), None, [])


def test_filters_find_what_they_should_among_ten_thousand(page, tmp_path):
    steps = [
        {"end": "cut"},
        {"end": "", "least": "0.4", "most": "0.6"},
        {"least": "", "most": "", "text": "needle"},
        {"text": "story 77."},
        {"text": "", "order": "short"},
        "next",
        {"order": "high"},
        {"text": "nowhere to be found"},
    ]
    told = driven(page, steps, tmp_path)
    assert [state["count"] for state in told] == [
        "1 to 20 of 10000 responses",
        "1 to 20 of 1000 responses, chosen from 10000",
        "1 to 1 of 1 responses, chosen from 10000",
        "1 to 1 of 1 responses, chosen from 10000",
        "1 to 1 of 1 responses, chosen from 10000",
        "1 to 20 of 10000 responses",
        "21 to 40 of 10000 responses",
        "1 to 20 of 10000 responses",
        "none of 10000 responses",
    ]
    assert told[2]["first"] == told[3]["first"] == told[5]["first"] == "The NEEDLE, found."
    assert told[3]["marks"] == 1
    assert told[4]["first"].startswith("Story 77. ")
    assert told[7]["first"].startswith("Story 0. ")
    assert [state["cards"] for state in told] == [20, 20, 1, 1, 1, 20, 20, 20, 0]
    assert all(page <= window for page, window in (state["width"] for state in told))


def test_categories_are_filtered_by(tmp_path):
    generations = [
        generation(0),
        generation(1, right=0.0),
        generation(2, right=0.0, format_reward=0.0),
        unscored(3),
    ]
    steps = [{"category": name} for name in ("correct", "wrong_format", "unscored")]
    told = driven(render_page(record(generations), None, []), steps, tmp_path)
    assert [state["first"] for state in told[1:]] == [
        f"Response 0 to {prompt}." for prompt in (0, 2, 3)
    ]


def test_the_policy_of_the_page_lets_its_script_run_and_no_other(tmp_path):
    generations = [generation(0, 0, prompt=EVIL, response=EVIL, answer=EVIL), unscored(1, 0, EVIL)]
    page = tmp_path / "evaluation.html"
    page.write_text(render_page(record(generations), None, []), encoding="utf-8")
    document, console = browse(page, tmp_path / "profile")
    assert console == []
    assert "1 to 2 of 2 responses" in document
    # `EVIL` appears as a text node, which the browser writes escaped.
    assert html.escape(EVIL, quote=False) in document
