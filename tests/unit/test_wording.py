"""Building blocks of sentences."""

import pytest

from grpo_trainable.text import did_you_mean, plural, rate, without_module, written


def test_one_is_singular_and_none_is_not():
    assert [plural(number, "more seed") for number in (0, 1, 2)] == [
        *("0 more seeds", "1 more seed", "2 more seeds"),
    ]


def test_the_nearest_name_is_proposed_and_a_far_one_is_not():
    names = ("grpo_clip", "gspo", "cispo")
    assert did_you_mean("grpo_cilp", names) == "did you mean grpo_clip?"
    assert did_you_mean("sft", names) is None
    assert did_you_mean("grpo_cilp", names, cutoff=0.95) is None


def test_names_that_begin_with_the_text_are_proposed_before_a_similar_one():
    assert did_you_mean("async", ("sync", "async_k1", "async_k4")) == (
        "did you mean async_k1 or async_k4?"
    )
    assert did_you_mean("", ("sync",)) is None


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.04, "{:.1f}", "0.0"),
        (-0.0004, "{:+.3f}", "+0.000"),
        (-0.0006, "{:+.3f}", "-0.001"),
        (-0.0, "{:.2g}", "0"),
        (-0.002, "{:.1%}", "-0.2%"),
        (-0.0002, "{:.1%}", "0.0%"),
        (-10.0, "{:.0f}", "-10"),
    ],
)
def test_what_is_rounded_to_zero_has_no_minus(value, form, text):
    assert written(value, form) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1234"),
        (80.4, "80"),
        (9.96, "10"),
        (9.94, "9.9"),
        (8.0, "8"),
        (1.36, "1.4"),
        (0.0526, "0.053"),
        (0.0, "0"),
    ],
)
def test_a_rate_has_two_digits_or_more(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("grpo_trainable.protocol.calls.ActorFailed: rollout: no", "ActorFailed: rollout: no"),
        ("ray.exceptions.OutOfMemoryError: a.b.C: full", "OutOfMemoryError: a.b.C: full"),
        ("ValueError: a.b: c", "ValueError: a.b: c"),
        ("builtins.KeyboardInterrupt", "KeyboardInterrupt"),
        ("loss.clip: must be positive", "loss.clip: must be positive"),
    ],
)
def test_an_error_is_shown_without_the_module_of_its_class(line, text):
    assert without_module(line) == text
