"""VinePPO's completions in virtual time: durations, counts, and a real generator to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policies import write_quick_policy

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.simulation.calibration import calls_of
from grpo_trainable.simulation.roles import GeneratorCall, VirtualGenerator, VirtualRequests
from grpo_trainable.simulation.trial import SCORED_APART, VirtualTrial, virtual_trial
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.telemetry.metrics import stage_seconds
from grpo_trainable.transports.in_process import InProcess

SECONDS = {"rollout": 1.0, "vine": 3.0, "optimize": 4.0, "sync": 0.25, "eval": 7.0, "reward": 0.5}


def config_of(**settings: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": 3,
            "rollout": {"prompts": 4, "unit_prompts": 2, "group_size": 2, "max_new_tokens": 1},
            "eval": {"every": 3, "prompts": 1, "samples": 1},
            "loss": {"type": "ppo", "advantage": "vine"},
            "vine": {"samples": 5},
            **settings,
        }
    )


def trial_of(config: GRPOConfig, **worlds: Any) -> VirtualTrial:
    return virtual_trial(config, durations=lambda actor, stage: SECONDS[stage], **worlds)


def test_a_round_completes_the_states_of_every_chunk():
    reports = trial_of(config_of()).run(3)
    for report in reports:
        seconds = stage_seconds(report.spans)
        # Each of two chunks takes 1 s, half of it for scoring, and its completions take 3 s.
        assert seconds["time/vine_s"] == pytest.approx(6.0)
        assert seconds["time/rollout_s"] == pytest.approx(1.0)
        assert seconds["time/reward_s"] == pytest.approx(1.0)
    # Each of four prompts has five completions, which do not count as responses.
    assert [report.metrics["count/completions"] for report in reports] == [20, 40, 60]
    assert [report.metrics["count/trained"] for report in reports] == [4, 8, 12]
    assert reports[1].end - reports[1].start == pytest.approx(2 * 4.0 + 4.0 + 2 * 0.25)


def test_without_vine_nothing_is_completed():
    report = trial_of(config_of(loss={}, vine={})).run(1)[0]
    assert stage_seconds(report.spans)["time/vine_s"] == 0
    assert report.metrics["count/completions"] == 0
    assert report.groups[0].state_values is None


def test_slow_prompts_complete_slowly_and_a_reward_of_the_users_comes_after():
    config = config_of(task={"reward": SCORED_APART})
    report = trial_of(config, slowness=lambda index: 2.0 if index == 0 else 1.0).run(1)[0]
    seconds = stage_seconds(report.spans)
    assert seconds["time/vine_s"] == pytest.approx(2 * 3.0 + 3.0)
    assert seconds["time/rollout_s"] == pytest.approx(2 * 1.0 + 1.0)


def test_a_trace_tells_completions_from_the_rest_of_their_call():
    stages = [("rollout", 0.0, 1.0), ("vine", 1.0, 4.0), ("reward", 4.0, 4.5)]
    events = [
        {"name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": {"round": 2}}
        for name, start, end in stages
    ]
    assert calls_of(events) == [
        ("rollout", 2, pytest.approx(1.5)),
        ("vine", 2, pytest.approx(3.0)),
    ]


# ---- Comparison with a real generator ----------------------------------------------------------


def real_answer(config: GRPOConfig, stream: str) -> Scored:
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    generator.load(learner.publish().handle)
    prompts = Prompts(config, build_task(config), read_tokenizer(config.model.path))
    answer = generator.generate([prompts.request(stream, index) for index in range(1)])
    assert isinstance(answer, Scored)
    return answer


def virtual_answer(config: GRPOConfig, stream: str) -> Scored:
    calls: list[GeneratorCall] = []
    generator = VirtualGenerator("generator-0", calls, completions=config.vine.samples)
    generator.load(0.0, 0.25, (0, 0))
    requests = [VirtualRequests(config).request(stream, index) for index in range(1)]
    kind = "eval" if stream == "eval" else "rollout"
    seconds = generator.seconds(SECONDS.__getitem__, kind, requests)
    answer = generator.generate(0.25, 0.25 + seconds, requests)
    assert isinstance(answer, Scored)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["train", "eval"])
def test_a_virtual_generator_accounts_as_a_real_one_does(stream: str, tmp_path: Path):
    config = config_of(model={"path": write_quick_policy(tmp_path)})
    real, virtual = real_answer(config, stream), virtual_answer(config, stream)
    assert virtual.completions == real.completions == (5 if stream == "train" else 0)
    assert [s.stage for s in virtual.spans if s.stage != "idle"] == _merged(real)
    for ours, theirs in zip(virtual.groups, real.groups, strict=True):
        assert (ours.state_values is None) == (theirs.state_values is None)
        if ours.state_values is not None and theirs.state_values is not None:
            assert ours.state_values.shape == theirs.state_values.shape
            assert torch.equal(ours.state_values.isnan(), theirs.state_values.isnan())


def _merged(real: Scored) -> list[str]:
    """Return the stages of a real call in order. As in a virtual call, "eval" appears twice."""
    stages = list(
        dict.fromkeys(s.stage for s in real.spans if s.stage not in ("idle", "sync", "reference"))
    )
    return stages * 2 if stages == ["eval"] else stages
