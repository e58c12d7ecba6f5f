"""Requests to stop that come at different moments of a round."""

from __future__ import annotations

import pytest

from grpo_trainable.protocol.stopping import (
    Finishing,
    RoundAbandoned,
    StoppableRounds,
    Stopped,
)


class Request:
    """A request that the test makes, and the answers to it."""

    def __init__(self) -> None:
        self.made = False
        self.answers: list[Finishing | Stopped] = []

    def say(self, answer: Finishing | Stopped) -> None:
        self.answers.append(answer)


class Rounds(StoppableRounds):
    """Rounds whose clock the test sets."""

    def __init__(self) -> None:
        self.asked, self.time_s = Request(), 0.0
        super().__init__(self.asked, lambda: self.time_s)

    def run(self, number: int, *, sampling_s: float, training_s: float, eval_s: float = 0) -> None:
        """Run a round: sample, train, then evaluate for `eval_s` seconds (0: no evaluation)."""
        with self.round(number):
            self.time_s += sampling_s
            self.look()
            self.training_begins(evaluates=eval_s > 0)
            self.time_s += training_s + eval_s
            self.look()
            self.training_ended(int(eval_s > 0), eval_s)


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def test_a_request_during_sampling_abandons_the_round_at_once(rounds):
    rounds.run(1, sampling_s=90, training_s=5)
    with rounds.round(2):
        rounds.time_s += 40
        rounds.look()
        rounds.time_s += 8
        rounds.asked.made = True
        with pytest.raises(RoundAbandoned) as abandoned:
            rounds.look()
    assert abandoned.value.lost_s == 48
    assert rounds.stopped
    assert rounds.asked.answers == []


def test_a_request_just_before_the_gradient_steps_abandons_the_round(rounds):
    with rounds.round(1):
        rounds.asked.made = True
        with pytest.raises(RoundAbandoned):
            rounds.training_begins(evaluates=False)


def test_a_request_during_the_gradient_steps_lets_the_round_end_and_says_when(rounds):
    rounds.run(1, sampling_s=90, training_s=10)
    rounds.run(2, sampling_s=90, training_s=14)
    with rounds.round(3):
        rounds.time_s += 90
        rounds.training_begins(evaluates=False)
        rounds.time_s += 4
        rounds.asked.made = True
        rounds.look()
        rounds.look()  # the trial does not answer a second time
    assert rounds.asked.answers == [Finishing(round=3, left_s=(10 + 14) / 2 - 4)]
    assert not rounds.stopped


def test_the_estimate_includes_an_evaluation_only_if_one_is_due(rounds):
    rounds.run(1, sampling_s=90, training_s=10, eval_s=30)
    for number, evaluates, left_s in ((2, False, 10), (3, True, 40)):
        rounds.asked.made = False
        with rounds.round(number):
            rounds.training_begins(evaluates=evaluates)
            rounds.asked.made = True
            rounds.look()
        assert rounds.asked.answers.pop() == Finishing(round=number, left_s=left_s)


def test_an_evaluation_before_the_gradient_steps_is_not_counted_with_them(rounds):
    """The first round evaluates the policy before training and, in this test, after it as well."""
    with rounds.round(1):
        rounds.time_s += 30 + 90
        rounds.training_begins(evaluates=True)
        rounds.time_s += 10 + 30
        rounds.training_ended(evaluations=2, eval_s=60)
    with rounds.round(2):
        rounds.training_begins(evaluates=True)
        rounds.asked.made = True
        rounds.look()
    assert rounds.asked.answers == [Finishing(round=2, left_s=40)]


def test_an_overdue_round_ends_in_zero_seconds(rounds):
    rounds.run(1, sampling_s=90, training_s=10)
    with rounds.round(2):
        rounds.training_begins(evaluates=False)
        rounds.time_s += 15
        rounds.asked.made = True
        rounds.look()
    assert rounds.asked.answers == [Finishing(round=2, left_s=0)]


def test_without_an_earlier_round_there_is_no_estimate(rounds):
    with rounds.round(1):
        rounds.training_begins(evaluates=False)
        rounds.asked.made = True
        rounds.look()
    assert rounds.asked.answers == [Finishing(round=1, left_s=None)]


def test_a_request_between_two_rounds_abandons_the_next_one_at_its_start(rounds):
    rounds.run(1, sampling_s=90, training_s=10)
    rounds.asked.made = True
    rounds.look()  # a checkpoint is being written, which is no part of a round
    with pytest.raises(RoundAbandoned) as abandoned, rounds.round(2):
        raise AssertionError("the round has begun")
    assert abandoned.value.lost_s == 0


def test_a_request_before_the_first_round_abandons_it_at_its_start(rounds):
    rounds.asked.made = True
    with pytest.raises(RoundAbandoned), rounds.round(1):
        raise AssertionError("the round has begun")


def test_a_request_has_no_effect_after_a_round_that_failed(rounds):
    """A request does not interrupt a trial that has failed and still has to end its actors."""
    with pytest.raises(RuntimeError), rounds.round(1):
        raise RuntimeError
    rounds.asked.made = True
    rounds.look()
    assert rounds.asked.answers == []


def test_without_a_request_rounds_run_as_usual():
    rounds = StoppableRounds()
    with rounds.round(1):
        rounds.look()
        rounds.training_begins(evaluates=False)
        rounds.look()
        rounds.training_ended(0, 0.0)
    assert not rounds.stopped
