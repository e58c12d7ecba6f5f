"""Changes that the reward did not intend are measured and named."""

from __future__ import annotations

import math
from typing import Any

import pytest
from experiments import config, evaluation, row, write_experiment, write_part, write_trial
from hypothesis import given
from hypothesis import strategies as st

from reports import changes
from reports.changes import (
    COMMONEST,
    DISTINCT,
    ENTROPY,
    LENGTH,
    NLL,
    QUANTITIES,
    REPEATED,
    TRUNCATED,
    WORDING,
    Change,
    Response,
    measure,
    most_moved,
    moved_in,
    ngrams,
    not_known,
    of_arm,
    repeated_share,
    words,
)
from reports.experiment import read_experiment
from reports.summary import compare, table

STORY = "The dog ran to the park. It saw a red ball there. Then it went home to sleep."


@pytest.fixture
def experiment(tmp_path):
    return write_experiment(tmp_path / "three_seeds")


@pytest.fixture
def few_are_enough(monkeypatch):
    """Apply the thresholds for many responses to the few responses that a test writes."""
    monkeypatch.setattr(changes, "ENOUGH", 1)


def write_ends(
    experiment, before, after, arm="colocated_k1", seed=0, *, tokens=(20, 20), **metrics
):
    """Write a trial of two rounds: held-out responses, tokens and metrics at its start and end."""
    rows = [
        row(n, eval__round=2.0 * (n > 1), **{name: ends[n - 1] for name, ends in metrics.items()})
        for n in (1, 2)
    ]
    trial = write_trial(experiment, config(arm, seed, rounds=2), rows)
    for part, round_, texts, length in ((1, 0, before, tokens[0]), (2, 2, after, tokens[1])):
        responses = [
            evaluation(round_, cursor, text, 1.0, tokens=length)
            for cursor, text in enumerate(texts)
        ]
        write_part(trial, "evaluations", part, responses)
    return trial


def arm(experiment, name="colocated_k1"):
    return {c.name: c for c in of_arm(read_experiment(experiment).arms[name])}


def said(found):
    return [sentence for change in found.values() for sentence in change.sentences()]


# ---- Measures by hand ------------------------------------------------------------------------


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    assert words("It's 3 dogs,\nÉté-DOGS!") == ["it", "s", "3", "dogs", "été", "dogs"]
    assert words(" .,! ") == []


def test_ngrams_are_every_run_of_words():
    assert ngrams(["a", "b", "c"], 2) == [("a", "b"), ("b", "c")]
    assert ngrams(["a"], 2) == []


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("a b c d e f g", 0.0),  # the 4-grams abcd bcde cdef defg
        ("a b c d a b c d", 0.2),  # of abcd bcda cdab dabc abcd, 4 of 5 are distinct
        ("A b. C d, a B c D", 0.2),
        ("go go go go go go", 2 / 3),  # the 4-gram gggg three times
        ("a b c d", 0.0),
        ("a b c", None),
        ("", None),
    ],
)
def test_repeated_4grams_by_hand(text, share):
    assert repeated_share(words(text)) == (None if share is None else pytest.approx(share))


@pytest.mark.slow
@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_repeated_share_is_a_share(letters):
    share = repeated_share(letters)
    assert (share is None) == (len(letters) < 4)
    assert share is None or 0 <= share < 1


def test_responses_are_measured_by_hand():
    before = [
        Response("a b c d a b c d", 10, True),
        Response("a b c", 4, False),
        Response(" a  b\nc ", 4, True),  # the second text, except for white space
        Response("x y z w", 6, True),
    ]
    after = [Response("a b c", 3, True)]
    first, last = measure(before, after)

    assert first == {
        LENGTH.name: 6.0,
        TRUNCATED.name: 0.25,
        REPEATED.name: pytest.approx(0.1),  # the mean of 0.2 and 0
        DISTINCT.name: 0.75,
        WORDING.name: 1.0,  # from the first 3-gram only, because `after` has only one
        COMMONEST.name: 0.75,  # "a b c", counted once for the response that contains it twice
    }
    # Three words have no 4-gram.
    assert last == {
        **{LENGTH.name: 3.0, TRUNCATED.name: 0.0, DISTINCT.name: 1.0, WORDING.name: 1.0},
        COMMONEST.name: 1.0,
    }
    assert measure([], after) == ({}, {k: v for k, v in last.items() if k != WORDING.name})


