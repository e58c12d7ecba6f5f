"""Whole trials in virtual time: the real pipeline with virtual actors.

The pipeline is real, and so are its staleness gate, its replay buffer and the learner group. The
actors, the calls and the clock are virtual. Unit tests drive the pipeline through timings that a
real machine could not reproduce. `benchmarks/schedule_sim.py` compares simulated times with the
times of real trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.pipeline import Pipeline, RoundReport
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.simulation.roles import (
    GeneratorCall,
    TrainingCall,
    VirtualColocated,
    VirtualGenerator,
    VirtualLearner,
    VirtualRequests,
)
from grpo_trainable.simulation.runtime import (
    MAX_WAITS,
    TICK,
    Durations,
    VirtualActor,
    VirtualRuntime,
    constant_durations,
)
from grpo_trainable.telemetry.metrics import stage_seconds

# With this value of `task.reward`, responses are scored in separate calls, as they are with a
# user-defined reward.
SCORED_APART = "virtual:scored_apart"


@dataclass
class VirtualTrial:
    """A pipeline with virtual actors, and the calls that the actors recorded."""

    config: GRPOConfig
    runtime: VirtualRuntime
    pipeline: Pipeline
    learners: LearnerGroup
    requests: VirtualRequests
    trained: list[TrainingCall] = field(default_factory=list)
    generated: list[GeneratorCall] = field(default_factory=list)
    # (time, round): from this time on, weights of rounds before this round may be gone.
    releases: list[tuple[float, int]] = field(default_factory=list)

    def run(self, rounds: int) -> list[RoundReport]:
        """Start the trial, and run `rounds` rounds."""
        self.pipeline.send_first_weights()
        return [self.pipeline.run_round() for _ in range(rounds)]


def virtual_trial(
    config: GRPOConfig,
    *,
    durations: Durations | None = None,
    seed: int = 0,
    latency: float = 0.0,
    max_waits: int = MAX_WAITS,
    reward_fails: Callable[[str, int], bool] = lambda stream, prompt_index: False,
    equal_rewards: Callable[[int, int], bool] = lambda prompt_index, weights_round: False,
    slowness: Callable[[int], float] = lambda example: 1.0,
    interrupted: Callable[[int, int], bool] = lambda prompt_index, response: False,
    hangs: Callable[[str, str, int], bool] = lambda actor, stage, n: False,
    dies: Callable[[str, str, int], bool] = lambda actor, stage, n: False,
    room: Callable[[str, float], bool] = lambda actor, at_s: True,
    step_s: float = TICK,
    mute: bool = False,
) -> VirtualTrial:
    """Return a trial with virtual actors, before its first round.

    Args:
        config: settings of the trial.
        durations: returns the seconds of a call; by default one tick.
        seed: seed for the order in which answers arrive.
        latency: seconds from the submission of a call to its earliest start.
        max_waits: number of waits after which the pipeline is assumed to wait forever.
        reward_fails: `reward_fails(stream, prompt_index)` is True if the reward function fails.
        equal_rewards: `equal_rewards(prompt_index, weights_round)` is True if all responses to a
            prompt earn the same reward.
        slowness: `slowness(example)` is the factor by which an example takes longer than usual.
        interrupted: `interrupted(prompt_index, response)` is True if the response is interrupted.
            Used only with `rollout.overlong=interrupt`.
        hangs: `hangs(actor, stage, n)` is True if the actor of this name never answers the n-th
            call of a stage.
        dies: `dies(actor, stage, n)` is True if the actor dies during the n-th call of a stage.
        room: `room(actor, at_s)` is True if, at time `at_s`, a machine has room for a replacement
            of the actor of this name.
        step_s: seconds of a call that count as one step of progress.
        mute: True if an actor that hangs does not answer `progress` either.
    """
    durations = durations or constant_durations()
    runtime = VirtualRuntime(seed=seed, latency=latency, max_waits=max_waits)
    trained: list[TrainingCall] = []
    generated: list[GeneratorCall] = []
    releases: list[tuple[float, int]] = []

    submitted: dict[str, dict[str, int]] = {}

    def actor(name: str, role: Any) -> VirtualActor:
        return VirtualActor(
            runtime,
            name,
            role,
            durations,
            lambda stage, n: hangs(name, stage, n),
            lambda stage, n: dies(name, stage, n),
            submitted.setdefault(name, {}),
            step_s=step_s,
            mute=mute,
            cancels=config.rollout.stragglers != "wait" and isinstance(role, VirtualGenerator),
        )

    def generator_role(name: str) -> VirtualGenerator:
        return VirtualGenerator(
            name,
            generated,
            reward_fails,
            equal_rewards=equal_rewards,
            slowness=slowness,
            takes_deposits=config.in_mid_batch,
            scores_apart=config.task.reward == SCORED_APART,
            completions=config.vine.samples if config.loss.advantage == "vine" else 0,
            interrupted=interrupted if config.rollout.overlong == "interrupt" else None,
        )

    def start(name: str) -> VirtualActor:
        return actor(name, generator_role(name))

    def spawn(name: str, patience_s: float) -> VirtualActor | None:
        until = runtime.time + patience_s
        while not room(name, runtime.time):
            if runtime.time >= until:
                return None
            runtime.time = min(runtime.time + 1.0, until)
        return start(name)

    learner_role = VirtualLearner(config, trained, releases)
    if config.placement == "colocated":
        role = VirtualColocated(generator_role("worker"), learner_role)
        learners = generators = [actor("worker", role)]
    else:
        # All learners receive the same calls, so only the first one records them.
        roles = [learner_role]
        roles += [VirtualLearner(config, [], []) for _ in resources.learner_names(config)[1:]]
        learners = list(map(actor, resources.learner_names(config), roles))
        generators = [start(f"generator-{i}") for i in range(config.resources.num_generators)]
    group = LearnerGroup(
        learners, runtime, config.resources.deadline_s, elastic=config.resources.elastic
    )
    requests = VirtualRequests(config)
    pipeline = Pipeline(
        config,
        requests,
        generators,
        group,
        runtime,
        runtime.now,
        spawn=None if config.placement == "colocated" else spawn,
    )
    return VirtualTrial(config, runtime, pipeline, group, requests, trained, generated, releases)


def simulate(
    config: GRPOConfig, durations: Durations, *, hop_s: float = 0.0, gap_s: float = 0.0, seed: int
) -> list[RoundReport]:
    """Simulate a trial, and return the report of each round.

    Args:
        config: settings of the trial.
        durations: returns the seconds of a call.
        hop_s: seconds from the submission of a call to its start.
        gap_s: seconds from the end of one `step()` to the start of the next.
        seed: seed for the order in which answers arrive.
    """
    simulated = virtual_trial(
        config, durations=durations, seed=seed, latency=hop_s, max_waits=10**9
    )
    simulated.pipeline.send_first_weights()
    reports = []
    for _ in range(config.rounds):
        simulated.runtime.time += gap_s
        reports.append(simulated.pipeline.run_round())
    return reports


def wall_clock_a_round(reports: Sequence[RoundReport]) -> float:
    """Return the mean seconds per round, with the gaps between rounds but without evaluations."""
    evaluation_s = sum(stage_seconds(report.spans)["time/eval_s"] for report in reports)
    return (reports[-1].end - reports[0].start - evaluation_s) / len(reports)
