"""Differences between two evaluations besides their policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from evaluations import answered, generation, record

from grpo_trainable.config import GRPOConfig
from reports.evaluations.changes import changes, takes_part
from reports.evaluations.page import render_page
from reports.evaluations.pairs import differences
from reports.evaluations.record import EvaluationRecord
from reports.evaluations.summary import console_lines


def evaluated(
    settings: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None
) -> EvaluationRecord:
    config = json.loads(json.dumps(GRPOConfig.from_dict(settings or {}).to_dict()))
    return answered([[1], [0]], name="mine", config=config, origin={"files": files or {}})


def with_task(files: Mapping[str, str] | None = None, **task: Any) -> EvaluationRecord:
    """Return an evaluation with task settings that no code has checked."""
    own = evaluated(files=files)
    return record(own.generations, config={"task": task}, origin=own.origin)


def test_the_policy_the_seed_and_the_choice_of_prompts_do_not_count():
    other = {"model": {"preset": "small"}, "seed": 1, "eval": {"prompts": 8, "samples": 1}}
    own = evaluated()
    assert changes(own, evaluated(other)) == []
    assert "note" not in "\n".join(console_lines(own, own, differences(own, own)))


def test_settings_for_sampling_and_scoring_are_named_on_the_console_and_on_the_page():
    own = evaluated(
        {
            "task": {"reward_weights": {"answer": 2.0}},
            "rollout": {"max_new_tokens": 12, "temperature": 0.5},  # the latter is for training
            "eval": {"temperature": 0.3},
        }
    )
    plain = evaluated()
    assert changes(own, plain) == [
        "eval.temperature=0.3 (the other: 0.8)",
        "rollout.max_new_tokens=12 (the other: 60)",
        'task.reward_weights={"answer": 2.0} (the other: none)',
    ]
    lines = list(console_lines(own, plain, differences(own, plain)))
    heading = next(i for i, line in enumerate(lines) if line.startswith("compared with mine"))
    assert lines[heading + 1].startswith("note: the policies are not all that differs")
    assert "eval.temperature=0.3 (the other: 0.8)" in render_page(own, plain, [])


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ('{"answer": 1, "format": 2}', '{"format":2.0,"answer":1.0}'),
        (None, None),
    ],
)
def test_equal_json_is_no_change(own, other):
    assert changes(with_task(reward_weights=own), with_task(reward_weights=other)) == []


def test_files_that_have_changed_or_moved_are_named():
    before = with_task({"task.reward": "a"}, reward="/old/rewards.py:score")
    moved = with_task({"task.reward": "a"}, reward="/new/copy.py:score")
    assert changes(moved, before) == [
        "task.reward=/new/copy.py:score (the other: /old/rewards.py:score; the files are equal)"
    ]
    edited = with_task({"task.reward": "b"}, reward="/old/rewards.py:score")
    assert changes(edited, before) == ["task.reward (its file has changed)"]
    both = with_task({"task.reward": "b"}, reward="/new/copy.py:score")
    assert changes(both, before) == [
        "task.reward=/new/copy.py:score (the other: /old/rewards.py:score; the files differ)"
    ]
    another = with_task({"task.reward": "a"}, reward="/old/rewards.py:other")
    assert len(changes(another, before)) == 1


def test_a_list_of_rewards_is_named_once():
    files = {"task.reward/1": "a", "task.reward/2/model.safetensors": "b"}
    before = with_task(files, reward='["/x/r.py:f", "model:/x/m"]')
    retrained = with_task(
        files | {"task.reward/2/model.safetensors": "c"}, reward=before.config["task"]["reward"]
    )
    assert changes(retrained, before) == ["task.reward/2/model.safetensors (its file has changed)"]
    other = with_task(files | {"task.reward/1": "c"}, reward='["/z/s.py:g", "model:/x/m"]')
    (line,) = changes(other, before)
    assert line.startswith("task.reward=")


def test_the_weights_and_the_training_files_of_a_mix_do_not_count():
    def mixed(**easy: Any) -> EvaluationRecord:
        return with_task(mix=json.dumps({"easy": {"name": "keyword", **easy}}))

    before = mixed(weight=1, train_file="a.jsonl")
    assert changes(mixed(weight=2, train_file="b.jsonl"), before) == []
    assert changes(with_task(mix='{"hard": {"name": "keyword"}}'), before) == [
        "task.mix=hard (the other: easy)"
    ]


def test_settings_that_only_one_mix_gives_are_compared_with_their_defaults():
    def mixed(files: Mapping[str, str] | None = None, **easy: Any) -> EvaluationRecord:
        return with_task(files, mix=json.dumps({"easy": {"name": "keyword", **easy}}))

    usual, other = mixed(), mixed(match="substring", reward="/x/r.py:f")
    assert changes(other, usual) == [
        "task.mix/easy/match=substring (the other: word)",
        "task.mix/easy/reward=/x/r.py:f (the other: none)",
    ]
    assert len(changes(usual, other)) == 2
    assert changes(mixed(match="word"), usual) == []


def test_a_file_that_both_mixes_name_is_compared_even_if_their_labels_differ():
    files = {"task.mix/easy/reward": "a"}
    easy = {"name": "keyword", "reward": "/x/r.py:f"}
    two = with_task(files, mix=json.dumps({"easy": easy, "hard": {"name": "math"}}))
    one = with_task({"task.mix/easy/reward": "b"}, mix=json.dumps({"easy": easy}))
    assert changes(two, one) == [
        "task.mix=easy, hard (the other: easy)",
        "task.mix/easy/reward (its file has changed)",
    ]
    alone = with_task()
    assert changes(two, alone) == ["task.mix=easy, hard (the other: none)"]


def test_long_and_hostile_values_are_shown_in_full_and_visibly():
    start = '["/home/alice/experiments/2026/rewards/correct.py:exact", "/home/alice/length.py:'
    (line,) = changes(with_task(reward=f'{start}a"]'), with_task(reward=f'{start}b"]'))
    assert line == f'task.reward={start}a"] (the other: {start}b"])'
    (line,) = changes(with_task(reward="a"), with_task(reward=["\ud800\x9b31m\n"]))
    assert line.isascii()
    assert line.isprintable()


def test_true_answers_of_the_same_prompt_are_compared():
    own = record([generation(0), generation(1, ground_truth=["cat"])])
    other = record([generation(0), generation(1, ground_truth=["dog"])])
    assert changes(own, other) == ["the true answers of 1 prompt"]


def test_true_answers_are_compared_as_they_are_stored():
    truth = {2: "a", 10: "b", "x": None}
    own = record([generation(0, ground_truth=truth)])
    other = record([generation(0, ground_truth=json.loads(json.dumps(truth)))])
    assert changes(own, other) == []
    # A repeated prompt with one of its answers.
    several = record([generation(0, ground_truth={"number": n}) for n in (1, 2)])
    assert changes(several, record([generation(0, ground_truth={"number": 2})])) == []
    moved = record([generation(0, ground_truth={"number": n}) for n in (2, 3)])
    assert changes(several, moved) == ["the true answers of 1 prompt"]


def test_an_evaluation_of_an_earlier_version_may_lack_settings_and_files():
    old = evaluated()
    del old.config["eval"]["top_p"], old.origin["files"]
    assert changes(evaluated({"eval": {"top_p": 0.5}}, {"task.reward": "a"}), old) == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("task.reward", True),
        ("task.reward/2/model.safetensors", True),
        ("task.template", True),
        ("task.mix/easy/reward/1", True),
        ("task.mix", True),
        ("task.eval_file", False),
        ("task.mix/easy/train_file", False),
        ("task.train_file/part-0.parquet", False),
        ("model.path/model.safetensors", False),
        ("loss.name", False),
    ],
)
def test_files_of_the_policy_the_prompts_and_training_take_no_part(key, expected):
    assert takes_part(key) is expected
