"""The `critic` and `vine` sections, and the conflicts between advantages and other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import GAE, Config, Conflict, one_of
from grpo_trainable.config.defaults import when_read
from grpo_trainable.config.foreign_names import verl
from grpo_trainable.config.values import Settings, choice, integer, number
from grpo_trainable.plugins import is_reference

CRITIC_LR = 5.0  # default of critic.lr, as a multiple of the policy's learning rate

_VINE = one_of("loss.advantage", "vine")

# Advantages that compare the responses of a group.
COMPARE_A_GROUP = (
    *("group_std", "group_mean", "rloo", "group_mean_batch_std", "maxrl"),
    "group_to_go",
)
# Losses with one ratio or weight per response.
_OF_RESPONSES = ("gspo", "gmpo", "topr")
# Advantages that need the task's own reward, each with the reason why nothing may be subtracted
# from that reward.
_OF_THE_TASK = {
    "vine": "loss.advantage=vine estimates the value of a state from the task's reward alone",
    "maxrl": "loss.advantage=maxrl divides by the mean reward, so no reward may be negative",
}


def compares_a_group(advantage: str) -> bool:
    """Return True if this advantage learns nothing from a group whose rewards are all equal.

    A user's function is assumed to compare responses, because its name does not show whether it
    does.
    """
    return advantage in COMPARE_A_GROUP or is_reference(advantage)


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """Critic for `loss.advantage=gae`, and its training."""

    SECTION: ClassVar[str] = "critic"

    body: str = choice(
        ("own", "shared"),
        "Network that computes the critic's values: a separate network, initialised as a copy of "
        "the starting policy (own), or a value head on the hidden states of the policy in training "
        "(shared).",
        read_if=GAE,
    )
    lr: float | None = number(
        None,
        "Learning rate of the weights that only the critic uses. `none` means 5 times optim.lr.",
        minimum=0,
        read_if=GAE,
        default_by=when_read(("optim.lr",), lambda lr: CRITIC_LR * lr),
        also_called=(verl("critic.optim.lr"),),
    )
    coef: float = number(
        0.5,
        "Weight of the value loss, which also trains the body of the policy.",
        above=0,
        read_if=(GAE, one_of("critic.body", "shared")),
    )
    clip: float = number(
        0.2,
        "Limit on the change of a state's value within a round. Beyond this limit, the value loss "
        "does not push the value any further. 0 sets no limit.",
        minimum=0,
        read_if=GAE,
        also_called=(verl("critic.cliprange_value"),),
    )


@dataclass(frozen=True, kw_only=True)
class VineSettings(Settings):
    """Estimation of state values for `loss.advantage=vine`."""

    SECTION: ClassVar[str] = "vine"

    samples: int = integer(
        4,
        "K, the number of completions sampled from each state to estimate its value.",
        minimum=1,
        read_if=_VINE,
    )
    states: str = choice(
        ("chunks", "sentences"),
        "States whose value is estimated, in addition to the prompt. `chunks`: the state after "
        "every chunk_tokens tokens. `sentences`: the ends of sentences and of lines, if these ends "
        "are at least chunk_tokens tokens apart.",
        read_if=_VINE,
    )
    chunk_tokens: int = integer(
        16,
        "Number of tokens between two consecutive states. With states=sentences, it is the minimum "
        "number. All tokens between two consecutive states share one advantage.",
        minimum=1,
        read_if=_VINE,
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts of advantages with other settings. Only the first conflict is reported."""
    yield from _group_conflicts(config)
    yield from _token_conflicts(config)
    yield from _reward_conflicts(config)


def _group_conflicts(config: Config) -> Iterator[Conflict]:
    advantage, loss = config.loss.advantage, config.loss.type
    alone = config.rollout.group_size == 1

    yield (
        alone and advantage in COMPARE_A_GROUP,
        "rollout.group_size",
        f"must be >= 2 with loss.advantage={advantage}, which compares the responses of a group",
    )
    yield (
        alone and config.task.normalize_parts,
        "rollout.group_size",
        "must be >= 2 with task.normalize_parts=true, which compares each part of the reward "
        "across the responses of a group",
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
        "needs loss.teacher: without a teacher there is nothing to learn from",
    )


def _token_conflicts(config: Config) -> Iterator[Conflict]:
    advantage, loss = config.loss.advantage, config.loss.type
    of_tokens = advantage in ("gae", "vine", "group_to_go")
    tells_apart = f"loss.advantage={advantage}" if of_tokens else "loss.teacher"

    yield (
        loss == "ppo" and not of_tokens,
        "loss.type",
        f"needs loss.advantage=gae, vine or group_to_go, got {advantage}; with {advantage}, use "
        "loss.type=grpo_clip, which computes the same loss",
    )
    yield (
        (of_tokens or config.loss.teacher is not None) and loss in _OF_RESPONSES,
        "loss.type",
        f"treats a response as a whole, but {tells_apart} treats each token separately; valid: "
        "dapo, cispo, sapo, and other losses with one ratio per token",
    )
    yield (
        advantage == "vine" and config.in_mid_batch,
        "weight_update",
        "must be between_batches with loss.advantage=vine, which estimates the values of a single "
        "policy",
    )
    yield (
        advantage == "vine" and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        "must be score or filter with loss.advantage=vine: vine's completions are not interrupted, "
        "so they would estimate the values of a different policy",
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
