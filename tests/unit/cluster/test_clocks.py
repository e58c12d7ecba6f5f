"""Clocks of different machines on one timeline."""

from __future__ import annotations

import pytest

from grpo_trainable.cluster.clocks import Answer, offset
from grpo_trainable.pipeline.report import Recorder, time_metrics
from grpo_trainable.protocol.calls import OutOfBand
from grpo_trainable.telemetry.timers import Span


def test_offset_is_that_of_the_quickest_answer():
    # The other clock is 5 s ahead. The first answer took 2 s to return. The second request and its
    # answer took 0.1 s each.
    answers = [Answer(100.0, 105.1, 102.1), Answer(110.0, 115.1, 110.2)]
    assert offset(answers) == pytest.approx(5.0)


def test_offset_of_a_clock_behind_is_negative():
    assert offset([Answer(100.0, 90.5, 101.0)]) == pytest.approx(-10.0)


def test_spans_of_another_machine_count_at_our_time():
    recorder = Recorder({"generator-0": 3600.0})
    recorder.add_spans("generator", "generator-0", [Span("rollout", 3601.0, 3603.0)])
    recorder.add_spans("learner", "learner", [Span("optimize", 3.0, 4.0)])
    row = time_metrics(recorder.spans, recorder.sync_bytes, 0.0, 5.0)
    assert row["time/rollout_s"] == 2.0
    assert row["time/other_s"] == 2.0  # 5 s minus the work from 1 to 3 s and from 3 to 4 s


def test_weights_travel_since_a_time_of_the_receivers_clock():
    # The learner's clock is 60 s behind ours, and the generator's clock is 10 s ahead. So 5 s on
    # the learner's clock are 65 s on our clock and 75 s on the generator's clock.
    recorder = Recorder({"learner": -60.0, "generator-0": 10.0})
    sent = OutOfBand("described", "ref", sent_at=5.0)
    ours = recorder.handle_of("learner", sent)
    assert ours.sent_at == 65.0
    assert recorder.handle_for("generator-0", ours) == OutOfBand("described", "ref", sent_at=75.0)
    assert recorder.handle_for("generator-1", ours) == ours  # generator-1 is on our machine
    assert recorder.handle_for("generator-0", "shm:1") == "shm:1"
