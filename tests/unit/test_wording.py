"""Words of which sentences are made."""

from grpo_trainable.wording import plural


def test_one_is_singular_and_none_is_not():
    assert [plural(number, "more seed") for number in (0, 1, 2)] == [
        *("0 more seeds", "1 more seed", "2 more seeds"),
    ]
