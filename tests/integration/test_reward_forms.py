"""Trials whose rewards are written in the forms of this package, TRL and verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest
from conftest import trial_config

from grpo_trainable.protocol.round_records import SCHEMAS, details_of
from grpo_trainable.tasks import as_messages, keyword_prompt

WORDS = ("apple", "pear", "stone", "river", "cloud", "horse", "lamp", "tower")

# Reward functions in the forms that each project documents. TRL documents them in the section
# "Using a custom reward function" of grpo_trainer.md and with the rewards in `trl.rewards`. verl
# documents them in reward_function.rst and reward_loop.rst.
REWARDS = """
import asyncio

def score(response, ground_truth):
    return len(response) / len(ground_truth["word"])

# ---- TRL ----

def count_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def count_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]

def with_a_column_in_kwargs(completions, **kwargs):
    return [len(text) + level for text, level in zip(completions, kwargs["level"])]

def share_of_prompt(prompts, completions, answer, **kwargs):
    return [
        len(text) / len(prompt) + own["length"]
        for prompt, text, own in zip(prompts, completions, answer)
    ]

def with_reference(completions, ground_truth, **kwargs):
    return [float(text.count(word[0])) for text, word in zip(completions, ground_truth)]

def of_stories(prompts, completions, task, **kwargs):
    return [
        len(text) / len(prompt) if own == "story" else None
        for prompt, text, own in zip(prompts, completions, task)
    ]

def of_poems(prompts, completions, task, **kwargs):
    return [-float(len(text)) if own == "poem" else None for text, own in zip(completions, task)]

of_every_task = [of_stories, of_poems]

