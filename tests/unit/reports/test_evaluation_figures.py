"""The figures of evaluations, checked by hand, and differences between two evaluations."""

from __future__ import annotations

import pytest
from evaluations import answered, generation, record, unscored

from reports.evaluations.categories import categories_page, table_rows
from reports.evaluations.files import evaluation_data
from reports.evaluations.measures import Figure, measures
from reports.evaluations.pairs import differences
from reports.evaluations.summary import console_lines
from reports.intervals import over_seeds, wilson


def figures(evaluation) -> dict[str, Figure]:
    return {name: measure.figure() for name, measure in measures(evaluation).items()}


def test_reward_is_the_mean_over_prompts_with_wilsons_interval():
    found = figures(answered([[1], [0], [1], [1]]))
    expected = wilson(0.75, 4)
    for name in ("reward", "answer_reward", "pass@1"):
        assert found[name] == Figure(
            value=0.75, low=expected.low, high=expected.high, method="wilson"
        )
    assert found["format_reward"].value == 1.0


def test_pass_at_k_is_the_mean_over_prompts():
    # Three prompts have four responses each, of which two, none and four are correct. For the first
    # prompt, pass@2 is 1 - C(2, 2) / C(4, 2) = 5/6.
    found = figures(answered([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))
    assert found["pass@1"].value == pytest.approx(0.5)
    assert found["pass@2"].value == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass@4"].value == pytest.approx(2 / 3)


def test_majority_is_only_there_where_responses_have_answers():
    assert not [name for name in figures(answered([[1, 0]])) if name.startswith("majority")]
    votes = [("4", 1.0), ("04", 1.0), ("5", 0.0), ("5", 0.0), (None, 0.0)]
    found = figures(
        record([generation(0, i, right, answer=text) for i, (text, right) in enumerate(votes)])
    )
    # Both spellings of the correct answer count as one answer, which ties with the wrong one.
    assert found["majority@5"].value == 0.5
    assert found["majority@1"].value == pytest.approx(2 / 5)
    assert found["pass@5"].value == 1.0


def test_graded_rewards_have_students_interval_and_no_attempts():
    found = figures(answered([[2.0], [1.0], [3.0]]))
    expected, _ = over_seeds([2.0, 1.0, 3.0])
    assert found["reward"] == Figure(
        value=2.0, low=expected.low, high=expected.high, method="student"
    )
    assert not [name for name in found if "@" in name]
    assert answered([[0.5]]).categories is None
    assert figures(answered([[7.0]]))["reward"] == Figure(
        value=7.0, low=None, high=None, method=None
    )


def test_prompts_that_could_not_be_scored_are_left_out_of_the_rewards_alone():
    evaluation = record([generation(0, 0), generation(0, 1), generation(1, 0, 0.0), unscored(1, 1)])
    found = figures(evaluation)
    assert found["reward"].value == 1.0
    assert found["response_tokens"].value == 10.0
    assert measures(evaluation)["response_tokens"].values.keys() == {0, 1}
    assert evaluation.categories == {
        "correct": [*evaluation.generations[:2]],
        "wrong_answer": [evaluation.generations[2]],
        "wrong_format": [],
        "unscored": [evaluation.generations[3]],
    }
    assert evaluation.problems == [
        "the reward failed on 1 of 4 responses, so the reward figures exclude 1 of 2 prompts "
        "(prompt 1: it hung)"
    ]


def test_without_any_score_there_are_lengths_alone():
    assert figures(record([unscored()])).keys() == {"response_tokens", "truncated"}


def test_repeated_prompts_are_told():
    evaluation = record([generation(0), generation(1, prompt="Prompt 0")])
    assert "1 of 2 prompts repeat earlier ones" in evaluation.problems[0]


@pytest.mark.parametrize(
    ("rewards", "category"),
    [
        ((1.0, 1.0), "correct"),
        ((1.0, 0.0), "wrong_answer"),
        ((0.0, 0.0), "wrong_format"),
        ((0.0, 1.0), None),
        ((1.0, 0.5), None),
        ((None, 1.0), "correct"),
        ((None, 0.0), "wrong_answer"),
        ((None, 0.5), None),
        ((None, None), None),
    ],
)
def test_categories_are_those_of_rewards_of_0_and_1(rewards, category):
    form, answer = rewards
    assert generation(format_reward=form, answer_reward=answer).category == category


def test_a_reward_that_does_not_judge_the_format_has_no_figures_of_the_format():
    evaluation = record(
        [generation(p, 0, right, format_reward=None) for p, right in ((0, 1), (1, 0))]
    )
    assert "format_reward" not in figures(evaluation)
    assert figures(evaluation)["pass@1"].value == 0.5
    assert table_rows(evaluation) == [
        ("correct", "answer 1", "1", "50.0%"),
        ("wrong_answer", "answer 0", "1", "50.0%"),
    ]
    page = categories_page(evaluation)
    assert "reward 1:" in page
    assert "format" not in page


# ---- Two evaluations -------------------------------------------------------------------------


def test_differences_are_taken_prompt_by_prompt():
    before = answered([[0], [0], [1], [0]], name="before")
    after = answered([[1], [0], [1], [1]])
    found = {own.name: own for own in differences(after, before)}
    expected, _ = over_seeds([1.0, 0.0, 0.0, 1.0])
    reward = found["reward"]
    assert (reward.own, reward.other, reward.value) == (0.75, 0.25, 0.5)
    assert (reward.low, reward.high) == pytest.approx((expected.low, expected.high))
    assert reward.prompts == 4
    assert reward.told_apart is False
    assert found["response_tokens"].value == 0.0


def test_a_difference_in_every_prompt_is_told_apart_although_the_intervals_overlap():
    # Prompts differ much more than the two policies do.
    before = answered([[0, 0, 0, 1]] * 6 + [[1, 1, 1, 0]] * 6, name="before")
    after = answered([[0, 0, 1, 1]] * 6 + [[1, 1, 1, 1]] * 6)
    reward = differences(after, before)[0]
    assert reward.value == pytest.approx(0.25)
    assert reward.told_apart is True
    assert figures(after)["reward"].low < figures(before)["reward"].high


def test_policies_that_differ_in_no_prompt_have_no_interval_of_no_width():
    before, after = answered([[1], [0], [1]], name="before"), answered([[1], [0], [1]])
    paired = differences(after, before)
    reward = next(own for own in paired if own.name == "reward")
    assert (reward.low, reward.high, reward.told_apart) == (None, None, False)
    lines = list(console_lines(after, before, paired))
    row = next(line for line in reversed(lines) if line.startswith("pass@1"))
    assert row.split("  ", 1)[1].split() == [
        *("0.667", "0.667", "+0.000"),
        *("no", "difference", "in", "any", "of", "3", "prompts"),
        "no",
    ]


def test_the_same_difference_everywhere_and_equal_figures_have_no_interval():
    before, after = answered([[0], [0]], name="before"), answered([[1], [1]])
    paired = differences(after, before)
    reward = next(own for own in paired if own.name == "reward")
    assert (reward.value, reward.low, reward.told_apart) == (1.0, None, None)
    lines = [" ".join(line.split()) for line in console_lines(after, before, paired)]
    assert "pass@1 1.000 0.000 +1.000 none: equal in all 2 prompts unknown" in lines
    # Both responses have ten tokens.
    assert "tokens per response 10.0 none: equal in all 2 prompts" in lines
    assert figures(after)["response_tokens"].method is None


def test_a_policy_that_is_better_by_the_same_everywhere_is_told_apart_by_the_signs():
    for prompts, told_apart in ((5, None), (6, True)):
        before, after = answered([[0]] * prompts, name="before"), answered([[1]] * prompts)
        assert differences(after, before)[0].told_apart is told_apart


def test_only_prompts_that_both_answered_count():
    before = answered([[0], [0], [1]], name="before")
    after = record([generation(7, prompt="Prompt 1"), generation(8, prompt="Prompt 99")])
    found = {own.name: own for own in differences(after, before)}
    assert (found["reward"].own, found["reward"].other) == (1.0, 0.0)
    assert found["reward"].prompts == 1
    assert (found["reward"].low, found["reward"].told_apart) == (None, None)
    assert differences(record([generation(prompt="another")]), before) == []


def test_a_prompt_that_is_asked_twice_counts_once():
    before = record([generation(0, right=0.0), generation(1, right=1.0, prompt="Prompt 0")])
    found = {own.name: own for own in differences(answered([[1]]), before)}
    assert (found["reward"].value, found["reward"].prompts) == (0.5, 1)


def test_the_same_measures_are_compared():
    several, one = answered([[1, 0], [1, 1]]), answered([[1], [0]], name="one")
    names = [own.name for own in differences(several, one)]
    assert names == [
        *("reward", "format_reward", "answer_reward", "pass@1", "response_tokens", "truncated")
    ]


# ---- Data and console lines ------------------------------------------------------------------


def test_data_has_what_there_is_and_nothing_else():
    evaluation = answered([[1, 0], [0, 0]])
    data = evaluation_data(evaluation, None, [])
    assert data["format"] == 1
    assert (data["prompts"], data["samples"], data["responses"]) == (2, 2, 4)
    assert data["figures"]["pass@2"]["value"] == 0.5
    assert "majority@2" not in data["figures"]
    assert data["categories"] == {"correct": 1, "wrong_answer": 3, "wrong_format": 0}
    assert data["unscored"] == {"prompts": 0, "responses": 0}
    assert "against" not in data
    assert "categories" not in evaluation_data(answered([[0.5]]), None, [])


def test_data_of_a_comparison_names_the_other():
    before, after = answered([[0], [0]], name="before"), answered([[1], [1]])
    data = evaluation_data(after, before, differences(after, before))["against"]
    assert (data["name"], data["changes"]) == ("before", [])
    assert data["differences"]["reward"] == {
        "own": 1.0,
        "other": 0.0,
        "value": 1.0,
        "low": None,
        "high": None,
        "prompts": 2,
        "told_apart": None,
    }


def test_the_console_shows_figures_categories_and_the_difference():
    before, after = answered([[0, 0], [0, 1]], name="before"), answered([[1, 1], [0, 1]])
    lines = list(console_lines(after, before, differences(after, before)))
    assert lines[:2] == [
        "checkpoint /trial/checkpoint_000001 after 96 rounds, SHA-256 0123456789ab…",
        "task keyword: 2 held-out prompts × 2 responses, temperature 0.8, seed 0",
    ]
    text = "\n".join(lines)
    assert "pass@2               1.000  0.342 to 1.000" in text
    assert "correct       format 1, answer 1          3  75.0%" in text
    assert "answer reward" not in text  # pass@1 is the same value
    assert "compared with before, over 2 prompts that both policies answered" in text
