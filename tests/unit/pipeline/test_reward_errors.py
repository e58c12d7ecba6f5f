"""The limit on failed rewards: when it ends a trial, and when a retry would not help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.reward_errors import refuse_reward_errors
from grpo_trainable.protocol.calls import ActorFailed, FailsAgain
from grpo_trainable.protocol.messages import FailedPrompt

PASSING = FailedPrompt(1, "no reward within 10 s", 8)
LASTING = FailedPrompt(2, "KeyError: 'a'", 8, repeats=True)
LEFT_OUT = FailedPrompt(0, "the reward function returned None", 8, is_failure=False)


def refuse(failed: Sequence[FailedPrompt], errors: int = 100, **task: Any) -> None:
    config = GRPOConfig.from_dict({"task": {"reward": "mine:score", **task}})
    refuse_reward_errors(config, "told", errors, 100, failed)


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        ([LASTING], FailsAgain),
        ([LEFT_OUT, LASTING, LASTING], FailsAgain),
        ([PASSING], ActorFailed),
        ([LASTING, PASSING], ActorFailed),
    ],
)
def test_a_trial_ends_for_good_if_every_failure_would_repeat(failed, kind):
    with pytest.raises(ActorFailed) as caught:
        refuse(failed)
    assert type(caught.value) is kind
    example = next(prompt for prompt in failed if prompt.is_failure)
    assert str(caught.value) == (
        f"told (task.max_error_rate=0.1); for example on prompt {example.prompt_index}: "
        f"{example.reason}"
    )


def test_rewards_left_out_on_purpose_never_end_a_trial():
    refuse([LEFT_OUT])
    refuse([LEFT_OUT], errors=0, strict=True)
    refuse([], errors=100)
    refuse([LASTING], errors=10)
    with pytest.raises(FailsAgain, match=r"task\.strict allows none"):
        refuse([LASTING], errors=1, strict=True)
