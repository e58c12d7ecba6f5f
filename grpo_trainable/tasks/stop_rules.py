"""Stop strings and the interruption of responses, as a trial's settings and task define them.

`Tokenizer.end_ids_with` returns the ids that end a response.
"""

from __future__ import annotations

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Interruption
from grpo_trainable.tasks import Task
from grpo_trainable.tasks.mix import MixTask


def stop_strings(config: GRPOConfig, tokenizer: Tokenizer, task: Task | MixTask) -> tuple[str, ...]:
    """Return the strings that end a response. Special tokens are left out.

    The strings come from `rollout.stop` or, if it is unset, from the task.

    Raises:
        ValueError: If the task stops at a special token, or if the tokens of this tokenizer cannot
            be searched for strings. The message is one line.
    """
    given = config.rollout.stop
    asked = tuple(task.stop) if given is None else given
    special = [text for text in asked if text in tokenizer.special_tokens]
    if special and given is None:
        # The learner does not know the task, but it must know every token that cannot be sampled
        # before a response has reached `rollout.min_new_tokens`.
        raise ValueError(
            f"task.name={config.task.name}: asks to stop at the special token {shown(special[0])}; "
            "set this token in rollout.stop"
        )
    strings = tuple(text for text in asked if text not in special)
    if strings:
        try:
            tokenizer.token_bytes  # noqa: B018
        except ValueError as error:
            raise ValueError(
                f"rollout.stop={shown(list(strings))}: cannot be found in the tokens of this "
                f"tokenizer: {error}"
            ) from None
    return strings


def interruption(config: GRPOConfig, tokenizer: Tokenizer) -> Interruption | None:
    """Return the interruption for `rollout.overlong=interrupt`, or None for other values.

    See ScaleRL (arXiv 2510.13786).

    Raises:
        ValueError: If the interruption leaves no tokens for an answer, or if the end of the
            thinking cannot be found in the tokens of this tokenizer. The message is one line.
    """
    rollout = config.rollout
    if rollout.overlong != "interrupt":
        return None
    ids, room = tuple(tokenizer.encode_rendered(rollout.interruption)), config.overlong_buffer
    if len(ids) >= room:
        raise ValueError(
            f"rollout.overlong_buffer={room}: rollout.interruption takes {len(ids)} tokens, which "
            f"leaves none for an answer; raise rollout.overlong_buffer above {len(ids)}"
        )
    end = tokenizer.special_tokens.get(rollout.thinking_end)
    if end is None:
        _refuse_unsearchable(tokenizer, rollout.thinking_end)
    return Interruption(
        after_tokens=rollout.max_new_tokens - room,
        ids=ids,
        answer_ids=() if end is None else (end,),
        answer_strings=(rollout.thinking_end,) if end is None else (),
    )


def _refuse_unsearchable(tokenizer: Tokenizer, text: str) -> None:
    try:
        tokenizer.token_bytes  # noqa: B018
    except ValueError as error:
        raise ValueError(
            f"rollout.thinking_end={shown(text)}: cannot be found in the tokens of this tokenizer: "
            f"{error}"
        ) from None
