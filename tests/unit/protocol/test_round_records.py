"""The records that a round leaves besides its metrics, compared with records written by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from virtual_time import one_token_group

from grpo_trainable.protocol.messages import Drift, GradientStep, ResponseFigures, Updated
from grpo_trainable.protocol.round_records import (
    SCHEMAS,
    first_use_lags,
    response_columns,
    rollout_columns,
    step_columns,
    table,
    version_columns,
)
from grpo_trainable.protocol.versions import Sync, VersionChange

GROUPS = [
    replace(
        one_token_group(4, rewards=(1.0, 0.0), version=6, round_=3, uses=1),
        response_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]),
        response_mask=torch.tensor([[True, False, True], [True, True, False]]),
        behaviour_log_probs=torch.tensor([[-1.0, 0.0, -0.5], [-2.0, -0.25, 0.0]]),
        finished=torch.tensor([False, True]),
        format_rewards=torch.tensor([1.0, torch.nan]),  # the second response has no format reward
        answer_rewards=torch.tensor([0.75, 0.25]),
        parts={"found": [1.0, 0.0], "short": [0.5, None]},
        # The values in the hole have no meaning.
        token_versions=torch.tensor([[8, 0, 6], [8, 8, 0]], dtype=torch.int32),
        token_rounds=torch.tensor([[4, 0, 3], [4, 4, 0]], dtype=torch.int32),
    ),
    one_token_group(5, rewards=(0.5, 0.5), version=8, round_=4, uses=2),
]


def test_columns_have_one_entry_a_response_in_order():
    columns = rollout_columns(
        GROUPS,
        learner_round=5,
        prompt=lambda cursor: (f"prompt {cursor}", "math" if cursor == 5 else "keyword", "½"),
        decode=lambda ids: "-".join(map(str, ids)),
        advantages=np.array([1.0, -1.0, 0.0, 0.0], dtype=np.float32),
        policy_log_probs=np.array([-1.5, -2.5, 0.0, 0.0], dtype=np.float32),
        reference_log_probs=np.array([np.nan, -2.0, np.nan, np.nan], dtype=np.float32),
    )
    assert columns == {
        "round": [6, 6, 6, 6],
        "cursor": [4, 4, 5, 5],
        "response_index": [0, 1, 0, 1],
        "task": ["keyword", "keyword", "math", "math"],
        "prompt": ["prompt 4", "prompt 4", "prompt 5", "prompt 5"],
        # the inserted token of the first response is part of the text
        "response": ["5-6-7", "8-9", "0", "0"],
        "ground_truth": ['"\\u00bd"'] * 4,
        "reward": [1.0, 0.0, 0.5, 0.5],
        "format_reward": [1.0, None, 1.0, 1.0],
        "answer_reward": [0.75, 0.25, 0.5, 0.5],
        "parts": ['{"found": 1.0, "short": 0.5}', '{"found": 0.0}', None, None],
        "finished": [False, True, True, True],
        "tokens": [2, 2, 1, 1],
        "turns": [None] * 4,
        "advantage": [1.0, -1.0, 0.0, 0.0],
        "uses": [1, 1, 2, 2],
        "version": [6, 6, 8, 8],
        "weights_round": [3, 3, 4, 4],
        "lag": [2, 2, 1, 1],
        "first_use": [True, True, False, False],
        "behaviour_log_prob": [-1.5, -2.25, 0.0, 0.0],
        "policy_log_prob": [-1.5, -2.5, 0.0, 0.0],
        "reference_log_prob": [None, -2.0, None, None],
    }
    assert columns.keys() == set(SCHEMAS["rollouts"].names)


def test_steps_have_the_version_and_the_kl_before_them():
    def step(skipped: bool, k1: float) -> GradientStep:
        return GradientStep(
            loss=0.5,
            grad_norm=math.nan if skipped else 1.0,
            entropy_nats=2.0,
            clip_fraction=0.25,
            weights_bounded_fraction=0.0,
            ratio_max=1.5,
            bounded_tokens=0,
            ratio_counts=(),
            lr=1e-4,
            ess_fraction=1.0,
            skipped=skipped,
            kl={"reference": Drift(k1=k1, k3=abs(k1))},
        )

    updated = Updated(
        round=3,
        version=7,
        steps=[step(False, 0.0), step(True, -0.5), step(False, 1.0)],
        skipped_steps=1,
        reference_nll_nats=None,
        kl={},
        kl_coefficient=0.0,
        responses=ResponseFigures(
            advantages=np.zeros(0), policy_log_probs=None, reference_log_probs=None
        ),
        at=0.0,
        spans=[],
    )
    columns = step_columns(updated)
    assert set(columns) == set(SCHEMAS["steps"].names)
    assert columns["round"] == [3, 3, 3]
    assert columns["step"] == [1, 2, 3]
    assert columns["version"] == [5, 6, 6]
    assert columns["kl_reference_nats"] == [0.0, -0.5, 1.0]
    assert columns["kl_reference_k3_nats"] == [0.0, 0.5, 1.0]
    assert columns["kl_behaviour_nats"] == [None, None, None]
    assert table("steps", columns).num_rows == 3


def test_no_groups_give_empty_columns():
    columns = response_columns([], 1, lambda cursor: ("", None, None), lambda ids: "")
    assert columns.keys() == set(SCHEMAS["evaluations"].names)
    assert all(values == [] for values in columns.values())


def test_lags_count_groups_at_their_first_use():
    assert first_use_lags(GROUPS, learner_round=5) == {2: 1}
    assert first_use_lags([], learner_round=5) == {}


def test_an_episode_turn_by_turn():
    """Record two actions in a row, an observation, and an action that was cut off."""
    nan = math.nan
    group = replace(
        GROUPS[0],
        response_ids=torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]),
        response_mask=torch.tensor([[1, 1, 1, 0, 1], [1, 1, 1, 0, 0]]).bool(),
        behaviour_log_probs=torch.zeros(2, 5),
        token_versions=torch.zeros(2, 5, dtype=torch.int32),
        token_rounds=torch.zeros(2, 5, dtype=torch.int32),
        turn_rewards=torch.tensor([[0.0, nan, 0.5, nan, nan], [nan, nan, 1.0, nan, nan]]),
    )
    columns = response_columns(
        [group], 1, lambda example: (str(example), None, 1), lambda ids: "-".join(map(str, ids))
    )
    assert [json.loads(turns) for turns in columns["turns"]] == [
        [
            {"action": "5", "reward": 0.0, "observation": ""},
            {"action": "6-7", "reward": 0.5, "observation": "8"},
            {"action": "9", "reward": None, "observation": ""},
        ],
        [{"action": "5-6-7", "reward": 1.0, "observation": ""}],
    ]
    assert columns["tokens"] == [4, 3]
    assert columns["response"] == ["5-6-7-8-9", "5-6-7"]


def test_version_changes_say_how_weights_reached_a_generator():
    sync = Sync(transport="shm", bytes=8, publish_s=0.5, transfer_s=0.25, load_s=0.125)
    changes = [
        VersionChange(at=10.0, role="learner", actor="learner", version=2, weights_round=1),
        VersionChange(
            at=11.0, role="generator", actor="g-0", version=2, weights_round=1, sync=sync
        ),
    ]
    columns = version_columns(changes, round_=1)
    assert columns.keys() == set(SCHEMAS["versions"].names)
    learner, generator = table("versions", columns).to_pylist()
    assert learner["transport"] is None
    assert learner["side"] == "learner"
    assert generator["bytes"] == 8
    assert generator["load_s"] == 0.125


def test_a_missing_column_is_refused():
    with pytest.raises(KeyError, match="step"):
        table("steps", {"round": [1]})