def test_wording_is_compared_over_equally_many_runs():
    same = [Response("once upon a time", 4, True)] * 4  # two 3-grams per response, 8 in all
    varied = [Response(f"once upon a {name}", 4, True) for name in ("dog", "cat")]
    first, last = measure(same, varied)
    assert first[WORDING.name] == 0.5  # two of the first four are distinct
    assert last[WORDING.name] == 0.75


def test_stories_of_one_plot_are_named_though_all_are_distinct():
    names = ("Amy", "Ben", "Carl", "Dora")
    before = [
        Response(f"{name} {did} a {name}hat today.", 6, True)
        for name, did in zip(names, ("drew", "lost", "bought", "found"), strict=True)
    ]
    after = [Response(f"{name} dreamed about a {name}hat.", 6, True) for name in names]
    first, last = measure(before, after)
    assert first[COMMONEST.name] == 0.25
    assert last[COMMONEST.name] == 1.0  # all contain "dreamed about a"
    assert first[DISTINCT.name] == last[DISTINCT.name] == 1.0


def test_texts_without_three_words_have_no_phrase():
    first, last = measure([Response("a b", 2, True)], [Response("", 1, True)])
    assert COMMONEST.name not in first | last


def changed(**given: Any) -> Change:
    names = [str(seed) for seed in range(len(given["before"]))]
    return Change(**{"kind": "seed", "names": names, **given})


# ---- Thresholds ------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_a_change_at_its_threshold_is_not_named_and_one_beyond_is(quantity):
    before = 0.4
    step = quantity.threshold * (before if quantity.relative else 1)
    for sign, word in ((1, quantity.rose), (-1, quantity.fell)):
        at = changed(quantity=quantity, before=[before], after=[before + sign * step])
        beyond = changed(quantity=quantity, before=[before], after=[before + 1.001 * sign * step])
        assert not at.moved
        assert list(at.sentences()) == []
        assert beyond.moved
        (sentence,) = beyond.sentences()
        assert sentence.startswith(word)


def test_a_threshold_is_not_passed_by_rounding():
    assert 0.4 - 0.3 > 0.1
    assert not changed(quantity=TRUNCATED, before=[0.3], after=[0.4]).moved


def test_something_from_nothing_is_a_change_and_nothing_from_nothing_is_none():
    assert LENGTH.change(0.0, 5.0) == math.inf
    assert not changed(quantity=LENGTH, before=[0.0], after=[0.0]).moved
    (sentence,) = changed(quantity=LENGTH, before=[0.0], after=[5.0]).sentences()
    assert sentence == "responses became longer, 0.0 -> 5.0 tokens (from zero, threshold 25%)"


def test_sentences_have_both_ends_the_change_and_the_seeds_that_moved():
    assert list(changed(quantity=LENGTH, before=[38.9], after=[12.4]).sentences()) == [
        "responses became shorter, 38.9 -> 12.4 tokens (-68%, threshold 25%)"
    ]
    # Seed 0 collapsed, seed 1 grew, seed 2 stayed, and seed 3 has no measurement.
    several = changed(quantity=LENGTH, before=[40, 40, 40, 40], after=[10, 60, 39, None])
    assert list(several.sentences()) == [
        "responses became shorter, 40.0 -> 10.0 tokens (-75%, threshold 25%) in seed 0",
        "responses became longer, 40.0 -> 60.0 tokens (+50%, threshold 25%) in seed 1",
    ]
    assert several.moved
    assert list(changed(quantity=DISTINCT, before=[1.0], after=[0.6]).sentences()) == [
        "fewer responses are distinct, 100% -> 60% (-40.0 points, threshold 10)"
    ]
    assert list(changed(quantity=NLL, before=[0.9], after=[1.3]).sentences()) == [
        "the initial policy finds the text less likely (reference NLL), "
        "0.90 -> 1.30 nats per token (+0.40, threshold 0.3)"
    ]


