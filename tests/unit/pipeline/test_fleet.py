"""Generators that are lost while no machine has room for replacements, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_time import all_prompt_indices, of_stream, used_after_release

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.protocol.calls import ActorFailed
from grpo_trainable.simulation.runtime import TICK
from grpo_trainable.simulation.trial import VirtualTrial, virtual_trial

GENERATORS = 3


def config_of(**values: Any) -> GRPOConfig:
    data: dict[str, Any] = {
        "placement": "disaggregated",
        "rounds": 6,
        "rollout": {"prompts": 6, "unit_prompts": 1, "group_size": 2},
        "eval": {"every": 2, "prompts": 3, "samples": 2},
        "resources": {"deadline_s": 1e6, "num_generators": GENERATORS},
        "task": {"reward": "virtual:reward", "reward_deadline_s": 0.1},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    return GRPOConfig.from_dict(data)


def die_in_rollout(*deaths: tuple[str, int]) -> Any:
    """Make each named generator die in its n-th chunk. Chunks are counted across replacements."""
    return lambda name, stage, n: stage == "rollout" and (name, n) in deaths


def trained(w: VirtualTrial) -> list[int]:
    return [index for call in w.trained for index in all_prompt_indices(call)]


def all_prompts(config: GRPOConfig) -> list[int]:
    return list(range(config.rounds * schedule.prompts_per_round(config)))


@pytest.mark.parametrize("lag", [0, 2])
def test_a_trial_goes_on_with_the_generators_that_are_left(lag: int) -> None:
    config = config_of(lag=lag)
    w = virtual_trial(
        config, dies=die_in_rollout(("generator-1", 3)), room=lambda name, at_s: False
    )
    reports = w.run(config.rounds)
    assert reports[-1].metrics["fleet/generators"] == GENERATORS - 1
    (note,) = [note for report in reports for note in report.notes]
    assert note.startswith(
        "generator-1 is lost (rollout: generator-1 died (killed)) and no machine"
    )
    assert "continuing with 2 of 3 generators; sampling" in note
    assert trained(w) == all_prompts(config)
    ((name, at_s),) = w.runtime.kills
    assert not [c for c in w.generated if c.actor == name and c.start > at_s]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_lost_generator_comes_back_when_a_machine_has_room(lag: int) -> None:
    config = config_of(lag=lag, rounds=12)
    lost_at_s = 0.5
    w = virtual_trial(
        config,
        dies=die_in_rollout(("generator-1", 3)),
        room=lambda name, at_s: at_s > lost_at_s,
    )
    reports = w.run(config.rounds)
    present = [report.metrics["fleet/generators"] for report in reports]
    assert present.count(GENERATORS - 1) >= 1
    assert present[-1] == GENERATORS
    back = next(r for r in reports if "generator-1 is back: 3 of 3 generators" in r.notes)
    assert back.start >= lost_at_s
    assert [c for c in of_stream(w, "train") if c.actor == "generator-1" and c.start > back.start]
    assert trained(w) == all_prompts(config)
    assert not used_after_release(w)


def test_synchronous_results_do_not_depend_on_how_many_generators_are_left() -> None:
    config = config_of(rounds=6)
    alone = virtual_trial(
        config,
        dies=die_in_rollout(("generator-0", 2), ("generator-2", 3)),
        room=lambda name, at_s: False,
    )
    others = virtual_trial(config)
    alone.run(config.rounds)
    others.run(config.rounds)
    assert [call.rewards for call in alone.trained] == [call.rewards for call in others.trained]


def test_the_last_generator_is_waited_for() -> None:
    config = config_of(resources={"num_generators": 1, "deadline_s": 60.0})
    w = virtual_trial(
        config, dies=die_in_rollout(("generator-0", 9)), room=lambda name, at_s: at_s > 30.0
    )
    reports = w.run(config.rounds)
    assert w.runtime.now() > 30.0
    assert trained(w) == all_prompts(config)
    assert any("generator-0 was replaced" in note for r in reports for note in r.notes)


def test_a_trial_ends_when_its_last_generator_finds_no_room_within_the_deadline() -> None:
    config = config_of(resources={"num_generators": 1, "deadline_s": 60.0})
    w = virtual_trial(
        config, dies=die_in_rollout(("generator-0", 9)), room=lambda name, at_s: False
    )
    with pytest.raises(ActorFailed, match=r"no machine had room .* resources\.deadline_s=60 s"):
        w.run(config.rounds)


def test_one_that_joins_has_no_work_before_it_answers() -> None:
    """The machine that the new generator starts on may be dead as well."""
    config = config_of(lag=2, rounds=8)

    def durations(name: str, stage: str) -> float:
        slow = name == "generator-1" and stage == "sync" and bool(w.runtime.kills)
        return 100.0 if slow else TICK

    w = virtual_trial(config, durations=durations, dies=die_in_rollout(("generator-1", 3)))
    w.pipeline.send_first_weights()
    w.pipeline.run_round()
    while not w.runtime.kills:
        w.pipeline.run_round()
    at_s = w.runtime.now()
    w.pipeline.run_round()
    assert w.runtime.now() < at_s + 100.0


@pytest.mark.parametrize("weight_update", ["interrupt_recompute", "in_flight"])
def test_one_that_joins_evaluates_with_one_version(weight_update: str) -> None:
    """Newer weights are published, and an evaluation becomes due, while the generator starts."""
    config = config_of(
        lag=1,
        rounds=4,
        weight_update=weight_update,
        rollout={"prompts": 2, "unit_prompts": 2},
        eval={"every": 1, "prompts": 2},
        resources={"num_generators": 1},
    )
    # Ticks per load: at the first start, at the replacement's start, and for newer weights.
    starting = iter([2, 40, 28])

    def durations(name: str, stage: str) -> float:
        ticks = {"rollout": 4, "optimize": 20, "eval": 12}.get(stage, 1)
        if name == "generator-0" and stage == "sync":
            ticks = next(starting, 2)
        return ticks * TICK

    w = virtual_trial(config, durations=durations, dies=die_in_rollout(("generator-0", 2)))
    w.run(config.rounds)
    assert w.runtime.kills
    assert [call.weights_round for call in of_stream(w, "eval")] == [0, 1, 2, 3, 4]
