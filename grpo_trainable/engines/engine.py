"""The interface between sampling and everything else, and how an engine is built."""

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
    """An engine breaks its contract; the message is one line that begins with `engine=`."""


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is built from, in the process of its generator."""

    config: GRPOConfig  # the whole trial; `models.store.build_policy` builds the policy it names
    tokenizer: Tokenizer
    device: torch.device


class Engine(Protocol):
    """Samples responses with the weights it was given last.

    The engine `torch` owns a model and a KV cache; another one may own neither, and ask a server.
    `version` and `round` are 0 before the first `load`.
    """

    @property
    def version(self) -> int:
        """Gradient steps of the weights now in use."""
        ...

    @property
    def round(self) -> int:
        """Rounds of the weights now in use."""
        ...

    def load(self, weights: PolicyWeights) -> None:
        """Samples with `weights` from now on.

        The tensors have the names of the learner's parameters and may be read-only. They stay as
        they are until the next weights were loaded, so an engine may use them in place.
        `grpo_trainable.protocol.checksums.storage_checksum` of what the engine now holds should be
        `weights.checksum`: raise an error when the weights arrived torn.
        """
        ...

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Return one group of responses for each request, in order, with rewards of NaN.

        `RolloutGroup.of` makes a group that knows the prompt of its request (`prompt_index` and
        `example_index`). The groups' tensors belong to the caller: they are scored while the next
        call samples, so an engine must not reuse their memory.

        A response ends where `request.limits` says, and `finished` says whether it ended before
        its length did. Call `between_tokens` before every token: it reports progress, and may call
        `load`. Each token carries the version and round of the weights that sampled it, and its
        log-prob under `request.limits.temperature`. The learner scores with the same temperature
        and compares, so a log-prob that was not measured while sampling makes wrong gradients.
        Temperature 0, which only evaluations ask for, takes the most likely token, with its
        log-prob at temperature 1. All tensors are on the CPU; `check_groups` lists what else is
        checked. The same requests give the same tokens under the same weights, or a resumed run
        differs from one that was never stopped.
        """
        ...


class Action(NamedTuple):
    """What the policy wrote until it let its environment answer."""

    row: int  # index in the call, whose requests follow one another
    ids: list[int]  # sampled ids, what ended it included
    end: int  # which token of the response is its last


class Observation(NamedTuple):
    """What follows an action."""

    row: int
    ids: tuple[int, ...] = ()  # what the policy reads before it acts again
    over: bool = False  # nothing does: the response ends with the action
    finished: bool = False  # true where its environment has ended it


class Partner(Protocol):
    """The other side of the episodes of one call."""

    def act(self, action: Action) -> None:
        """Takes an action. What follows it is among the `observations` to come."""
        ...

    def observations(self, *, waits: bool) -> list[Observation]:
        """What has come since the last time, in the order of rows. `waits`: no row can go on, so
        there must be one."""
        ...


@runtime_checkable
class PlayingEngine(Protocol):
    """An engine that can extend a response by tokens that it did not sample."""

    def play(
        self, requests: Sequence[Request], between_tokens: Callable[[], None], partner: Partner
    ) -> list[RolloutGroup]:
        """As `Engine.generate`, but a token that ends a response there ends an action here.

        The row waits then until `partner` has an observation, which is fed to it token by token
        while other rows go on: nothing is tokenised twice, and nothing is prefilled again. What was
        fed is a hole in `response_mask`, with its ids, without log-prob, version and round.
        `max_new_tokens` counts sampled and fed tokens. `finished` says what the observation that
        ended the response says. Token t of a response, sampled or fed, has draw t.
        """
        ...


@runtime_checkable
class EarningEngine(Protocol):
    """An engine whose responses are rewarded while they are sampled, by what they act in."""

    def earn(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> tuple[list[RolloutGroup], list[list[Score | RewardError]]]:
        """As `Engine.generate`, with a score for each response; `finished` says whether the
        environment has ended it. What the policy saw is in `observations`, what it did in
        `response_ids` or `actions`, and what each action earned in `turn_rewards`."""
        ...

    def close(self) -> None:
        """Ends what it acts in."""
        ...


def build_engine(setup: EngineSetup) -> Engine:
    """The engine that the config names, `auto` settled: one of `ENGINES`, or a user's.

    Raises:
        ValueError: the engine does not suit the policy, or lacks a library.
        PluginError: the user's engine cannot be imported.
        EngineError: it cannot be built, or lacks a part of the interface.
    """
    record = chosen_engine(setup.config)
    build = load("engine", record.build)
    try:
        engine = build(setup)
    except Exception as error:  # a user's code may raise anything
        raise EngineError(f"engine={record.name}: cannot be built: {one_line(error)}") from error
    lacking = [
        part for part in ("version", "round", "load", "generate") if not hasattr(engine, part)
    ]
    if lacking:
        raise EngineError(
            f"engine={record.name}: lacks {', '.join(lacking)}; see engines/engine.py"
        )
    return engine
