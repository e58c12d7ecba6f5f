"""The report in a browser: no console messages, no missing picture, no sideways scrolling."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import browse, needs_browser
from experiments import (
    config,
    evaluation,
    row,
    write_experiment,
    write_full,
    write_part,
    write_trial,
)

from reports.report import write_report

pytestmark = needs_browser
MEASURE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach((item) => { item.open = true; });
  const images = [...document.images];
  parent.postMessage(JSON.stringify({
    window: document.documentElement.clientWidth,
    page: document.documentElement.scrollWidth,
    images: images.map((image) => image.naturalWidth),
    dark: images.filter((image) =>
      image.currentSrc === image.parentElement.querySelector("source").srcset).length,
  }), "*");
});</script>"""
RECEIVE = """<!DOCTYPE html><title>frame</title><pre id="told"></pre><script>
addEventListener("message", (message) => {
  document.getElementById("told").textContent = message.data;
});</script>"""


def measure(report: Path, width: int, directory: Path, *options: str) -> dict[str, Any]:
    """Return the measurements that the page takes of itself in a frame of `width` pixels.

    A frame is needed because no browser window can be as narrow as a telephone.
    """
    directory.mkdir()
    text = report.read_text(encoding="utf-8")
    policy = "default-src 'none'; "
    assert policy in text
    # The page forbids all scripts, including `MEASURE`.
    (directory / "page.html").write_text(text.replace(policy, "") + MEASURE, encoding="utf-8")
    frame = f'<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>'
    (directory / "frame.html").write_text(RECEIVE + frame, encoding="utf-8")
    document, _ = browse(directory / "frame.html", directory / "profile", *options)
    told = re.search(r'<pre id="told">(.*?)</pre>', document, re.DOTALL)
    assert told is not None, document
    return json.loads(html.unescape(told[1]))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_report(write_full(tmp_path_factory.mktemp("storage") / "full"))


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
    """Write a report with few measurements, a failed trial, very long words and hostile text."""
    directory = write_experiment(tmp_path_factory.mktemp("storage") / ("n" * 100), packages=None)
    write_trial(directory, config("sync"), [row(1)], error=f"ActorFailed: {'x' * 400}")
    trial = write_trial(directory, config(), [row(1, eval__round=1)])
    evil = "<script>console.error('run')</script><img src=x onerror=\"console.error('run')\">"
    responses = [evaluation(0, 0, evil, 0.0), evaluation(1, 0, evil + "y" * 900, 1.0)]
    write_part(trial, "evaluations", 1, responses)
    return write_report(directory)


@pytest.mark.parametrize("which", ["full", "lacking"])
def test_the_browser_has_nothing_to_say(which, request, tmp_path):
    document, console = browse(request.getfixturevalue(which), tmp_path / "profile")

    assert console == []
    assert document.rstrip().endswith("</html>")


@pytest.mark.parametrize("which", ["full", "lacking"])
@pytest.mark.parametrize("width", [400, 1280])
def test_pictures_load_and_the_page_never_scrolls_sideways(which, width, request, tmp_path):
    told = measure(request.getfixturevalue(which), width, tmp_path / "frame")

    assert told["page"] <= told["window"] <= width
    assert told["window"] > width - 20  # a vertical scroll bar takes the rest of the frame
    assert told["images"] == [720] * (21 if which == "full" else 6)


def test_plots_follow_the_colour_scheme(full, tmp_path):
    light = measure(full, 1280, tmp_path / "light", "--blink-settings=preferredColorScheme=1")
    dark = measure(full, 1280, tmp_path / "dark", "--blink-settings=preferredColorScheme=0")

    assert (light["dark"], dark["dark"]) == (0, 21)
