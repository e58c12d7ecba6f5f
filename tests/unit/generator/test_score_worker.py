"""Errors of failed reward calls, tested without the process that usually runs these calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from grpo_trainable.generator.score_worker import answers, reward_function
from grpo_trainable.tasks import RewardError, as_score
from grpo_trainable.tasks.reward_function import Responses, RewardFunction, as_reward, sum_of


class RateLimitError(Exception):
    """An error of the kind that a service's client library defines."""


def cannot_connect() -> None:
    raise ConnectionError("no service")


def too_many_requests() -> None:
    raise RateLimitError("wait")


def replaced() -> None:
    try:
        too_many_requests()
    except RateLimitError as error:
        raise RuntimeError("no judge") from error


def raised_on_the_way() -> None:
    try:
        replaced()
    except RuntimeError:
        raise ValueError("no number") from None


def not_json() -> None:
    json.loads("<html>")


def wrong_key() -> None:
    raise KeyError("level")


def wrong_type() -> None:
    try:
        wrong_key()
    except KeyError as error:
        raise TypeError("no text") from error


def its_own_cause() -> None:
    error = ValueError("no number")
    raise error from error


def ends() -> None:
    raise SystemExit(3)


def repeats(act: Callable[[], Any]) -> bool:
    """Score a response with a reward that calls `act`, and return `repeats` of the error."""

    def reward(response: str, ground_truth: Any) -> Any:
        return act()

    (answer,) = answers(as_reward(reward), Responses(texts=["x"], ground_truth=None))
    assert isinstance(answer, RewardError)
    return answer.repeats


@pytest.mark.parametrize(
    "act", [cannot_connect, too_many_requests, replaced, raised_on_the_way, not_json]
)
def test_an_outage_may_pass_and_so_does_an_error_that_it_led_to(act: Callable[[], Any]) -> None:
    assert not repeats(act)


@pytest.mark.parametrize("act", [wrong_key, wrong_type, its_own_cause, ends, lambda: "text"])
def test_a_mistake_in_a_reward_repeats(act: Callable[[], Any]) -> None:
    assert repeats(act)


# ---- Several rewards ---------------------------------------------------------------------------


def model(name: str, started: list[str]) -> RewardFunction:
    """Return a reward with the properties of a reward model. The score is the text's length."""
    return RewardFunction(
        score=lambda given: [float(len(text)) for text in given.texts],
        name=name,
        scores_groups=True,
        reads=frozenset({"prompt"}),
        takes_messages=False,
        start=lambda: started.append(name),
        has_spare=False,
        may_die_of_responses=False,
    )


def half(response: str, ground_truth: Any) -> float:
    return 0.5


def test_a_model_and_a_function_give_the_sum_with_a_part_for_each() -> None:
    reward = sum_of([model("rm", []), as_reward(half)])
    first, second = answers(reward, Responses(texts=["abc", ""], ground_truth=None))
    assert first == as_score({"reward": 3.5, "parts": {"rm": 3.0, "half": 0.5}})
    assert second == as_score({"reward": 0.5, "parts": {"rm": 0.0, "half": 0.5}})


def test_a_sum_has_the_needs_of_all_its_rewards() -> None:
    started: list[str] = []
    models = sum_of([model("a", started), model("b", started)])
    models.start()
    assert started == ["a", "b"]
    assert not models.may_die_of_responses
    mixed = sum_of([model("a", started), as_reward(half)])
    assert mixed.scores_groups
    assert not mixed.has_spare
    assert not mixed.takes_messages
    assert mixed.may_die_of_responses


def test_a_model_without_the_extra_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^task\.reward=model:/rm: the library transformers is "):
        reward_function("model:/rm", None)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lists two rewards with the same name \(rm, rm\)"):
        sum_of([model("rm", []), model("rm", [])])
