from __future__ import annotations

from grpo_trainable.protocol.versions import StalenessGate


def test_synchronous_gate_admits_only_the_newest_weights():
    gate = StalenessGate(lag=0, max_age=0, learner_round=3)
    assert gate.may_generate(3, rounds_ahead=0)
    assert not gate.may_generate(2, rounds_ahead=0)
    assert not gate.may_generate(3, rounds_ahead=1)


def test_gate_with_lag_one_admits_one_round_ahead():
    gate = StalenessGate(lag=1, max_age=1, learner_round=3)
    assert gate.may_generate(3, rounds_ahead=1)
    assert gate.may_generate(2, rounds_ahead=0)
    assert not gate.may_generate(3, rounds_ahead=2)
    assert not gate.may_generate(2, rounds_ahead=1)


def test_first_training_is_bounded_by_lag_and_every_other_by_max_age():
    gate = StalenessGate(lag=1, max_age=3, learner_round=10)
    first = [gate.may_train(oldest, first_use=True) for oldest in (6, 7, 8, 9, 10)]
    later = [gate.may_train(oldest, first_use=False) for oldest in (6, 7, 8, 9, 10)]
    assert first == [False, False, False, True, True]
    assert later == [False, True, True, True, True]


def test_what_was_admitted_is_trained_as_long_as_rounds_end_in_order():
    gate = StalenessGate(lag=2, max_age=2)
    assert gate.may_generate(0, rounds_ahead=2)
    gate.learner_round += 2
    assert gate.may_train(0, first_use=True)
    gate.learner_round += 1
    assert not gate.may_train(0, first_use=True)
