"""A response in an evaluation, with its scores and its category."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_trainable.tasks import JSONValue

# The three categories of the course CSE 599-O: name in output files -> format reward and answer
# reward. If the reward does not judge the format, only the first two categories occur.
CATEGORIES = {
    "correct": "format 1, answer 1",
    "wrong_answer": "format 1, answer 0",
    "wrong_format": "format 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One response to one held-out prompt. Rewards are None if the response was not scored.

    The format reward is also None if the reward does not judge the format.
    """

    prompt_index: int
    response_index: int  # index among the responses to the prompt
    prompt: str
    response: str
    ground_truth: JSONValue
    answer: str | None  # answer in the response; None if the response or the task has none
    reward: float | None
    format_reward: float | None
    answer_reward: float | None
    finished: bool  # False if the token limit cut the response off
    tokens: int
    log_prob: float  # sum of the tokens' log-probabilities, in nats, as recorded by the sampler
    error: str | None = None  # the reason why the response could not be scored

    @property
    def category(self) -> str | None:
        """Return a key of `CATEGORIES`, or None if the rewards fit no category."""
        match self.format_reward, self.answer_reward:
            case ((1.0 | None), 1.0):
                return "correct"
            case ((1.0 | None), 0.0):
                return "wrong_answer"
            case 0.0, 0.0:
                return "wrong_format"
        return None
