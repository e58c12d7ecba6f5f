"""Several learners behind one interface, in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_pipeline import config_of, trained_prompts

from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.protocol.calls import ActorFailed, ActorLost
from grpo_trainable.simulation.runtime import VirtualActor, VirtualRuntime, constant_durations
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial

THREE = {"num_learners": 3}


def trial_of(lag: int = 0, **kwargs: Any) -> VirtualTrial:
    return virtual_trial(config_of(lag=lag, resources=THREE), **kwargs)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_round_ends_when_the_last_learner_has_trained(lag: int):
    def durations(actor: str, stage: str) -> float:
        return 9.0 if (actor, stage) == ("learner-1", "optimize") else 1.0

    trial = trial_of(lag, durations=durations)
    reports = trial.run(2)
    for report in reports:
        # This is half of the update. The forward pass of the reference takes the other half.
        assert report.metrics["time/optimize_s"] == 4.5
        stages = Counter((s.actor, s.span.stage) for s in report.spans if s.role == "learner")
        for name in ("learner-0", "learner-1", "learner-2"):
            assert stages[name, "optimize"] == 1
        told = [change.actor for change in report.versions if change.role == "learner"]
        assert told == ["learner-0"]
    alone = virtual_trial(config_of(lag=lag))
    alone.run(2)
    assert trained_prompts(trial) == trained_prompts(alone)


def test_the_loss_of_any_learner_ends_the_trial_and_names_it():
    for name in ("learner-0", "learner-2"):
        trial = trial_of(
            dies=lambda actor, stage, n, lost=name: (actor, stage) == (lost, "optimize")
        )
        trial.pipeline.send_first_weights()
        with pytest.raises(ActorLost, match=rf"^optimize: {name} died"):
            trial.pipeline.run_round()


def elastic_trial(dies: Any, lag: int = 0) -> VirtualTrial:
    return virtual_trial(config_of(lag=lag, resources={**THREE, "elastic": True}), dies=dies)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("stage", ["optimize", "sync"])
def test_an_elastic_group_takes_the_round_up_again_with_those_who_are_left(lag: int, stage: str):
    calls = {"optimize": 2, "sync": 3}  # which of these calls belong to the second round
    trial = elastic_trial(
        lambda actor, at, n: actor == "learner-1" and (at, n) == (stage, calls[stage]), lag
    )
    reports = trial.run(4)
    assert [report.updated.version for report in reports] == [1, 2, 3, 4]
    learners = [
        sorted({s.actor for s in r.spans if s.role == "learner" and s.span.stage == "optimize"})
        for r in reports
    ]
    after = 1 if stage == "optimize" else 2
    assert learners == [
        ["learner-0", "learner-1", "learner-2"] if i < after else ["learner-0", "learner-2"]
        for i in range(4)
    ]
    notes = [note for report in reports for note in report.notes if "continuing without" in note]
    assert len(notes) == 1
    assert notes[0].startswith("continuing without learner-1 (optimize: learner-1 died")
    assert notes[0].endswith("2 learners left")


def test_no_group_goes_on_without_its_first():
    trial = elastic_trial(lambda actor, stage, n: (actor, stage) == ("learner-0", "optimize"))
    trial.pipeline.send_first_weights()
    with pytest.raises(ActorLost, match=r"learner-0 died"):
        trial.pipeline.run_round()


class Torn:
    """A learner that has lost its connection to another learner."""

    def update(self, start: float, end: float, batches: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    publish = update


class Silent:
    def publish(self, start: float, end: float, needed_from: int) -> None: ...


def group_of(*roles: Any, dead: str = "") -> LearnerGroup:
    runtime = VirtualRuntime()
    actors = [
        VirtualActor(
            runtime,
            f"learner-{i}",
            role,
            constant_durations(),
            dies=lambda stage, n, i=i: f"learner-{i}" == dead,
        )
        for i, role in enumerate(roles)
    ]
    return LearnerGroup(actors, runtime, 10.0)


def test_a_learner_that_fails_without_its_partner_is_not_to_blame():
    with pytest.raises(ActorLost, match=r"learner-1 died"):
        group_of(Torn(), Silent(), dead="learner-1").publish(0)


def test_a_learner_that_fails_among_living_ones_is_to_blame():
    with pytest.raises(ActorFailed, match=r"^sync: learner-0 failed with RuntimeError"):
        group_of(Torn(), Silent()).publish(0)


def test_learners_that_took_other_steps_are_an_error():
    trial = trial_of()
    trial.pipeline.send_first_weights()
    second = trial.learners._actors[1]
    second._role._version += 1
    with pytest.raises(
        ActorFailed, match=r"^optimize: learner-1 has taken different gradient steps"
    ):
        trial.pipeline.run_round()
