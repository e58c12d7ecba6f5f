"""TensorBoard's messages, built without torch."""

from __future__ import annotations

import numpy as np
import pytest

from callbacks import summaries


def only_value(summary):
    (value,) = summary.value
    return value


def test_scalar_has_its_tag_and_value():
    value = only_value(summaries.scalar("reward/eval_mean", 0.25))
    assert (value.tag, value.simple_value) == ("reward/eval_mean", 0.25)


def test_histogram_counts_values_between_even_edges():
    histo = only_value(summaries.histogram("h", np.array([0.0, 1.0, 1.0, 4.0]), bins=4)).histo
    # An empty first bin provides the lower edge of the next bin.
    assert list(histo.bucket_limit) == [0, 1, 2, 3, 4]
    assert list(histo.bucket) == [0, 1, 2, 0, 1]
    assert (histo.min, histo.max, histo.num) == (0, 4, 4)
    assert (histo.sum, histo.sum_squares) == (6, 18)


def test_histogram_of_equal_values_is_one_narrow_bin():
    histo = only_value(summaries.histogram("h", np.array([2.0, 2.0]), bins=5)).histo
    assert list(histo.bucket) == [0, 2]
    assert list(histo.bucket_limit) == pytest.approx([1.9, 2.1])


def test_binned_keeps_empty_bins_so_that_rounds_compare():
    edges, counts = np.array([0.5, 1.0, 2.0, 4.0]), np.array([0, 3, 0])
    summary = summaries.binned("h", edges, counts, least=0.5, greatest=4, total=4.5, squares=7)
    histo = only_value(summary).histo
    assert list(histo.bucket_limit) == [0.5, 1, 2, 4]
    assert list(histo.bucket) == [0, 0, 3, 0]
    assert histo.num == 3


@pytest.mark.slow
def test_messages_are_those_of_torch():
    from torch.utils.tensorboard import summary as theirs

    values = np.array([0.5, 0.5, 2.0, 3.5, -1.0])
    searched = {"optim.lr": 1e-4, "k": 4, "loss.kl_monitor": True, "loss.type": "cispo"}
    layout = {"reward": {"both": ["reward/eval_mean", "reward/train_mean"], "one": ["lag/max"]}}
    theirs_of_layout = {
        category: {title: ["Multiline", tags] for title, tags in charts.items()}
        for category, charts in layout.items()
    }
    assert summaries.scalar("a/b", 0.1) == theirs.scalar("a/b", 0.1)
    for sample in (values, values[:2], values[:1]):
        assert summaries.histogram("h", sample, 30) == theirs.histogram("h", sample, 30)
    assert summaries.text("t", "| a |") == theirs.text("t", "| a |")
    assert summaries.custom_scalars(layout) == theirs.custom_scalars(theirs_of_layout)
    ours = summaries.hparams(searched, ["reward/eval_mean"])
    assert ours == list(theirs.hparams(searched, {"reward/eval_mean": 0.5}))
