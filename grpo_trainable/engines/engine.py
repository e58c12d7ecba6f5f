"""The interface of an engine, and the function that builds the configured engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.plugins import load, one_line
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup
from grpo_trainable.tasks import RewardError, Score


class EngineError(RuntimeError):
    """An engine has broken its contract. The message is one line that begins with `engine=`."""


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """Everything that is needed to build an engine in its generator's process."""

    config: GRPOConfig  # config of the trial; `models.store.build_policy` builds its policy
    tokenizer: Tokenizer
    device: torch.device


class Engine(Protocol):
    """Samples responses with the most recently loaded weights.

    The engine `torch` owns a model and a KV cache. Another engine may call a server and own neither
    a model nor a cache. `version` and `round` are 0 before the first `load`.
    """

    @property
    def version(self) -> int:
        """Number of gradient steps that produced the weights now in use."""
        ...

    @property
    def round(self) -> int:
        """Number of training rounds that produced the weights now in use."""
        ...

    def load(self, weights: PolicyWeights) -> None:
        """Load `weights` and sample with them from now on.

        The tensors have the names of the learner's parameters and may be read-only. These tensors
        stay unchanged until the next weights are loaded, so an engine may use them in place. After
        loading, `grpo_trainable.protocol.checksums.storage_checksum` of the engine's own tensors
        should equal `weights.checksum`. Raise an error if the checksums differ.
        """
        ...

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Return one group of responses for each request, in order, with rewards of NaN.

        Build groups with `RolloutGroup.of`, which copies `prompt_index` and `example_index` from
        the request. The groups' tensors belong to the caller. The groups are scored while the next
        call samples, so an engine must not reuse their memory.

        A response ends where `request.limits` says. `finished` is True if an end id or a stop
        string ended the response. Call `between_tokens` before every token: it reports progress and
        may call `load`. If `between_tokens` raises an exception, do not catch it: the call has been
        cancelled. The next call must work as usual.

        Each token carries the version and round of the weights that sampled it, and its log-prob
        under `request.limits.temperature`. Measure the log-prob while sampling. The learner
        compares that log-prob with its own at the same temperature, so any other value gives wrong
        gradients. At temperature 0, which only evaluations request, choose the most likely token,
        and measure its log-prob at temperature 1. A `top_p` below 1 is requested only if the
        engine's record declares support for it (`EngineRecord.top_p`).

        All tensors are on the CPU. `check_groups` lists everything that is checked. Under the same
        weights, the same requests must give the same tokens, so that a resumed run equals one that
        never stopped.
        """
        ...


class Action(NamedTuple):
    """The tokens that the policy samples before its environment answers."""

    row: int  # index among all responses of the call, in the order of its requests
    ids: list[int]  # sampled ids, including the token that ended the action
    end: int  # index of the action's last token within the response


class Observation(NamedTuple):
    """The answer of an environment to an action."""

    row: int
    ids: tuple[int, ...] = ()  # tokens that the policy reads before it acts again
    over: bool = False  # True if the response ends with the action
    finished: bool = False  # True if the environment ended the response


class Partner(Protocol):
    """The environments that answer an engine's actions during one call."""

    def act(self, action: Action) -> None:
        """Take an action. A later call of `observations` returns the answer to this action."""
        ...

    def observations(self, *, waits: bool) -> list[Observation]:
        """Return the observations made since the last call, ordered by row.

        With `waits`, wait for at least one observation, because no row can continue without one.
        """
        ...


@runtime_checkable
class PlayingEngine(Protocol):
    """An engine that can extend a response by tokens that it did not sample."""

    def play(
        self, requests: Sequence[Request], between_tokens: Callable[[], None], partner: Partner
    ) -> list[RolloutGroup]:
        """Return groups like those of `Engine.generate`, but with responses of several actions.

        A token that would end a response ends an action instead. The row then waits until `partner`
        has an observation for it. The tokens of the observation are then fed to the row while other
        rows continue, so no text is tokenised twice. `response_mask` is False for fed tokens, which
        have ids but no log-prob, version or round.

        `max_new_tokens` counts sampled and fed tokens. `finished` comes from the observation that
        ended the response. The random draw of a token depends only on the response and on the
        token's index in it, not on how long environments take.
        """
        ...


@runtime_checkable
class EarningEngine(Protocol):
    """An engine that samples responses while an environment rewards them."""

    def earn(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> tuple[list[RolloutGroup], list[list[Score | RewardError]]]:
        """Return groups like those of `Engine.generate`, and a score for each response.

        `finished` is True if the environment ended the response. A group's `observations` are the
        policy's inputs, its `response_ids` or `actions` are the policy's actions, and its
        `turn_rewards` are the rewards of these actions.
        """
        ...

    def close(self) -> None:
        """Close the environments."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its GPU memory while a learner in its process trains."""

    def sleep(self) -> None:
        """Release the GPU memory until the next call of `load` or `generate`."""
        ...


def build_engine(setup: EngineSetup) -> Engine:
    """Resolve `auto`, and build the configured engine: one of `ENGINES` or a user-defined one.

    Raises:
        ValueError: The engine does not suit the policy, or needs a library that is not installed.
        PluginError: The user-defined engine cannot be imported.
        EngineError: The engine cannot be built, or lacks a part of the interface.
    """
    record = chosen_engine(setup.config)
    build = load("engine", record.build)
    try:
        engine = build(setup)
    except Exception as error:  # user code may raise anything
        raise EngineError(f"engine={record.name}: cannot be built: {one_line(error)}") from error
    lacking = [
        part for part in ("version", "round", "load", "generate") if not hasattr(engine, part)
    ]
    if lacking:
        raise EngineError(
            f"engine={record.name}: lacks {', '.join(lacking)}; "
            "see engines/engine.py for the interface"
        )
    return engine