async def waits(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [1.0 if text else 0.0 for text in completions]

def with_logs(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    rewards = [1.0 if word in text else 0.0 for text, word in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards

class Penalty:
    def __init__(self, length):
        self.length = length

    def __call__(self, completion_ids, **kwargs):
        return [-1.0 if len(ids) > self.length else 0.0 for ids in completion_ids]

penalty = Penalty(11)

# ---- verl ----

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100

def with_every_argument(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    about_data = extra_info["index"] + (data_source == "stories")
    return solution_str.count(ground_truth[0]) + about_data

def in_a_dict(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 100, "acc": ground_truth in solution_str}

async def waits_for_a_service(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return {"score": len(solution_str) + extra_info["index"]}

# ---- Several ----

several = [count_characters, waits, penalty, compute_score]
"""


def row_of_trl(index: int, word: str) -> dict[str, Any]:
    return {
        "prompt": keyword_prompt([word]),
        "answer": {"word": word, "length": len(word)},
        "ground_truth": word,
        "task": ("story", "poem")[index % 2],
        "level": index,
    }


def row_of_verl(index: int, word: str) -> dict[str, Any]:
    return {
        "data_source": "stories",
        "prompt": keyword_prompt([word]),
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": word},
        "extra_info": {"split": "train", "index": index},
    }


TRL = [row_of_trl(index, word) for index, word in enumerate(WORDS)]
VERL = [row_of_verl(index, word) for index, word in enumerate(WORDS)]

Row = dict[str, Any]
# Returns the expected reward of a response from its text, its number of tokens and its data row.
Expected = Callable[[str, int, Row], float]

OF_TRL: dict[str, Expected] = {
    "score": lambda text, tokens, row: len(text) / row["answer"]["length"],
    "count_tokens": lambda text, tokens, row: tokens,
    "count_characters": lambda text, tokens, row: len(text),
    "with_a_column_in_kwargs": lambda text, tokens, row: len(text) + row["level"],
    "share_of_prompt": lambda text, tokens, row: (
        len(text) / len(row["prompt"]) + row["answer"]["length"]
    ),
    "with_reference": lambda text, tokens, row: text.count(row["ground_truth"][0]),
    "of_every_task": lambda text, tokens, row: (
        len(text) / len(row["prompt"]) if row["task"] == "story" else -len(text)
    ),
    "waits": lambda text, tokens, row: float(bool(text)),
    "with_logs": lambda text, tokens, row: float(row["ground_truth"] in text),
    "penalty": lambda text, tokens, row: -float(tokens > 11),
}
OF_VERL: dict[str, Expected] = {
    "compute_score": lambda text, tokens, row: len(text) / 100,
    "with_every_argument": lambda text, tokens, row: (
        text.count(row["reward_model"]["ground_truth"][0]) + row["extra_info"]["index"] + 1
    ),
    "in_a_dict": lambda text, tokens, row: len(text) / 100,
    "waits_for_a_service": lambda text, tokens, row: len(text) + row["extra_info"]["index"],
}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


def config_of(reward: str, data: Sequence[Row], directory: Path, **values: Any) -> dict[str, Any]:
    """Return the config of a trial of two rounds on `data`, which is written to `directory`."""
    path = directory / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in data))
    task = {"train_file": str(path), "eval_file": str(path), "reward": reward}
    task.update(values.pop("task", {}))
    return trial_config(placement="colocated", rounds=2, task=task, **values)


def rollouts(row: Row) -> list[Row]:
    """Return the sampled responses of a round."""
    details = details_of(row)
    assert details is not None
    return pa.Table.from_pydict(details.rollouts, SCHEMAS["rollouts"]).to_pylist()


def row_of(prompt: str, data: Sequence[Row]) -> Row:
    """Return the data row of a prompt, even if a chat template has rendered the prompt."""
    (row,) = [row for row in data if as_messages(row["prompt"])[-1]["content"] in prompt]
    return row


def train_two_rounds(
    trial: Any, data: Sequence[Row], expected: Expected, atol: float = 1e-12
) -> dict[str, Any]:
    """Train for two rounds, and check that every response has the expected reward.

    Returns:
        The row of the second round.
    """
    row: dict[str, Any] = {}
    for round_ in (1, 2):
        row = trial.train()
        sampled = rollouts(row)
        assert len(sampled) == 16
        for own in sampled:
            wanted = expected(own["response"], own["tokens"], row_of(own["prompt"], data))
            assert own["reward"] == pytest.approx(wanted, rel=1e-6, abs=atol)
        assert (row["count/reward_errors"], row["count/dropped_reward"]) == (0, 0)
        assert trial.trial.rounds_trained == round_
    assert row["done"]
    return row


@pytest.mark.parametrize("name", OF_TRL)
def test_a_reward_in_the_form_of_this_package_or_trl_trains_two_rounds(
    begun: Any, rewards: Path, tmp_path: Path, name: str
) -> None:
    trial = begun(config_of(f"{rewards}:{name}", TRL, tmp_path))
    train_two_rounds(trial, TRL, OF_TRL[name])


@pytest.mark.parametrize("name", OF_VERL)
def test_a_reward_in_the_form_of_verl_trains_two_rounds(
    begun: Any, rewards: Path, tmp_path: Path, name: str
) -> None:
    trial = begun(config_of(f"{rewards}:{name}", VERL, tmp_path))
    train_two_rounds(trial, VERL, OF_VERL[name])


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (0.5, 2, 3, -1)])
def test_several_rewards_of_different_forms_are_summed_with_their_weights(
    begun: Any, rewards: Path, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    names = ("count_characters", "waits", "Penalty", "compute_score")
    given = json.dumps(dict(zip(names, weights, strict=True)))
    task = {} if set(weights) == {1} else {"reward_weights": given}

    def expected(text: str, tokens: int, row: Row) -> float:
        parts = (len(text), bool(text), -(tokens > 11), len(text) / 100)
        return sum(weight * part for weight, part in zip(weights, parts, strict=True))

    trial = begun(config_of(f"{rewards}:several", TRL, tmp_path, task=task))
    row = train_two_rounds(trial, TRL, expected)
    kept = [json.loads(own["parts"]) for own in rollouts(row)]
    for name in names:
        assert row[f"part/{name}_mean"] == pytest.approx(fmean(parts[name] for parts in kept))
        assert f"eval_part/{name}_mean" in row


def test_groups_without_a_reward_are_left_out_and_are_no_errors(
    begun: Any, rewards: Path, tmp_path: Path
) -> None:
    task = {"max_error_rate": 0.0}
    trial = begun(config_of(f"{rewards}:of_stories", TRL, tmp_path, task=task))
    row = trial.train()
    sampled = rollouts(row)
    assert sampled
    assert all(row_of(own["prompt"], TRL)["task"] == "story" for own in sampled)
    assert row["count/reward_errors"] == 0
    assert row["count/dropped_reward"] > 0
    assert len(sampled) / 4 + row["count/dropped_reward"] == 4
