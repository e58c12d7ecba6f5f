"""Valid values of a reward, and a scorer without a separate process."""

import pytest

from grpo_trainable.generator.scorer import InlineScorer
from grpo_trainable.tasks import Score, ScoreRequest, as_score


def test_inline_scorer_answers_in_order():
    scorer = InlineScorer(lambda response, truth: Score(float(len(response)), 1.0, float(truth)))
    answers = scorer.score([ScoreRequest("abc", 1), ScoreRequest("", 2)])
    assert answers == [Score(3.0, 1.0, 1.0), Score(0.0, 1.0, 2.0)]
    scorer.close()


class Zero:
    def __float__(self):
        return 0.0


@pytest.mark.parametrize(("result", "reward"), [(1, 1.0), (True, 1.0), (-2.5, -2.5), (Zero(), 0.0)])
def test_whatever_is_a_number_is_a_reward(result, reward):
    expected = Score(reward=reward, format_reward=None, answer_reward=reward)
    assert as_score(result) == as_score({"reward": result}) == expected


@pytest.mark.parametrize(
    "result",
    [None, "1", [1.0], 1j, float("inf"), -float("inf"), float("nan"), 1e39, 10**400, {}],
    ids=repr,
)
def test_whatever_is_no_finite_float32_is_refused(result):
    for value in (result, {"reward": result}, {"reward": 1.0, "answer_reward": result}):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            as_score(value)


def test_a_reward_may_say_what_the_response_answers():
    assert as_score({"reward": 1.0, "answer": 42}) == Score(1.0, None, 1.0, answer="42")
    assert as_score({"reward": 1.0, "answer": None}).answer is None
    assert as_score(Score(1.0, 1.0, 1.0, answer="x")).answer == "x"
    assert as_score({"reward": 0.0, "answer": "half \ud800 a pair"}).answer == "half ? a pair"


def test_a_reward_may_have_parts():
    score = as_score({"reward": 2, "format_reward": 0.5, "parts": {"length": -3, "style": 1}})
    assert score.parts == {"length": -3.0, "style": 1.0}
    assert score.all_parts == {"format": 0.5, "answer": 2.0, "length": -3.0, "style": 1.0}
    assert as_score(score) == score
    assert as_score(1).all_parts == {"answer": 1.0}


@pytest.mark.parametrize("parts", [[1.0], {"length": "long"}, {"length": float("nan")}], ids=repr)
def test_parts_that_are_no_numbers_are_refused(parts):
    with pytest.raises((TypeError, ValueError), match="part"):
        as_score({"reward": 1.0, "parts": parts})
