"""Trials whose rewards are written in the forms of this package, TRL and verl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import trial_config

from grpo_trainable.protocol.round_records import DETAILS, SCHEMAS
from grpo_trainable.tasks import keyword_prompt

WORDS = ("apple", "pear", "stone", "river", "cloud", "horse", "lamp", "tower")

# Functions with the parameters and the results that the documentation of each project shows.
REWARDS = """
import asyncio

def score(response, ground_truth):
    return float(len(response)) / len(ground_truth["word"])

def count_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def share_of_prompt(prompts, completions, answer, **kwargs):
    return [
        len(completion) / len(prompt) + own["length"]
        for prompt, completion, own in zip(prompts, completions, answer)
    ]

def count_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def with_logs(completions, level, log_extra=None, log_metric=None, **kwargs):
    if log_extra:
        log_extra("level", list(level))
    if log_metric:
        log_metric("mean", sum(map(len, completions)) / len(completions))
    return [None if own is None else float(own) for own in level]

async def waits(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [1.0 if completion else 0.0 for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100 + extra_info["index"] + (data_source == "stories")

def in_a_dict(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 100, "acc": ground_truth["word"] in solution_str}

reward_funcs = [count_characters, with_logs, compute_score]
"""


def row_of(index: int, word: str) -> dict[str, Any]:
    return {
        "prompt": keyword_prompt([word]),
        "answer": {"word": word, "length": len(word)},
        "level": index % 2 or None,
        "data_source": "stories",
        "extra_info": {"index": index},
    }


DATA = [row_of(index, word) for index, word in enumerate(WORDS)]

# A function of a response, its number of tokens and its row in the data.
Expected = Callable[[str, int, dict[str, Any]], float]


def summed(text: str, tokens: int, row: dict[str, Any]) -> float:
    return 0.5 * len(text) + 2 * (row["level"] or 0) + verls(text, tokens, row)


def verls(text: str, tokens: int, row: dict[str, Any]) -> float:
    return len(text) / 100 + row["extra_info"]["index"] + 1


CASES: dict[str, tuple[Expected, dict[str, Any]]] = {
    "score": (lambda text, tokens, row: len(text) / row["answer"]["length"], {}),
    "count_characters": (lambda text, tokens, row: len(text), {}),
    "share_of_prompt": (
        lambda text, tokens, row: len(text) / len(row["prompt"]) + row["answer"]["length"],
        {},
    ),
    "count_tokens": (lambda text, tokens, row: tokens, {}),
    "waits": (lambda text, tokens, row: float(bool(text)), {}),
    "compute_score": (verls, {}),
    "in_a_dict": (lambda text, tokens, row: len(text) / 100, {}),
    "reward_funcs": (
        summed,
        {"reward_weights": '{"count_characters": 0.5, "with_logs": 2, "compute_score": 1}'},
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tmp_path_factory.mktemp("files")
    (files / "rewards.py").write_text(REWARDS)
    (files / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in DATA))
    return files


def config_of(files: Path, name: str, **task: Any) -> dict[str, Any]:
    data = str(files / "data.jsonl")
    own = {"train_file": data, "eval_file": data, "reward": f"{files / 'rewards.py'}:{name}"}
    return trial_config(placement="colocated", rounds=2, task={**own, **task})


@pytest.mark.parametrize("name", CASES)
def test_a_reward_of_every_form_trains_two_rounds(begun: Any, files: Path, name: str) -> None:
    expected, task = CASES[name]
    trial = begun(config_of(files, name, **task))
    of_prompt = {row["prompt"]: row for row in DATA}
    for round_ in (1, 2):
        row = trial.step()
        table = pa.Table.from_pydict(row[DETAILS].rollouts, SCHEMAS["rollouts"]).to_pylist()
        assert len(table) == 16
        for own in table:
            wanted = expected(own["response"], own["tokens"], of_prompt[own["prompt"]])
            assert own["reward"] == pytest.approx(wanted, rel=1e-6)
        assert (row["training_iteration"], row["count/reward_errors"]) == (round_, 0)
        assert row["count/dropped_reward"] == 0
    assert row["done"]


def test_groups_without_a_reward_are_left_out_and_are_no_errors(begun: Any, files: Path) -> None:
    trial = begun(config_of(files, "with_logs", max_error_rate=0.0))
    row = trial.step()
    table = pa.Table.from_pydict(row[DETAILS].rollouts, SCHEMAS["rollouts"]).to_pylist()
    levels = {own["prompt"]: own["level"] for own in DATA}
    assert all(levels[own["prompt"]] == 1 and own["reward"] == 1 for own in table)
    assert row["count/reward_errors"] == 0
    assert len(table) / 4 + row["count/dropped_reward"] == 4
