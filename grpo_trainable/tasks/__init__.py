"""Tasks: text in, score out. `TASKS` holds the built-in ones. Imports no torch."""

from grpo_trainable.tasks.base import (
    Example,
    JSONValue,
    RewardError,
    Score,
    ScoreRequest,
    Task,
    as_score,
    eval_size,
)
from grpo_trainable.tasks.keyword import (
    KeywordTask,
    keyword_inclusion_reward_fn,
    keyword_prompt,
    split_of,
)

TASKS = {"keyword": KeywordTask}

__all__ = [
    "TASKS",
    "Example",
    "JSONValue",
    "KeywordTask",
    "RewardError",
    "Score",
    "ScoreRequest",
    "Task",
    "as_score",
    "eval_size",
    "keyword_inclusion_reward_fn",
    "keyword_prompt",
    "split_of",
]
