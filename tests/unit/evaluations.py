"""Hand-made evaluations for tests of code that reads evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.tools.evaluation.generation import Generation
from reports.evaluations.record import EvaluationRecord


def generation(
    prompt_index: int = 0, response_index: int = 0, right: float = 1.0, **values: Any
) -> Generation:
    """Return a response with reward `right` for its answer and 1 for its format."""
    fields: dict[str, Any] = {
        "prompt_index": prompt_index,
        "response_index": response_index,
        "prompt": f"Prompt {prompt_index}",
        "response": f"Response {response_index} to {prompt_index}.",
        "ground_truth": ["hen"],
        "answer": None,
        "reward": right,
        "format_reward": 1.0,
        "answer_reward": right,
        "finished": True,
        "tokens": 10,
        "log_prob": -5.0,
    }
    return Generation(**{**fields, **values})


def unscored(prompt_index: int = 0, response_index: int = 0, error: str = "it hung") -> Generation:
    rewards = dict.fromkeys(("reward", "format_reward", "answer_reward"))
    return generation(prompt_index, response_index, error=error, **rewards)


def record(generations: Sequence[Generation], **values: Any) -> EvaluationRecord:
    fields: dict[str, Any] = {
        "name": "mine",
        "policy": {
            "source": "checkpoint",
            "path": "/trial/checkpoint_000001",
            "round": 96,
            "version": 96,
            "sha256": "0123456789abcdef" * 4,
            "parameters": 1000,
        },
        "config": GRPOConfig().to_dict(),
        "generations": list(generations),
        "origin": {"created": "2026-11-22T21:00:00+0000", "command": "python launch/evaluate.py"},
    }
    return EvaluationRecord(**{**fields, **values})


def answered(rights: Sequence[Sequence[float]], **values: Any) -> EvaluationRecord:
    """Return an evaluation whose responses earned these rewards, prompt by prompt."""
    return record(
        [generation(p, r, right) for p, own in enumerate(rights) for r, right in enumerate(own)],
        **values,
    )
