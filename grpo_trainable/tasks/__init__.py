"""Tasks provide prompts and score responses. This package imports no torch.

`TASKS` lists the built-in tasks.
"""

from grpo_trainable.tasks.code import CodeReward, CodeTask
from grpo_trainable.tasks.games import CalculatorTask, GuessTask
from grpo_trainable.tasks.keyword import (
    KeywordTask,
    keyword_inclusion_reward_fn,
    keyword_prompt,
    split_of,
)
from grpo_trainable.tasks.math import MathTask
from grpo_trainable.tasks.math_reward import (
    MathReward,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from grpo_trainable.tasks.messages import Message, Prompt, as_messages, as_text
from grpo_trainable.tasks.reasoning_gym import ReasoningGymReward, ReasoningGymTask
from grpo_trainable.tasks.task import (
    Example,
    JSONValue,
    RewardError,
    Score,
    ScoreRequest,
    Task,
    as_score,
    eval_size,
    train_size,
)

# `task.name` -> the class that implements it.
TASKS = {
    "keyword": "grpo_trainable.tasks.keyword:KeywordTask",
    "math": "grpo_trainable.tasks.math:MathTask",
    "reasoning_gym": "grpo_trainable.tasks.reasoning_gym:ReasoningGymTask",
    "code": "grpo_trainable.tasks.code:CodeTask",
    "guess": "grpo_trainable.tasks.games:GuessTask",
    "calculator": "grpo_trainable.tasks.games:CalculatorTask",
    "control": "grpo_trainable.control.task:ControlTask",
}

# `task.name` -> the class of its reward, for tasks whose responses may be scored by separate
# processes.
REWARDS = {"math": MathReward, "reasoning_gym": ReasoningGymReward, "code": CodeReward}

__all__ = [
    "REWARDS",
    "TASKS",
    "CalculatorTask",
    "CodeTask",
    "Example",
    "GuessTask",
    "JSONValue",
    "KeywordTask",
    "MathTask",
    "Message",
    "Prompt",
    "ReasoningGymTask",
    "RewardError",
    "Score",
    "ScoreRequest",
    "Task",
    "as_messages",
    "as_score",
    "as_text",
    "eval_size",
    "keyword_inclusion_reward_fn",
    "keyword_prompt",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "split_of",
    "train_size",
]
