"""How many failed rewards a trial bears."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.calls import ActorFailed

# Failed rewards are judged as a share of the responses to at least so many prompts: a few failures
# among few responses say nothing of the rate.
JUDGED_PROMPTS = 32


def what_scores(config: GRPOConfig) -> str:
    """Return what gives the rewards of a trial, for messages about rewards that failed."""
    acts = config.env.plays or config.model.env is not None
    return "the environment" if acts else "the reward function"


def refuse_reward_errors(
    config: GRPOConfig, told: str, errors: int, responses: int, failed: Sequence[tuple[int, str]]
) -> None:
    """Ends the trial where more rewards failed than its task allows.

    Args:
        told: how many failed on what, for the message.
        errors: responses on which the reward function failed, of `responses`, which are those to
            `JUDGED_PROMPTS` prompts at least.
        failed: the prompts that are new among them, each with the reason.

    Raises:
        ActorFailed: the limit is exceeded; names it, and the first of the prompts.
    """
    task = config.task
    if not failed:
        return
    if task.strict:
        limit = "task.strict allows none"
    elif errors > task.max_error_rate * responses:
        limit = f"task.max_error_rate={task.max_error_rate:g}"
    else:
        return
    index, reason = failed[0]
    raise ActorFailed(f"{told} ({limit}); last on prompt {index}: {reason}")
