"""Figures on pages equal the results, and every measured number on a page is a figure.

A figure is a number that `make tables` writes from a file in benchmarks/results/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tables
from tables import MARK, PAGES, ROOT, FigureError, Value, filled, template_of

MEASURED = [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_figures_of_a_page_are_those_of_the_results(page: Path):
    text = page.read_text(encoding="utf-8")
    assert text == filled(text, name(page)), "run `make tables`"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_comment_for_a_figure_is_well_formed_and_within_a_line_of_text(page: Path):
    text = page.read_text(encoding="utf-8")
    marks = list(MARK.finditer(text))
    assert text.count("<!-- end -->") == len(marks)
    for mark in marks:
        table = mark[1].startswith("table:")
        starts_line = not text[: mark.start()].rpartition("\n")[2].strip(" -*0123456789.")
        assert table == starts_line, mark[1]


# ---- Numbers outside the comments ------------------------------------------------------------

# Text that is not searched for measured numbers: figures, code, other comments, targets of links,
# headings.
NO_PROSE = [
    MARK,
    re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE),
    re.compile(r"`[^`]+`"),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"^#.*$", re.MULTILINE),
]
NUMBER = re.compile(r"(?<![\w.-])[-+−]?\d[\d,.]*(?:e-?\d+)?(?: ?%)?")
# A whole number with one of these words after it, or before it, is a setting of a measurement.
AFTER = (
    *("rounds", "batches", "prompts", "responses", "seeds", "threads", "cores", "steps", "tokens"),
    *("rows", "problems", "repeats", "generators", "M parameters"),
)
BEFORE = ("lag", "Lag", "capacity", "temperature")
SETTING = re.compile(
    rf"(?:{'|'.join(BEFORE)})\s\d+\b|\b\d[\d,]*\s(?:held-out\s)?(?:{'|'.join(AFTER)})\b"
)
# Other numbers that were not measured, with the words around them.
NOT_MEASURED = {
    "README.md": [
        *(
            "Python 3.10 or newer",
            "k2, k4 or k8 in the name",
            "take 2, 4 or 8",
            "The 95 % intervals",
        ),
        *("0 if every trial", "1 if a trial failed, 2 for bad usage", "130 after\nan interrupt"),
        *("agree to 1e-4 in float32", "ratio other\n  than 1 in a"),
    ],
    "docs/results/critic.md": [
        *("is always 0", "with λ = 1", "with 4 and 9 completions", "λ = 0.95", "margin of 0.03"),
        *("1 means that the critic", "and 0 means"),
    ],
    "docs/results/atlas.md": [
        "the margin of 0.03",
        "1 means that all weights are equal",
        "Lags below 4",
        "learning rate of 2e-4",
    ],
    "docs/results/rllib.md": [
        "possible return is 500",
        "The return is at most 0.",
        "8 groups of 8 episodes",
        "batch of 2 groups",
        "32 times as many gradient steps",
        "minibatches of 128 environment steps",
        "newest 256 training responses. A response has at most 24\ntokens",
    ],
    "docs/results/games.md": ["at best, it wins 0.70 of", "a margin of 0.03", "of seed 0."],
    "docs/results/index.md": [
        *(
            "a margin of 0.03",
            "prompts of 96 tokens",
            "A 95 % interval may exclude 1 in 5 % of such pairs",
            "64 simulated generators",
            "slowed by 15 %",
            "send 240 MB of weights",
            "before 2026-11-27",
            "of 512 word",
        ),
    ],
    "docs/results/off_policy.md": [
        *(
            "capacities 4 and 8",
            "weight of at most 2.",
            "medians of 3)",
            "× 4\nresponses × 96 rollout batches)",
        ),
        *("learning rate is 2e-4", "[3e-4 ", "one-sided 95 % bounds", "a margin of 0.03"),
    ],
    "docs/results/peers.md": ["gradient step of 64\nrows", "8 prompts × 8 responses × 48 tokens"],
    "docs/results/real_model.md": [
        *("1. makes", "2. extracts", "(Apache-2.0)", "3. trains", "× 8\nresponses", "rate of 3e-5"),
        *("numbers up to 30.", "1 for the right number", "otherwise 0", "interval at 95 %"),
        *("interval is above 0", "all 135 M"),
    ],
    "docs/results/scale.md": ["take 10 s per chunk request 6.4 chunks"],
    "docs/results/transports.md": ["240 MB", "64 MB"],
}


def measured_numbers(text: str, exempt: list[str]) -> list[str]:
    """Return the lines of a page with a number that is neither a figure nor a setting."""
    for pattern in NO_PROSE:
        text = pattern.sub(" ", text)
    for words in exempt:
        assert words in text, f"the page does not have {words!r}"
        text = text.replace(words, " ")
    text = SETTING.sub(" ", text)
    return [line.strip() for line in text.splitlines() if NUMBER.search(line)]


@pytest.mark.parametrize("page", MEASURED, ids=name)
def test_every_measured_number_is_a_figure(page: Path):
    text = page.read_text(encoding="utf-8")
    assert measured_numbers(text, NOT_MEASURED.get(name(page), [])) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("It is 1.62 x as fast.", True),
        ("It takes 14 s.", True),
        ("81 runs were bit-exact.", True),
        ("Responses have 22.7 tokens.", True),
        ("It falls by 3 %.", True),
        ("It is <!-- {startup[at]} -->1.62 x<!-- end --> as fast at lag 8.", False),
        ("Each arm has 16 rounds of `8` prompts in float32.", False),
    ],
)
def test_a_number_that_looks_measured_is_found(line: str, found: bool):
    assert bool(measured_numbers(line, [])) == found


# ---- Templates -------------------------------------------------------------------------------

SAMPLE = Value(
    {"runs": [{"arm": "a", "s": 1.0}, {"arm": "b", "s": 2.5}, {"arm": "b", "s": 0.5}], "none": None}
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{0[runs][0][s]:.1f} s", "1.0 s"),
        ("{0[runs][arm=b][1][s]:.0%}", "50 %"),
        ("{0[runs][s].min:.1f}-{0[runs][s].max:.1f}, {0[runs][s].median:.1f}", "0.5-2.5, 1.0"),
        ("{0[runs][arm=b].count} of {0[runs].count}", "2 of 3"),
        ("{0[runs][s].last:.1f}", "0.5"),
        ("{0[none]:.2f}", "-"),
    ],
)
def test_a_template_reads_values_by_their_path(template: str, text: str):
    assert template.format(SAMPLE) == text


def test_a_path_that_leads_to_several_values_or_to_none_is_an_error():
    for template in ("{micro[scale][rows]}", "{micro[nothing]}", "{nothing[at]}"):
        with pytest.raises(FigureError, match=re.escape("page.md: <!-- " + template)):
            filled(f"a <!-- {template} -->1<!-- end -->", "page.md")


def test_a_figure_replaces_only_the_text_between_its_comments():
    text = filled("It took <!-- {startup[seed]} s -->9 s<!-- end --> here, 3 s there.", "page.md")
    seed = template_of("{startup[seed]}")
    assert text == f"It took <!-- {{startup[seed]}} s -->{seed} s<!-- end --> here, 3 s there."


def test_a_menu_shows_ratios_and_verdicts_and_leaves_out_unknown_bounds(
    monkeypatch: pytest.MonkeyPatch,
):
    arm = {
        "speed_up": {"value": 1.5, "low": 1.25, "high": 1.75},
        "equal_cost": {"value": 0.75, "low": None, "high": None},
        **{"difference": -0.01, "low": -0.025, "high": 0.005, "verdict": "no worse", "seeds": 8},
    }
    content = {"menu": {"baseline": "sync", "arms": {"sync": {"difference": None}, "async": arm}}}
    monkeypatch.setattr(tables, "read", lambda name: content)
    *_, baseline, other = tables.menu("async_vs_sync_short")
    assert baseline == "| sync | 1.00x | 1.00x |  | baseline |  |"
    ratios = "1.50x (1.25-1.75) | 0.75x"
    assert other == f"| async | {ratios} | -0.010 (-0.025 to +0.005) | no worse | 8 |"
    assert tables.judged("async_vs_sync_short") == {"async": arm}


def test_a_printed_menu_has_the_price_of_open_verdicts_only(monkeypatch: pytest.MonkeyPatch):
    ratio = {"value": 1.5, "low": 1.25, "high": 1.75}
    shared = {
        **{"speed_up": ratio, "equal_cost": ratio, "pareto": False, "price": None, "seeds": 3},
        **{"difference": -0.01, "low": -0.04, "high": 0.02, "power": 0.5, "seeds_missing": None},
    }
    price = {"minutes": 9.6, "device_hours": 0.2}
    arms = {
        "base": {"pareto": True},
        "near": shared | {"verdict": "undecided", "seeds_missing": 4, "price": price},
        "far": shared | {"verdict": "undecided"},
        "worst": shared | {"verdict": "worse", "seeds_missing": 0},
    }
    content = {
        "menu": {"baseline": "base", "arms": arms, "most_seeds": 20, "answer": ["Yes.", "No."]}
    }
    monkeypatch.setattr(tables, "read", lambda name: content)
    _, answer, _, table, _ = tables.printed_menu("lag")
    assert answer == "Yes. No."
    _, base, near, far, worst = (re.split(r"\s{2,}", line) for line in table.splitlines())
    assert base == ["base †", "1.00x", "1.00x", "-", "baseline", "-", "-", "-"]
    assert near[1:4] == ["1.50x (1.25-1.75)", "1.50x (1.25-1.75)", "-0.010 (-0.040 to +0.020)"]
    assert near[4:] == ["undecided", "3", "50%", "4 seeds, 10 min"]
    assert far[4:] == ["undecided", "3", "50%", "more than 20 seeds"]
    assert worst[4:] == ["worse", "3", "-", "-"]


def test_curves_of_seeds_are_compared_at_shares_of_their_samples(monkeypatch: pytest.MonkeyPatch):
    first = [[0.0, 0.0], [100.0, 1.0], [200.0, 3.0]]  # 0.5, 1, 2 and 3 at the shares
    second = [[0.0, 1.0], [400.0, 5.0]]  # 2, 3, 4 and 5
    slices = {
        "pole_seed0": {"curves": {"grpo": first, "rllib_ppo": first}},
        "pole_seed1": {"curves": {"grpo": second}},
        "arm_seed0": {"curves": {"grpo": first}},
    }
    stored = {"planned": list(slices), "finished": 3, **slices}
    monkeypatch.setattr(tables, "read", {"campaign_control": stored}.__getitem__)
    grpo, ppo = tables.curves("control", "pole")[2:]
    assert grpo == (
        "| `grpo` | 1.250 (0.500-2.000) | 2.000 (1.000-3.000) | 3.000 (2.000-4.000) "
        "| 4.000 (3.000-5.000) | 300 | 2 |"
    )
    assert ppo == "| `rllib_ppo` | 0.500 | 1.000 | 2.000 | 3.000 | 200 | 1 |"


def test_a_verdict_uses_the_differences_of_the_seeds(monkeypatch: pytest.MonkeyPatch):
    arms = {"base": {"against": [0.0] * 3}, "arm": {"against": [0.10, 0.11, 0.09]}}
    monkeypatch.setattr(tables, "read", lambda name: {"arms": arms})
    (own,) = tables.judged("lag").values()
    assert own["verdict"] == "better"
    assert own["difference"] == pytest.approx(0.1)
    # Student's t with 2 degrees of freedom has the quantile 2.92.
    assert own["low"] == pytest.approx(0.1 - 2.92 * 0.01 / 3**0.5, abs=1e-4)
