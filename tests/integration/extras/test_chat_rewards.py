"""Trials on conversations, with rewards in the forms that TRL and verl document for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_reward_forms import WORDS, Expected, Row, config_of, row_of_verl, train_two_rounds

# In TRL, completions are lists of messages if prompts are. In verl, every prompt is a conversation.
REWARDS = r"""
import re

def format_reward_func(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(r"^\w+ \w", content) for content in contents]
    return [1.0 if match else 0.0 for match in matches]

def accuracy_reward(completions, solution, log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    if log_extra:
        log_extra("solution", list(solution))
    return [float(text.count(word[0])) for text, word in zip(contents, solution)]

def with_prompts(prompts, completions, **kwargs):
    return [
        len(prompt[-1]["content"]) + len(completion[-1]["content"])
        for prompt, completion in zip(prompts, completions)
        if (prompt[-1]["role"], completion[-1]["role"]) == ("user", "assistant")
    ]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str.count(ground_truth[0]) + extra_info["index"]}
"""


def row_of(index: int, word: str) -> Row:
    row = row_of_verl(index, word)
    question = row["prompt"].removesuffix("\n")
    return {**row, "prompt": [{"role": "user", "content": question}], "solution": word}


DATA = [row_of(index, word) for index, word in enumerate(WORDS)]
CASES: dict[str, Expected] = {
    "format_reward_func": lambda text, tokens, row: float(bool(re.match(r"^\w+ \w", text))),
    "accuracy_reward": lambda text, tokens, row: text.count(row["solution"][0]),
    "with_prompts": lambda text, tokens, row: len(row["prompt"][-1]["content"]) + len(text),
    "compute_score": lambda text, tokens, row: (
        text.count(row["solution"][0]) + row["extra_info"]["index"]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reward_of_conversations_trains_two_rounds(begun: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    model = {"chat_template": str(template)}
    trial = begun(config_of(f"{tmp_path / 'rewards.py'}:{name}", DATA, tmp_path, model=model))
    train_two_rounds(trial, DATA, CASES[name])
