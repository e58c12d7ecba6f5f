"""The messages between the actors of a trial and its pipeline: what each call answers.

The pipeline knows actors by their answers alone. Moments are in seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.telemetry.timers import Span

# ---- Answers of a generator --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A generator computes with new weights."""

    version: int
    round: int
    transport: str
    bytes: int
    transfer_s: float
    load_s: float
    at: float
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposited:
    """A generator has new weights in its mailbox, where the next token finds them."""

    version: int
    round: int
    bytes: int
    spans: list[Span]  # concurrent with whatever else the generator did


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Responses that wait in their generator for its `score`."""

    number: int  # by which `score` knows them
    loaded: list[Loaded]  # weights taken in between two tokens; their spans are in `spans`
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What came of some requests, in their order."""

    groups: list[RolloutGroup]  # scored
    failed: list[tuple[int, str]]  # (prompt index, why) where the reward function failed
    reward_errors: int  # responses it failed on
    unverified: int  # responses that count as wrong because they could not be judged
    loaded: list[Loaded]  # see `Sampled`
    spans: list[Span]
    completions: int = 0  # responses that were sampled and scored to value states


# ---- Answers of a learner ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """KL from the policy to another one, estimated on responses that were trained on.

    In nats: sums over a response, means over the responses.
    """

    k1: float  # an estimate of either sign
    k3: float  # never negative


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStep:
    """What one optimizer step saw of a critic. Means run over the response tokens."""

    loss: float
    clip_fraction: float
    grad_norm: float  # its norm before it was limited


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticFigures:
    """What a critic said, before the round, of the states that the round trains on."""

    value_mean: float
    return_mean: float  # mean of the discounted rewards that followed
    explained_variance: float | None  # share of the returns' variance; None where all are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """What one optimizer step saw. Sums and means run over all of its response tokens."""

    loss: float
    grad_norm: float
    entropy_nats: float  # mean per response token
    clip_fraction: float  # share of response tokens
    weights_bounded_fraction: float  # share of response tokens that the rule bounded
    ratio_max: float
    bounded_tokens: int  # response tokens whose ratio was held at e^20 (`algo.ratios`)
    ratio_counts: tuple[int, ...]  # response tokens between the `RATIO_EDGES`
    lr: float
    skipped: bool  # loss or gradient was not finite: nothing was changed
    kl: dict[str, Drift]  # drift of the policy before the step, on its rows; empty if not monitored
    critic: CriticStep | None = None  # None without a critic


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFigures:
    """Figures of each response that was trained on: (N,) float32 arrays for N responses.

    They are in the order of the groups and of their responses. Log-probs are sums over a response's
    tokens, in nats; None when nothing asked for them.
    """

    advantages: np.ndarray
    policy_log_probs: np.ndarray | None  # those of the policy after the round
    reference_log_probs: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The learner has trained a round."""

    round: int  # rounds trained so far
    version: int
    steps: list[GradientStep]
    skipped_steps: int  # so far
    reference_nll_nats: float | None  # per response token; None without a reference
    kl: dict[str, Drift]  # drift from "reference", "previous", "behaviour"; may be empty, see above
    responses: ResponseFigures
    # KL from the sampler to the learner of the same weights, k3; None where none were the same
    sampler_mismatch_nats: float | None = None
    # KL of a response from the sampler to the teacher, in nats; None without one
    teacher_nats: float | None = None
    kl_coefficient: float  # β in this round
    critic: CriticFigures | None = None  # None without a critic
    at: float
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The learner has published a snapshot."""

    handle: Any  # receivers of the transport fetch it by this
    version: int
    round: int
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a checkpoint keeps of the learner."""

    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: dict[str, Any] = field(default_factory=dict)
