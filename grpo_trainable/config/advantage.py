"""The settings of critics and completions, and which advantages go with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import GAE, Config, Conflict, one_of
from grpo_trainable.config.defaults import when_read
from grpo_trainable.config.foreign_names import verl
from grpo_trainable.config.values import Settings, choice, integer, number
from grpo_trainable.plugins import is_reference

CRITIC_LR = 5.0  # times the policy's

_VINE = one_of("loss.advantage", "vine")

# Advantages that compare the responses of a group.
COMPARE_A_GROUP = (
    *("group_std", "group_mean", "rloo", "group_mean_batch_std", "maxrl"),
    "group_to_go",
)
# Losses whose ratio, or whose choice of a weight, is that of a whole response.
_OF_RESPONSES = ("gspo", "gmpo", "topr")
# Advantages of the task's own reward, and why nothing else may be taken off it.
_OF_THE_TASK = {
    "vine": "loss.advantage=vine values states by the task's reward alone",
    "maxrl": "loss.advantage=maxrl divides by the mean of rewards that are 0 and above",
}


def compares_a_group(advantage: str) -> bool:
    """Check whether an advantage learns nothing from a group of equal rewards.

    A function of the user's counts as one that compares: its name does not say.
    """
    return advantage in COMPARE_A_GROUP or is_reference(advantage)


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """How the critic of `loss.advantage=gae` is made and trained."""

    SECTION: ClassVar[str] = "critic"

    body: str = choice(
        ("own", "shared"),
        "What the critic computes values from: a copy of the starting policy that it trains for "
        "itself, or the hidden states of the policy in training.",
        read_if=GAE,
    )
    lr: float | None = number(
        None,
        "The learning rate of what only the critic uses; none: 5 times optim.lr.",
        minimum=0,
        read_if=GAE,
        default_by=when_read(("optim.lr",), lambda lr: CRITIC_LR * lr),
        also_called=(verl("critic.optim.lr"),),
    )
    coef: float = number(
        0.5,
        "The weight of the value loss, which trains the body of the policy too.",
        above=0,
        read_if=(GAE, one_of("critic.body", "shared")),
    )
    clip: float = number(
        0.2,
        "How far a value may move from the one before the round until its loss stops pulling; 0: "
        "as far as it likes.",
        minimum=0,
        read_if=GAE,
        also_called=(verl("critic.cliprange_value"),),
    )


@dataclass(frozen=True, kw_only=True)
class VineSettings(Settings):
    """How `loss.advantage=vine` values the states of a response."""

    SECTION: ClassVar[str] = "vine"

    samples: int = integer(
        4,
        "K, the completions that are sampled from each state to value it.",
        minimum=1,
        read_if=_VINE,
    )
    states: str = choice(
        ("chunks", "sentences"),
        "Which states are valued beside the prompt: one every chunk_tokens tokens, or the ends of "
        "sentences and lines that are at least as far apart.",
        read_if=_VINE,
    )
    chunk_tokens: int = integer(
        16, "Tokens between two states, which share an advantage.", minimum=1, read_if=_VINE
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other, in the order in which it is reported."""
    yield from _group_conflicts(config)
    yield from _token_conflicts(config)
    yield from _reward_conflicts(config)


def _group_conflicts(config: Config) -> Iterator[Conflict]:
    advantage, loss = config.loss.advantage, config.loss.type
    alone = config.rollout.group_size == 1

    yield (
        alone and advantage in COMPARE_A_GROUP,
        "rollout.group_size",
        f"must be >= 2 with loss.advantage={advantage}: it compares the responses of a group",
    )
    yield (
        alone and config.task.normalize_parts,
        "rollout.group_size",
        "must be >= 2 with task.normalize_parts=true: each part is compared within its group",
    )
    yield (
        alone and advantage == "batch" and config.rollout.prompts == 1,
        "rollout.prompts",
        "must be >= 2 with loss.advantage=batch and rollout.group_size=1",
    )
    yield (
        loss == "no_baseline" and advantage != "none",
        "loss.type",
        f"needs loss.advantage=none, got {advantage}",
    )
    yield (
        loss != "no_baseline" and not is_reference(loss) and advantage == "none",
        "loss.advantage",
        f"needs loss.type=no_baseline or a loss of your own, got {loss}",
    )
    yield (
        advantage == "zero" and config.loss.teacher is None,
        "loss.advantage",
        "needs loss.teacher: without one there would be nothing to learn",
    )


def _token_conflicts(config: Config) -> Iterator[Conflict]:
    advantage, loss = config.loss.advantage, config.loss.type
    of_tokens = advantage in ("gae", "vine", "group_to_go")
    tells_apart = f"loss.advantage={advantage}" if of_tokens else "loss.teacher"

    yield (
        loss == "ppo" and not of_tokens,
        "loss.type",
        f"needs loss.advantage=gae or vine, got {advantage}, with which grpo_clip is the same",
    )
    yield (
        (of_tokens or config.loss.teacher is not None) and loss in _OF_RESPONSES,
        "loss.type",
        f"takes a response as a whole, and {tells_apart} tells its tokens apart; "
        "valid: dapo, cispo, sapo, and others with a ratio for each token",
    )
    yield (
        advantage == "vine" and config.in_mid_batch,
        "weight_update",
        "must be between_batches with loss.advantage=vine: values are those of one policy",
    )
    yield (
        advantage == "vine" and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        "must be score or filter: completions of loss.advantage=vine are not interrupted, so they "
        "would value states by another law",
    )


def _reward_conflicts(config: Config) -> Iterator[Conflict]:
    why = _OF_THE_TASK.get(config.loss.advantage)
    alone = why is not None

    yield alone and config.kl_in_reward, "loss.kl_in", f"must be loss: {why}"
    yield (
        alone and config.rollout.overlong == "penalty",
        "rollout.overlong",
        f"must be score or filter: {why}",
    )
    yield alone and config.task.length_penalty > 0, "task.length_penalty", f"must be 0: {why}"
    yield (
        alone and bool(config.task.part_weights),
        "task.reward_weights",
        f"must be none: {why}",
    )
