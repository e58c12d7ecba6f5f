"""The limit on failed rewards in a trial."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.calls import ActorFailed, FailsAgain
from grpo_trainable.protocol.messages import FailedPrompt

# Minimum number of prompts for judging the share of failed rewards. A few failures among few
# responses say little about the error rate.
JUDGED_PROMPTS = 32


def what_scores(config: GRPOConfig) -> str:
    """Return the source of a trial's rewards, for messages about failed rewards."""
    acts = config.env.plays or config.model.env is not None
    return "the environment" if acts else "the reward function"


def refuse_reward_errors(
    config: GRPOConfig, told: str, errors: int, responses: int, failed: Sequence[FailedPrompt]
) -> None:
    """End the trial if more rewards failed than its task allows.

    Args:
        config: The trial's settings.
        told: The start of the message, with the number of failed rewards and the number of
            responses.
        errors: Number of responses on which the reward function failed.
        responses: Number of responses by which `errors` is divided. It is at least the number of
            responses to `JUDGED_PROMPTS` prompts.
        failed: Prompts that could not be scored since the last check.

    Raises:
        ActorFailed: The limit is exceeded. The message names the limit and the first failed prompt.
            The error is `FailsAgain` if a retry would not help.
    """
    task = config.task
    failed = [prompt for prompt in failed if prompt.is_failure]
    if not failed:
        return
    if task.strict:
        limit = "task.strict allows none"
    elif errors > task.max_error_rate * responses:
        limit = f"task.max_error_rate={task.max_error_rate:g}"
    else:
        return
    example = f"for example on prompt {failed[0].prompt_index}: {failed[0].reason}"
    raise error_for(failed)(f"{told} ({limit}); {example}")


def error_for(failed: Sequence[FailedPrompt]) -> type[ActorFailed]:
    """Return the class of the error that ends a trial because these prompts failed."""
    again = all(prompt.repeats or not prompt.is_failure for prompt in failed)
    return FailsAgain if again else ActorFailed
