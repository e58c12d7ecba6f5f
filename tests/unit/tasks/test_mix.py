"""A mix of tasks gives each prompt to one task, and treats each task as if it were alone.

The tests cover prompts, scores, metrics and invalid settings.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import one_token_group

from callbacks.tensorboard import LAYOUT, layout
from grpo_trainable.config import ConfigError, GRPOConfig, make_absolute, mix_of
from grpo_trainable.generator.scorer import InlineScorer, MixScorer
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.tasks import Score, ScoreRequest
from grpo_trainable.tasks.input_files import input_files, users_objects
from grpo_trainable.tasks.mix import MixTask, Mixture, PromptOrigin
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.telemetry.metrics import NAMES, names_with

TWO = {"keyword": 0.75, "two": {"name": "keyword", "weight": 0.25, "keywords_per_prompt": 2}}

weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=5).map(
    lambda found: {f"task{i}": weight for i, weight in enumerate(found)}
)


def mixed(mix: Any, **settings: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({**settings, "task": {"mix": mix, **settings.get("task", {})}})


# ---- The task of each prompt ---------------------------------------------------------------------


def test_ten_prompts_of_a_half_three_tenths_and_a_fifth_are_five_three_and_two() -> None:
    mixture = Mixture({"a": 0.5, "b": 0.3, "c": 0.2}, seed=0)
    labels = [mixture.train(i).label for i in range(40)]
    for first in range(0, 40, 10):
        assert Counter(labels[first : first + 10]) == {"a": 5, "b": 3, "c": 2}
    assert [mixture.train(i).index for i in range(40) if labels[i] == "b"] == list(range(12))


def test_weights_need_not_add_up_to_one() -> None:
    ours, theirs = Mixture({"a": 3, "b": 1}, seed=0), Mixture({"a": 0.75, "b": 0.25}, seed=0)
    assert [ours.train(i) for i in range(50)] == [theirs.train(i) for i in range(50)]


@pytest.mark.slow
@given(weights, st.integers(0, 3))
def test_every_first_prompts_hold_each_share_to_less_than_one_prompt(
    given_weights: dict[str, float], seed: int
) -> None:
    mixture, taken = Mixture(given_weights, seed), dict.fromkeys(given_weights, 0)
    total = math.fsum(given_weights.values())
    for index in range(60):
        place = mixture.train(index)
        assert place.index == taken[place.label]
        taken[place.label] += 1
        for label, weight in given_weights.items():
            assert abs(taken[label] - (index + 1) * weight / total) < 1 + 1e-9


def test_a_prompt_has_the_same_place_whoever_asks_first() -> None:
    forwards, backwards = (Mixture({"a": 1, "b": 1, "c": 1}, seed=5) for _ in range(2))
    asked = {i: backwards.train(i) for i in reversed(range(30))}
    assert [forwards.train(i) for i in range(30)] == [asked[i] for i in range(30)]


def test_the_seed_breaks_ties() -> None:
    orders = {
        tuple(Mixture({"a": 1, "b": 1}, seed).train(i).label for i in range(12))
        for seed in range(8)
    }
    assert len(orders) == 8


def test_held_out_prompts_go_round_the_tasks_whatever_their_weights() -> None:
    mixture = Mixture({"a": 9, "b": 1}, seed=0)
    assert [mixture.held_out(i) for i in range(4)] == [
        PromptOrigin("a", 0),
        PromptOrigin("b", 0),
        PromptOrigin("a", 1),
        PromptOrigin("b", 1),
    ]


# ---- Prompts and scores --------------------------------------------------------------------------


def test_examples_are_those_of_the_tasks_alone() -> None:
    config = mixed(TWO, seed=4)
    task = build_task(config)
    assert isinstance(task, MixTask)
    alone = {label: build_task(part) for label, part in config.parts.items()}
    counts = Counter()
    for index in range(40):
        label = task.label("train", index)
        assert task.train_example(index) == alone[label].train_example(counts[label])
        counts[label] += 1
    assert counts == {"keyword": 30, "two": 10}
    held_out = task.eval_examples(5)
    assert held_out[::2] == alone["keyword"].eval_examples(3)
    assert held_out[1::2] == alone["two"].eval_examples(2)


@pytest.mark.slow
def test_a_response_ends_where_any_of_the_tasks_lets_one_end() -> None:
    config = mixed({"keyword": 1, "math": 1, "boxed": {"name": "math", "weight": 1}})
    alone = build_task(config.parts["math"])
    assert build_task(config).stop == tuple(alone.stop) != ()


def test_scores_come_from_the_task_of_the_response_in_their_order() -> None:
    def worth(reward: float) -> InlineScorer:
        return InlineScorer(lambda response, truth: Score(reward, 1.0, float(len(response))))

    scorer = MixScorer({"a": worth(0.25), "b": worth(0.5)})
    asked = [ScoreRequest("x" * i, None, label) for i, label in enumerate("abba")]
    answers = scorer.score(asked)
    assert [(s.reward, s.answer_reward) for s in answers if isinstance(s, Score)] == [
        (0.25, 0),
        (0.5, 1),
        (0.5, 2),
        (0.25, 3),
    ]
    assert scorer.is_inline


def test_what_a_scorer_is_asked_names_the_task() -> None:
    config = mixed(TWO, eval={"prompts": 4})
    tokenizer = policy_tokenizer(config.model)
    prompts = Prompts(config, build_task(config), tokenizer)
    asked = [prompts.score_request("eval", i, tokenizer.encode("a story")) for i in range(4)]
    assert {request.response for request in asked} == {"a story"}
    assert [request.label for request in asked] == ["keyword", "two", "keyword", "two"]
    assert [len(request.ground_truth) for request in asked] == [1, 2, 1, 2]  # type: ignore[arg-type]


# ---- Settings ------------------------------------------------------------------------------------


def test_a_config_is_the_same_after_its_own_plain_data() -> None:
    config = mixed(TWO, task={"length_penalty": 0.01, "length_target": 20})
    assert GRPOConfig.from_dict(config.to_dict()) == config
    assert mixed(json.dumps(TWO), task={"length_penalty": 0.01, "length_target": 20}) == config
    assert config.parts["two"].task.keywords_per_prompt == 2
    assert config.parts["two"].task.length_target == 20


def test_a_mix_of_one_task_in_several_sets_has_its_defaults() -> None:
    config = mixed({"math": 1, "hard": {"name": "math", "weight": 1, "train_file": "/hard"}})
    assert config.model.preset == "arithmetic"
    assert mixed({"math": 1, "keyword": 1}).model.preset == "tiny"
    assert mixed({"math": 1}, model={"path": "/mine"}).rollout.group_size == 8
    assert [part.task.equality for part in config.parts.values()] == ["exact", "math_verify"]
    assert config.task.is_scored_apart


MISTAKES = (
    ({"keyword": 0}, "a JSON object of tasks and weights > 0"),
    ({"hard": {"name": ["math"], "weight": 1}}, "a JSON object of tasks and weights > 0"),
    ('{"keyword": 1, "keyword": 2}', "each task under a different name"),
    ({"a.py:Task": 1, "b.py:Task": 1}, "each task under a different name"),
    ({"kyword": 1}, "task.mix, kyword: task.name=kyword: must be one of"),
    ({"math": {"weight": 1, "temlate": "x"}}, "task.mix, math: task.temlate: unknown key"),
    ({"math": {"weight": 1, "match": "substring"}}, "task.mix, math: task.match=substring: has"),
    ({"math": {"weight": 1, "strict": True}}, "math: strict is the same for all tasks; set task."),
    ({"mix": 1}, "task.mix, mix: a mix cannot be part of another"),
)


def test_a_mistake_in_a_mix_is_one_line_that_names_its_task() -> None:
    for mix, told in MISTAKES:
        with pytest.raises(ConfigError) as refused:
            mixed(mix)
        assert told in str(refused.value), (mix, str(refused.value))
        assert "\n" not in str(refused.value)


REFUSED = (
    ({"task": {"name": "mix"}}, "task.name=mix: needs task.mix"),
    ({"task": {"mix": TWO, "name": "math"}}, "has no effect with task.name=math"),
    ({"task": {"mix": TWO, "reward": "a:b"}}, "task.reward=a:b: must be none with task.mix"),
    ({"task": {"mix": TWO, "match": "substring"}}, "task.match=substring: has no effect"),
    ({"task": {"mix": TWO, "strict": True}}, "task.strict=true: has no effect"),
    ({"task": {"mix": TWO}, "pools": {"enabled": True}}, "pools.enabled=true: must be false"),
    (
        {"task": {"mix": TWO}, "loss": {"advantage": "batch"}},
        "loss.advantage=batch: must not be batch with task.mix",
    ),
    ({"task": {"mix": TWO}, "eval": {"prompts": 1}}, "eval.prompts=1: must be >= 2"),
)


def test_what_a_mix_cannot_have_is_refused_by_name() -> None:
    for data, told in REFUSED:
        with pytest.raises(ConfigError) as refused:
            GRPOConfig.from_dict(data)
        assert told in str(refused.value), (data, str(refused.value))


def test_paths_and_files_of_a_mix_are_those_of_its_tasks(tmp_path: Path) -> None:
    given = {"my.py:Own": 1, "hard": {"name": "math", "weight": 2, "train_file": "hard.jsonl"}}
    data = make_absolute({"task": {"mix": given}}, tmp_path)
    entries = mix_of(data["task"]["mix"])
    assert entries["Own"] == {"name": f"{tmp_path}/my.py:Own", "weight": 1}
    assert entries["hard"]["train_file"] == f"{tmp_path}/hard.jsonl"
    config = mixed(data["task"]["mix"])
    assert users_objects(config) == {"task.mix/Own/name": f"{tmp_path}/my.py:Own"}
    files = input_files(mixed({"hard": entries["hard"], "keyword": 1}))
    assert files["task.mix/hard/train_file"] == tmp_path / "hard.jsonl"
    assert "task.mix/keyword/keywords_file" in files


# ---- Metrics -------------------------------------------------------------------------------------


def test_a_round_and_an_evaluation_are_told_by_task() -> None:
    config = mixed({"keyword": 1, "math": 1})
    by_task = ByTask(config)
    labels = [Mixture({"keyword": 1, "math": 1}, config.seed).train(i).label for i in range(4)]
    rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    groups = [one_token_group(i, rewards=rewards[i]) for i in range(4)]
    row = by_task.trained(groups, learner_round=0)
    row |= by_task.drawn(range(4))
    for label in ("keyword", "math"):
        own = [i for i in range(4) if labels[i] == label]
        mean = sum(sum(rewards[i]) for i in own) / 4
        assert row[f"task/{label}/groups"] == row[f"task/{label}/drawn"] == 2
        assert row[f"task/{label}/reward_mean"] == row[f"task/{label}/answer_mean"] == mean
        equal = sum(rewards[i][0] == rewards[i][1] for i in own) / 2
        assert row[f"task/{label}/zero_advantage_fraction"] == equal
    unjudged = [replace(group, format_rewards=torch.full((2,), torch.nan)) for group in groups]
    without_format = by_task.trained(unjudged, learner_round=0)
    assert row.keys() - without_format.keys() == {
        *("task/keyword/format_mean", "task/math/format_mean"),
        *("task/keyword/drawn", "task/math/drawn"),
    }
    first = by_task.held_out(groups[:3], [3], {})
    assert first["keyword"] == {"unscored": 0.0, "reward_mean": 0.25, "reward_first": 0.25}
    assert first["math"] == {"unscored": 1.0, "reward_mean": 1.0, "reward_first": 1.0}
    later = by_task.held_out(groups[2:], [], first)
    assert later["math"] == {"unscored": 0.0, "reward_mean": 0.5, "reward_first": 1.0}
    told = {f"eval/{label}/{name}" for label, own in later.items() for name in own}
    assert names_with(config.parts) == NAMES | row.keys() | told


def test_a_task_without_a_group_in_a_round_has_their_number_alone() -> None:
    by_task = ByTask(mixed({"keyword": 1, "math": 1}))
    assert by_task.trained([], learner_round=0) == {
        "task/keyword/groups": 0.0,
        "task/math/groups": 0.0,
    }
    assert ByTask(GRPOConfig()).trained([one_token_group(0)], 0) == {}


def test_tensorboard_has_a_chart_for_each_task() -> None:
    assert layout([]) == LAYOUT
    charts = layout(["hard"])["tasks, held-out and train"]
    assert charts == {"hard": ["eval/hard/reward_mean", "task/hard/reward_mean"]}
