"""The value of `task.reward`: one reward, or a JSON list of several rewards.

A reward is a function (`module:function` or `file.py:function`), or a kind and a path, such as
`model:DIRECTORY`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_trainable.plugins import is_reference

FUNCTION, JUDGE, MODEL = "function", "judge", "model"
# Kind of a reward that is read from a path -> placeholder for the path in messages.
PATHS = {MODEL: "DIRECTORY", JUDGE: "FILE"}
FORMS = ("module:function", "file.py:function", *(f"{kind}:{PATHS[kind]}" for kind in PATHS))
EXPECTED = f"{', '.join(FORMS)}, or a JSON list of these forms"


class Reward(NamedTuple):
    """One reward."""

    kind: str  # "function", or a key of `PATHS`
    source: str  # the reference to the function, or the path

    @property
    def text(self) -> str:
        """The reward, as written in `task.reward`."""
        return self.source if self.kind == FUNCTION else f"{self.kind}:{self.source}"


def parse_reward(text: str) -> Reward:
    """Split one reward into its kind and its source. A kind is never read as a module's name."""
    prefix, _, path = text.partition(":")
    return Reward(prefix, path) if prefix in PATHS else Reward(FUNCTION, text)


def rewards_of(value: Any) -> list[Reward]:
    """Return the rewards that a value of `task.reward` names, in order. For None, return [].

    Args:
        value: One reward, a JSON list of rewards, or the equivalent list.

    Raises:
        TypeError: The value is neither text nor a list of texts.
        ValueError: The JSON is invalid, the list is empty, or a reward has no accepted form.
    """
    if value is None:
        return []
    listed = value
    if isinstance(value, str):
        listed = _parsed(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise TypeError
    rewards = [parse_reward(one) for one in listed]
    if not rewards or not all(map(_is_valid, rewards)):
        raise ValueError
    return rewards


def rewards_text(rewards: list[Reward]) -> str:
    """Return the text of `task.reward` that names these rewards."""
    texts = [reward.text for reward in rewards]
    return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)


def must_be_named(value: Any) -> list[str]:
    """Return the rewards, among those in `task.reward`, that a checkpoint alone must not choose.

    A checkpoint may be untrusted. These rewards run a function of a Python file or module, or send
    responses and an API key to a service.
    """
    return [one.source for one in rewards_of(value) if one.kind in (FUNCTION, JUDGE)]


def models_in(value: Any) -> list[str]:
    """Return the directories of reward models in a value of `task.reward`."""
    return [reward.source for reward in rewards_of(value) if reward.kind == MODEL]


def with_absolute_sources(
    value: Any, of_function: Callable[[str], str], of_path: Callable[[str], str]
) -> Any:
    """Return the value of `task.reward` with absolute paths.

    An invalid value is returned unchanged. It is rejected later, when `task.reward` is checked.

    Args:
        value: A value in a form that `rewards_of` accepts.
        of_function: Function that takes a reference to a function and makes its file path absolute.
        of_path: Function that makes a path absolute.
    """
    try:
        rewards = rewards_of(value)
    except (TypeError, ValueError):
        return value
    return rewards_text(
        [
            reward._replace(
                source=(of_function if reward.kind == FUNCTION else of_path)(reward.source)
            )
            for reward in rewards
        ]
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError from None


def _is_valid(reward: Reward) -> bool:
    if reward.kind == FUNCTION:
        return is_reference(reward.source)
    return bool(reward.source.strip()) and "\0" not in reward.source
