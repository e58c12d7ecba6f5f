"""Words of which sentences are made."""

from grpo_trainable.wording import did_you_mean, plural


def test_one_is_singular_and_none_is_not():
    assert [plural(number, "more seed") for number in (0, 1, 2)] == [
        *("0 more seeds", "1 more seed", "2 more seeds"),
    ]


def test_the_nearest_name_is_proposed_and_a_far_one_is_not():
    names = ("grpo_clip", "gspo", "cispo")
    assert did_you_mean("grpo_cilp", names) == "did you mean grpo_clip?"
    assert did_you_mean("sft", names) is None
    assert did_you_mean("grpo_cilp", names, cutoff=0.95) is None
