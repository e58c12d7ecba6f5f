"""Tasks: text in, score out. `TASKS` holds the built-in ones. Imports no torch."""

from grpo_trainable.tasks.base import (
    Example,
    JSONValue,
    RewardError,
    Score,
    ScoreRequest,
    Task,
    as_score,
)
from grpo_trainable.tasks.keyword import (
    KeywordTask,
    keyword_inclusion_reward_fn,
    keyword_prompt,
    split_of,
)
from grpo_trainable.tasks.messages import Message, Prompt, as_messages, as_text

TASKS = {"keyword": KeywordTask}

__all__ = [
    "TASKS",
    "Example",
    "JSONValue",
    "KeywordTask",
    "Message",
    "Prompt",
    "RewardError",
    "Score",
    "ScoreRequest",
    "Task",
    "as_messages",
    "as_score",
    "as_text",
    "keyword_inclusion_reward_fn",
    "keyword_prompt",
    "split_of",
]
