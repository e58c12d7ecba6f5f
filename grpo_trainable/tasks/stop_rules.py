"""Which strings end a response, and what interrupts it: by a trial's settings and task.

The ids that end it are the tokenizer's (`Tokenizer.end_ids_with`).
"""

from __future__ import annotations

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Interruption
from grpo_trainable.tasks import Task
from grpo_trainable.tasks.mix import MixTask


def stop_strings(config: GRPOConfig, tokenizer: Tokenizer, task: Task | MixTask) -> tuple[str, ...]:
    """The strings of `rollout.stop` that are no special token; where it is none, those of the task.

    Raises:
        ValueError: the task asks for a special token, or the tokenizer is of a kind whose tokens
            cannot be searched; in one line.
    """
    given = config.rollout.stop
    asked = tuple(task.stop) if given is None else given
    special = [text for text in asked if text in tokenizer.special_tokens]
    if special and given is None:
        # The learner, which knows no task, must know every token that cannot come early.
        raise ValueError(
            f"task.name={config.task.name}: asks to stop at the special token {shown(special[0])}; "
            "set it as rollout.stop"
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
    """That of `rollout.overlong=interrupt` (ScaleRL, arXiv 2510.13786), in terms of a tokenizer;
    None with other values.

    Raises:
        ValueError: the text leaves no room for an answer, or what ends the thinking cannot be found
            in tokens of this tokenizer; in one line.
    """
    rollout = config.rollout
    if rollout.overlong != "interrupt":
        return None
    ids, room = tuple(tokenizer.encode_rendered(rollout.interruption)), config.overlong_buffer
    if len(ids) >= room:
        raise ValueError(
            f"rollout.overlong_buffer={room}: rollout.interruption takes {len(ids)} tokens, which "
            f"leaves none for an answer; must be above {len(ids)}"
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
