"""The rubrics of each prompt, and their place in a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.rubric_buffers import RubricBuffers
from grpo_trainable.protocol.rollout import Request, Rubric, SamplingLimits

LIMITS = SamplingLimits(min_new_tokens=0, max_new_tokens=4, temperature=1.0, end_ids=(0,))
WARM, RUDE = Rubric("is warm", 1.0), Rubric("is rude", -1.0)


def buffers(reward: str | None = "judge:judge.yaml") -> RubricBuffers:
    return RubricBuffers(GRPOConfig.from_dict({"task": {"reward": reward}}))


def request(*ids: int, stream: str = "train", index: int = 0) -> Request:
    return Request(stream=stream, prompt_index=index, prompt_ids=ids, group_size=2, limits=LIMITS)


def scored(*answers: tuple[int, tuple[int, ...], tuple[Rubric, ...] | None]) -> Any:
    """Make a generator's answer from (prompt index, tokens of the prompt, rubrics) per group."""
    groups = [
        SimpleNamespace(prompt_index=index, prompt_ids=np.array(ids)) for index, ids, _ in answers
    ]
    rubrics = {index: own for index, _, own in answers if own is not None}
    return SimpleNamespace(groups=groups, rubrics=rubrics)


def test_rubrics_of_a_prompt_change_when_its_round_is_collected() -> None:
    own = buffers()
    own.add(scored((0, (1, 2), (WARM,)), (1, (3,), None), (2, (4,), (RUDE,))))
    assert own.attach(request(1, 2)).rubrics == ()
    own.settle([0, 1])
    assert own.attach(request(1, 2, index=7)).rubrics == (WARM,)
    assert own.attach(request(3)).rubrics == ()
    assert own.attach(request(4)).rubrics == ()
    own.settle([2])
    assert own.attach(request(4)).rubrics == (RUDE,)


def test_rubrics_do_not_depend_on_the_order_of_answers() -> None:
    answers = [(0, (1,), (WARM,)), (1, (1,), (RUDE,)), (2, (2,), (WARM, RUDE))]
    states = []
    for order in (answers, answers[::-1]):
        own = buffers()
        for answer in order:
            own.add(scored(answer))
        own.settle([0, 1, 2])
        states.append(own.state())
    assert states[0] == states[1]


def test_resumed_buffers_equal_uninterrupted_ones() -> None:
    own, resumed = buffers(), buffers()
    own.add(scored((0, (1,), (WARM, RUDE)), (1, (2,), (RUDE,))))
    own.settle([0])
    resumed.load_state(json.loads(json.dumps(own.state())), same_sampling=True)
    for each in (own, resumed):
        each.settle([1])
    assert resumed.state() == own.state()
    assert resumed.attach(request(1)).rubrics == (WARM, RUDE)
    assert resumed.attach(request(2)).rubrics == (RUDE,)


def test_prompts_that_are_dropped_on_resume_change_no_rubrics() -> None:
    own, resumed = buffers(), buffers()
    own.add(scored((0, (1,), (WARM,)), (1, (2,), (RUDE,))))
    own.settle([0])
    resumed.load_state(own.state(), same_sampling=False)
    resumed.settle([1])
    assert resumed.attach(request(1)).rubrics == (WARM,)
    assert resumed.attach(request(2)).rubrics == ()


def test_only_training_requests_of_a_judge_carry_rubrics() -> None:
    assert buffers().attach(request(1, stream="eval")).rubrics is None
    assert buffers(None).attach(request(1)).rubrics is None
    assert buffers("my.py:score").attach(request(1)).rubrics is None