def test_a_threshold_is_wider_if_few_responses_were_measured():
    def change(after: float, *responses: int) -> Change:
        return changed(quantity=LENGTH, before=[40.0], after=[after], responses=responses)

    assert change(29.0, 64).moved  # -27.5%
    assert change(29.0, 1000).threshold == 0.25
    # For 16 responses, the threshold is twice as wide as for many.
    assert change(29.0, 16).threshold == 0.5
    assert not change(29.0, 16).moved
    assert change(19.0, 16).moved
    # The seed with the fewest responses decides. A seed without responses has no value.
    assert change(29.0, 0, 1000, 16).threshold == 0.5
    # Two responses make the threshold wide, but a fall to nearly nothing still exceeds it.
    assert change(7.0, 2).moved
    assert not change(20.0, 2).moved


def test_thresholds_are_shown_in_the_units_of_the_change():
    assert LENGTH.shown(LENGTH.threshold) == "25%"
    assert TRUNCATED.shown(TRUNCATED.threshold) == "10 points"
    assert ENTROPY.shown(ENTROPY.threshold) == "50%"
    assert NLL.shown(NLL.threshold) == "0.3 nats per token"


# ---- Experiments -----------------------------------------------------------------------------


def stories(number=8):
    return [f"{STORY} {i}" for i in range(number)]


