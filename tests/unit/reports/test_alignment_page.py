"""The figures and the page of an alignment run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_trainable.tools.alignment.held_out import HeldOutRow
from reports.alignment.files import result_data, write_result
from reports.alignment.page import examples, figure_rows, render_page
from reports.alignment.record import AlignmentRecord


def pair(margin: float, prompt: str = "a prompt") -> HeldOutRow:
    return HeldOutRow(
        prompt=prompt, chosen="yes", rejected="no", chosen_score=margin + 0.25, rejected_score=0.25
    )


def record(
    held_out: list[HeldOutRow], log: list[dict[str, Any]], stage: str = "reward-model", **facts: Any
) -> AlignmentRecord:
    training = {"steps": 10, "parameters": 1234, "max_length": 64, "notes": [], "log": log}
    return AlignmentRecord(
        name="out",
        asked={"stage": stage, "model": "/m", "train_file": "/rows.jsonl", "seed": 0},
        training=training | facts,
        held_out=held_out,
        train_rows=90,
        held_out_rows=len(held_out),
    )


LOG = [
    {"step": 0, "eval_loss": 0.7, "eval_accuracy": 0.5, "eval_margin": 0.0},
    {"step": 5, "loss": 0.6, "accuracy": 0.75, "margin": 0.5},
    {"step": 5, "eval_loss": 0.5, "eval_accuracy": 0.75, "eval_margin": 0.25},
    {"step": 10, "loss": 0.25, "accuracy": 1.0, "margin": 1.0},
    {"step": 10, "train_runtime": 3.0, "train_loss": 0.4},
]


def test_accuracy_counts_pairs_and_a_tie_is_wrong():
    own = record([pair(1.0), pair(2.0), pair(0.5), pair(0.0)], LOG)
    assert own.accuracy is not None
    assert own.accuracy.value == 0.75
    # Wilson's interval for 3 of 4
    assert own.accuracy.low == pytest.approx(0.3006, abs=1e-4)
    assert own.accuracy.high == pytest.approx(0.9544, abs=1e-4)
    assert own.problems == [
        "both responses of 1 held-out pair have the same score; these pairs count as wrong"
    ]


@pytest.mark.parametrize(
    ("right", "wrong", "verdict"),
    [
        (20, 0, "better than chance"),
        (0, 20, "worse than chance"),
        (11, 9, "not distinguishable from chance"),
    ],
)
def test_the_answer_compares_with_chance(right, wrong, verdict):
    own = record([pair(1.0)] * right + [pair(-1.0)] * wrong, LOG)
    assert "of 20 held-out pairs (95% interval " in own.answer
    assert own.answer.endswith(f"which is {verdict}.")


def test_a_resumed_run_measures_again_and_the_last_value_counts():
    again = [{"step": 5, "eval_loss": 0.4}]
    assert record([], [*LOG, *again]).series("eval_loss") == [(0, 0.7), (5, 0.4)]


def test_figures_are_first_and_last_values():
    rows = {row[0]: row[1:] for row in figure_rows(record([pair(1.0), pair(-0.5)], LOG))}
    assert rows["training loss"] == ("0.600", "0.250", "")
    assert rows["held-out loss"] == ("0.700", "0.500", "")
    assert rows["held-out accuracy"][:2] == ("0.500", "0.500")
    assert rows["held-out margin"] == ("0.000", "0.250", "")


def test_fine_tuning_is_answered_by_the_held_out_loss():
    log = [{"step": 0, "eval_loss": 3.0}, {"step": 10, "eval_loss": 2.0}]
    rows = [HeldOutRow(prompt="a", chosen="b", response="c")]
    own = record(rows, log, stage="sft")
    assert own.answer == "The held-out loss fell: from 3.000 to 2.000 nats per token."
    assert "Most likely response after training" in render_page(own)


def test_examples_are_the_first_rows_and_the_worst_pairs():
    margins = [1.0, 2.0, 3.0, 4.0, 5.0, -1.0, 6.0, -3.0, 7.0, -2.0]
    shown = examples(record([pair(margin) for margin in margins], LOG))
    assert [row.margin for row in shown] == [1.0, 2.0, 3.0, 4.0, -3.0, -2.0, -1.0, 5.0]


def test_the_page_escapes_texts_and_loads_nothing():
    page = render_page(record([pair(1.0, prompt="<script>alert(1)</script>")], LOG))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'" in page
    assert page.count("<img ") == 4  # loss, accuracy, margin, and the histogram


def test_pairs_that_are_too_long_are_told():
    own = record([], LOG)
    long = AlignmentRecord(**{**vars(own), "held_out_rows": 3})
    assert long.problems == [
        "3 of 3 held-out rows are longer than max_length=64, so they have no score"
    ]
    assert "Missing or doubtful" in render_page(long)
    assert "accuracy" not in result_data(long)


def test_the_result_is_written_with_every_row(tmp_path):
    write_result(tmp_path, record([pair(1.0), pair(-0.5)], LOG))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"]["value"] == 0.5
    assert result["margin"] == 0.25
    assert result["held_out_loss"] == {"first": 0.7, "last": 0.5}
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [row["margin"] for row in rows] == [1.0, -0.5]
    assert (tmp_path / "report.html").is_file()
