"""Errors of failed reward calls, without the separate process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from grpo_trainable.generator.score_worker import answers
from grpo_trainable.tasks import RewardError
from grpo_trainable.tasks.reward_function import Responses, as_reward


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
    """Return True if the error of a reward that calls `act` is reported to repeat."""

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