def test_one_sentence_stories_are_named_and_stories_that_stay_are_not(experiment, few_are_enough):
    short = [f"The dog found a lamp {i}." for i in range(8)]
    write_ends(experiment, stories(), short, tokens=(39, 12))
    write_ends(experiment, stories(), stories(), "async_k1", tokens=(39, 38))
    found = arm(experiment)

    assert found["response_tokens"].moved
    assert "responses became shorter, 39.0 -> 12.0 tokens (-69%, threshold 25%)" in said(found)
    assert said(arm(experiment, "async_k1")) == []
    trials = read_experiment(experiment).trials
    lines = table(compare(trials)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Side effects"))
    assert not any(line.startswith("- async_k1") for line in lines)
    assert lines[first + 1].startswith("- colocated_k1: responses became shorter, -69%")
    assert "39.0 -> 12.0" in next(line for line in lines if line.startswith("colocated_k1"))
    assert "39.0 -> 38.0" in next(line for line in lines if line.startswith("async_k1"))


def test_loops_copies_truncation_entropy_and_nll_are_named(experiment, few_are_enough):
    loop = "and then it ran and then it ran and then it ran"
    trial = write_ends(
        experiment,
        stories(),
        [loop] * 8,
        policy__entropy_nats=(1.2, 0.5),
        response__reference_nll_nats=(0.9, 1.3),
    )
    write_part(
        trial,
        "evaluations",
        2,
        [evaluation(2, cursor, loop, 1.0, finished=cursor > 3) for cursor in range(8)],
    )
    found = arm(experiment)

    assert {name for name, change in found.items() if change.moved} == {
        *("truncated_share", "entropy_nats", "repeated_4grams_share"),
        *("distinct_responses_share", "distinct_3grams_share", "reference_nll_nats"),
    }
    assert found["truncated_share"].after == [0.5]
    assert found["distinct_responses_share"].after == [0.125]
    # Twelve words have nine 4-grams, and four of them are distinct.
    assert found["repeated_4grams_share"].after == [pytest.approx(1 - 4 / 9)]


def test_the_largest_change_comes_first_and_its_trial_is_shown(experiment, few_are_enough):
    write_ends(experiment, stories(), stories(), tokens=(20, 14))
    for seed, length in enumerate((20, 5, 11)):
        ends = {"response__reference_nll_nats": (0.9, 1.3)}
        tokens = (20, length)
        write_ends(experiment, stories(), stories(), "async_k1", seed, tokens=tokens, **ends)
    found = compare(read_experiment(experiment).trials).changes

    assert most_moved(found["async_k1"]) == 1
    assert [line for line in moved_in(found) if "_k1: " in line] == [
        "async_k1: responses became shorter, -60% (median) in seeds 1 and 2; the initial policy "
        "finds the text less likely (reference NLL), +0.40 (median) in all 3 seeds",
        "colocated_k1: responses became shorter, -30%",
    ]


def test_text_is_that_of_round_0_and_of_the_latest_evaluation_alone(experiment):
    trial = write_ends(experiment, stories(), stories(), tokens=(40, 20))
    between = [evaluation(1, cursor, "x", 0.0, tokens=1) for cursor in range(8)]
    ends = [evaluation(0, cursor, "y", 0.0, tokens=40) for cursor in range(8)]
    write_part(trial, "evaluations", 1, [*between, *ends])
    length = arm(experiment)["response_tokens"]
    assert (length.before, length.after) == ([40.0], [20.0])


def test_rows_are_those_of_round_1_and_of_the_last_eighth(experiment):
    rows = [
        row(
            n,
            response__reference_nll_nats={1: 0.9, 15: 2.0, 16: 1.0}.get(n, 9.0),
            response__reference_nll_nats_se={1: 0.3, 15: 0.64, 16: 0.48}.get(n, 9.0),
        )
        for n in range(1, 17)
    ]
    write_trial(experiment, config(rounds=16), rows)
    nll = arm(experiment)["reference_nll_nats"]
    assert (nll.before, nll.after) == ([0.9], [1.5])
    # The mean of two rounds has the standard error hypot(0.64, 0.48) / 2 = 0.4.
    assert nll.errors == [pytest.approx(0.5)]  # hypot(0.3, 0.4)
    assert not nll.moved  # 0.6 is above 0.3, but not above 0.3 + 2 x 0.5


def test_a_change_measured_on_a_sample_must_exceed_its_threshold_by_two_standard_errors():
    ends = {"quantity": NLL, "before": [0.9, 0.9], "after": [1.3, 1.3]}
    assert len(changed(**ends, errors=[0.04, 0.04])._beyond(1)) == 2  # 0.4 > 0.3 + 0.08
    several = changed(**ends, errors=[0.04, 0.06])  # 0.3 + 0.12
    rose = "the initial policy finds the text less likely (reference NLL)"
    assert list(several.in_short()) == [f"{rose}, +0.40 in seed 0"]
    unsure = changed(**ends, errors=[0.06, 0.06])
    assert not unsure.moved
    # If a quantity moved in one arm, an arm in which it perhaps moved must not look unchanged.
    assert moved_in({"a": [unsure]}) == ["no quantity moved by more than its threshold"]
    assert moved_in({"a": [unsure], "b": [several]}) == [
        f"b: {rose}, +0.40 in seed 0",
        f"a: {rose}, +0.40 (median) in both seeds (within 2 standard errors of the threshold)",
    ]
    (sentence,) = unsure.sentences()
    assert sentence.endswith(" in both seeds (within 2 standard errors of the threshold)")
    below = changed(**{**ends, "after": [1.1, 1.1]}, errors=[0.06, 0.06])
    assert list(below.sentences()) == []


def test_a_trial_without_a_later_evaluation_is_not_said_to_be_unchanged(experiment):
    trial = write_trial(experiment, config(rounds=16), [row(1), row(2)])
    write_part(trial, "evaluations", 1, [evaluation(0, 0, STORY, 1.0)])
    comparison = compare(read_experiment(experiment).trials)
    assert moved_in(comparison.changes) == ["nothing was measured both before and after training"]


def test_one_round_is_not_compared_with_itself(experiment):
    metrics = {"policy__entropy_nats": 1.0, "response__reference_nll_nats": 2.0}
    write_trial(experiment, config(rounds=16), [row(1, **metrics)])
    found = arm(experiment)
    assert [found[q.name].known for q in (ENTROPY, NLL)] == [[], []]


def test_a_row_that_is_not_the_first_does_not_stand_for_the_start(experiment):
    rows = [row(n, response__reference_nll_nats=0.9) for n in (2, 3)]
    write_trial(experiment, config(rounds=3), rows)
    assert arm(experiment)["reference_nll_nats"].before == [None]


def test_what_is_not_known_is_said_and_no_change(experiment, few_are_enough):
    write_trial(experiment, config(rounds=2), [row(n, policy__entropy_nats=1.0) for n in (1, 2)])
    comparison = compare(read_experiment(experiment).trials)
    found = comparison.changes["colocated_k1"]

    assert not_known(found) == [q.title for q in QUANTITIES if q is not ENTROPY]
    assert moved_in(comparison.changes) == [
        "no quantity moved by more than its threshold",
        "not everything was measured in colocated_k1",
    ]
    text = table(compare(read_experiment(experiment).trials))
    assert text.endswith("- not everything was measured in colocated_k1.")


def test_seeds_are_judged_one_by_one(experiment, few_are_enough):
    for seed, length in enumerate((20, 20, 5)):
        write_ends(experiment, stories(), stories(), seed=seed, tokens=(20, length))
    found = arm(experiment)
    assert said(found) == [
        "responses became shorter, 20.0 -> 5.0 tokens (-75%, threshold 25%) in seed 2"
    ]
    # No row contains entropy or NLL.
    assert moved_in({"a": list(found.values()), "b": []}) == [
        "a: responses became shorter, -75% in seed 2",
        "not everything was measured in a",
    ]


def test_trials_with_equal_seeds_are_judged_one_by_one_and_named(experiment, few_are_enough):
    """A user's own Tuner can run a seed several times."""
    for length in (5, 20):
        trial = write_ends(experiment, stories(), stories(), tokens=(20, length))
        trial.rename(trial.with_name(f"own-{length}"))
    names = [found.label for found in read_experiment(experiment).trials]
    change = arm(experiment)["response_tokens"]
    assert (change.kind, change.names, change.moved) == ("trial", names, True)
    trials = {"kind": "trial", "names": ["t_0", "t_1", "t_2", "t_3"]}
    of_four = changed(quantity=LENGTH, before=[20] * 4, after=[5, 20, 5, 5], **trials)
    assert list(of_four.in_short()) == [
        "responses became shorter, -75% (median) in trials t_0, t_2 and t_3"
    ]


def test_two_rounds_of_eight_responses_raise_no_alarm_by_chance(experiment):
    """One of eight responses is cut off, and the entropy of eight responses has halved."""
    small = {"rollout.prompts": 2, "rollout.group_size": 4, "rounds": 2, "eval.prompts": 8}
    rows = [
        row(n, policy__entropy_nats=entropy, response__reference_nll_nats=nll)
        for n, entropy, nll in ((1, 1.2, 0.9), (2, 0.55, 1.3))
    ]
    rows[1]["eval/round"] = 2.0
    trial = write_trial(experiment, config(**small), rows)
    for part, round_, cut in ((1, 0, 0), (2, 2, 1)):
        responses = [
            evaluation(round_, cursor, f"{STORY} {cursor}", 1.0, finished=cursor >= cut)
            for cursor in range(8)
        ]
        write_part(trial, "evaluations", part, responses)
    comparison = compare(read_experiment(experiment).trials)
    assert moved_in(comparison.changes) == [
        "no quantity moved by more than its threshold",
        "thresholds are wider for colocated_k1 (some figures rest on fewer than 64 responses)",
    ]
