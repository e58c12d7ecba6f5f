"""Episodes that vLLM samples: their tokens, log-probs and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import agreeing
import pytest
import torch
from chat_episodes import check_many_episodes
from conftest import shape_of
from scripted import Scripted
from test_vllm_engine import (
    LIMITS,
    engine_of,
    policy_of,
    recorded_and_scored,
    requests,
    swapping,
)

from grpo_trainable.engines.checks import check_played
from grpo_trainable.protocol.rollout import RolloutGroup

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

OF_EPISODES = replace(LIMITS, min_new_tokens=1, max_new_tokens=40, stop_strings=("o", "e", "fox"))
ROLLOUT = {"max_new_tokens": 40}


def played(sampler: Any, partner: Scripted | None = None, between_tokens=lambda: None):
    wanted = requests(OF_EPISODES)
    groups: list[RolloutGroup] = sampler.play(wanted, between_tokens, partner or Scripted())
    check_played("vllm", sampler, wanted, groups, vocab_size=320)
    return groups


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_nothing_is_tokenised_again_in_two_hundred_episodes(tmp_path: Path, family: str):
    apart = {"engine": "vllm", "placement": "disaggregated", "lag": 1}
    check_many_episodes(tmp_path, family, 25, settings=apart, shape=shape_of(family))


def test_slow_answers_change_no_token(model_path):
    sampler = engine_of(model_path(max_position_embeddings=96), rollout=ROLLOUT)
    at_once, partner = played(sampler), Scripted()
    fed = sum(int((group.extents - group.response_mask.sum(dim=1)).sum()) for group in at_once)
    assert fed > 20
    agreeing.assert_agree(at_once, played(sampler, Scripted(Random(1))), atol=1e-4)
    agreeing.assert_agree(at_once, played(sampler, partner), atol=1e-4)
    for action in partner.actions:
        group, row = at_once[action.row // 4], action.row % 4
        begin = action.end + 1 - len(action.ids)
        assert group.response_ids[row, begin : action.end + 1].tolist() == action.ids


@pytest.mark.parametrize("weight_update", ["interrupt_recompute", "in_flight"])
def test_new_weights_in_the_middle_of_episodes(model_path, weight_update):
    update = {"weight_update": weight_update, "rollout": ROLLOUT}
    sampler = engine_of(model_path(max_position_embeddings=96), **update)
    groups = played(sampler, between_tokens=swapping(sampler, model_path))
    versions = torch.cat([g.token_versions[g.response_mask] for g in groups])
    assert set(versions.tolist()) == {0, 1, 2, 3}
    assert not any(g.token_versions[~g.response_mask].any() for g in groups)
    for version in range(4):
        policy = policy_of(model_path(seed=version))
        recorded, learner = recorded_and_scored(policy, groups, OF_EPISODES)
        mine = versions == version
        agrees = bool(torch.isclose(recorded[mine], learner[mine], rtol=0, atol=1e-4).all())
        # With `in_flight`, the cache of an action is kept, so it contains keys of older weights.
        assert agrees == (weight_update == "interrupt_recompute" or version == 0)
