"""One response of an evaluation, with its scores and its category."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_trainable.tasks import JSONValue

# The course's three, by what they are called in files: what format and answer earned.
CATEGORIES = {
    "correct": "format 1, answer 1",
    "wrong_answer": "format 1, answer 0",
    "wrong_format": "format 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One response to one held-out prompt. Rewards are None where it could not be scored."""

    prompt_index: int
    response_index: int  # index among the responses to the prompt
    prompt: str
    response: str
    ground_truth: JSONValue
    answer: str | None  # what the response answers; None where it, or its task, has no answer
    reward: float | None
    format_reward: float | None
    answer_reward: float | None
    finished: bool  # it ended by itself rather than by length
    tokens: int
    log_prob: float  # nats, summed over its tokens, as sampled
    error: str | None = None  # why it could not be scored

    @property
    def category(self) -> str | None:
        """A key of `CATEGORIES`; None where the rewards are not right or wrong, 1 or 0."""
        match self.format_reward, self.answer_reward:
            case 1.0, 1.0:
                return "correct"
            case 1.0, 0.0:
                return "wrong_answer"
            case 0.0, 0.0:
                return "wrong_format"
        return None
