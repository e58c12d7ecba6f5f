"""The figures and the page of an alignment run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_trainable.tools.alignment.rows import MeasuredRow
from reports.alignment.files import result_data, write_result
from reports.alignment.page import examples, render_page
from reports.alignment.record import AlignmentRecord


def pair(margin: float, prompt: str = "a prompt") -> MeasuredRow:
    row = {"prompt": prompt, "chosen": "yes", "rejected": "no"}
    return MeasuredRow(row=row, scores=(margin + 0.25, 0.25))


def record(
    held_out: list[MeasuredRow],
    log: list[dict[str, Any]],
    stage: str = "reward-model",
    notes: tuple[str, ...] = (),
) -> AlignmentRecord:
    return AlignmentRecord(
        name="out",
        asked={"stage": stage, "model": "/m", "train_file": "/rows.jsonl", "seed": 0},
        train_rows=90,
        steps=10,
        parameters=1234,
        log=log,
        held_out=held_out,
        notes=notes,
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
    own = record([pair(1.0), pair(-0.5)], LOG)
    assert own.figures == {
        "training_loss": (0.6, 0.25),
        "held_out_loss": (0.7, 0.5),
        "held_out_accuracy": (0.5, 0.5),
        "held_out_margin": (0.0, 0.25),
    }


def test_dpo_has_no_accuracy_before_its_first_step():
    log = [
        {"step": step, "eval_rewards/accuracies": accuracy, "eval_rewards/margins": margin}
        for step, accuracy, margin in ((0, 0.0, 0.0), (5, 0.5, 0.125), (10, 1.0, 0.25))
    ]
    own = record([pair(0.25)], log, stage="dpo")
    assert own.figures == {"held_out_accuracy": (None, 1.0), "held_out_margin": (0.0, 0.25)}
    assert own.series("eval_rewards/accuracies") == [(5, 0.5), (10, 1.0)]
    assert "the accuracy before training is undefined" in render_page(own)


def test_fine_tuning_is_answered_by_the_held_out_loss():
    log = [{"step": 0, "eval_loss": 3.0}, {"step": 10, "eval_loss": 2.0}]
    rows = [MeasuredRow(row={"text": "b"}, response="c")]
    own = record(rows, log, stage="sft")
    assert own.answer == "The held-out loss fell: from 3.000 to 2.000 nats per token."
    assert "most likely response after training" in render_page(own)


def test_examples_are_the_first_rows_and_the_worst_pairs():
    margins = [1.0, 2.0, 3.0, 4.0, 5.0, -1.0, 6.0, -3.0, 7.0, -2.0]
    shown = examples(record([pair(margin) for margin in margins], LOG))
    assert [row.margin for row in shown] == [1.0, 2.0, 3.0, 4.0, -3.0, -2.0, -1.0, 5.0]


def test_notes_on_the_data_are_problems():
    own = record([pair(1.0)], LOG, notes=("3 of 90 training rows do not fit",))
    assert own.problems == ["3 of 90 training rows do not fit"]


def test_without_a_measurement_the_answer_says_so():
    own = record([MeasuredRow(row={"text": "b"})], [], stage="sft")
    assert own.answer == "The held-out loss was not measured."
    assert result_data(own)["accuracy"] is None


def test_the_result_is_written_with_every_row_and_an_escaped_page(tmp_path):
    rows = [pair(1.0, prompt="<script>alert(1)</script>"), pair(-0.5)]
    write_result(tmp_path, record(rows, LOG, notes=("a note",)))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"]["value"] == 0.5
    assert result["held_out_margin"] == {"first": 0.0, "last": 0.25}
    assert result["held_out_loss"] == {"first": 0.7, "last": 0.5}
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [row["margin"] for row in rows] == [1.0, -0.5]
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'" in page
    assert page.count("<img ") == 4  # loss, accuracy, margin, and the histogram
    assert '<th scope="row">held-out margin</th>' in page
    assert "a note" in page
