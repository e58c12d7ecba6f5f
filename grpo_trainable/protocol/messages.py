"""The messages with which the actors of a trial answer the pipeline's calls.

The pipeline learns about actors only from these answers. Points in time are in seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from grpo_trainable.protocol.rollout import RolloutGroup, Rubric
from grpo_trainable.telemetry.timers import Span

# ---- Answers of a generator --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A generator now computes with new weights."""

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
    """A generator has new weights in its mailbox and will load them before the next token."""

    version: int
    round: int
    bytes: int
    spans: list[Span]  # these spans overlap with the generator's other work


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Responses that wait in their generator until `score` is called."""

    number: int  # identifies the responses in the call to `score`
    loaded: list[Loaded]  # weights loaded between two tokens; `spans` includes these loads
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Sampling was ended early by a call of `cancel`. The sampled responses are discarded."""

    loaded: list[Loaded]  # see `Sampled`
    spans: list[Span]


class FailedPrompt(NamedTuple):
    """A prompt that cannot be trained on, because a response to it has no reward."""

    prompt_index: int
    reason: str
    tokens: int  # number of tokens sampled for all responses to the prompt
    repeats: bool = False  # True: the reward function would fail again in the same way
    is_failure: bool = True  # False: the reward function deliberately gave no reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The results of several requests, in the order of the requests."""

    groups: list[RolloutGroup]  # scored
    failed: list[FailedPrompt]  # prompts with at least one response that has no reward
    reward_errors: int  # number of responses on which the reward function failed
    unverified: int  # number of responses counted as wrong because they could not be judged
    loaded: list[Loaded]  # see `Sampled`
    spans: list[Span]
    completions: int = 0  # number of responses sampled and scored to estimate values of states
    # Counts of a judge's calls, retries and so on, for all responses. The keys are those of `USAGE`
    # (`grpo_trainable/tasks/task.py`).
    usage: dict[str, int] = field(default_factory=dict)
    # Index of a prompt -> the prompt's rubrics, if a judge has changed them.
    rubrics: dict[int, tuple[Rubric, ...]] = field(default_factory=dict)


# ---- Answers of a learner ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """KL from the policy to another policy, estimated on responses that were trained on.

    Values are in nats, summed over a response and averaged over the responses. If the KL is
    measured on a sample of the responses, `k1_se` and `k3_se` are the standard errors of the
    estimates. If the KL is measured on all responses, both standard errors are 0.
    """

    k1: float  # an estimate that can be negative
    k3: float  # an estimate that is never negative
    k1_se: float = 0.0
    k3_se: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStep:
    """Figures of the critic in one optimizer step.

    `loss` and `clip_fraction` are averages over the response tokens that the loss counts.
    """

    loss: float
    clip_fraction: float
    grad_norm: float  # before clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticFigures:
    """Summary of the critic's values, computed before the round's first gradient step."""

    value_mean: float
    return_mean: float  # discounted sum of the rewards after a state, averaged over the states
    # Share of the returns' variance that the values explain. None if all returns are equal.
    explained_variance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """Figures of one optimizer step.

    Here, a response token is a token that the loss counts, in any microbatch of the step.
    """

    loss: float
    grad_norm: float
    entropy_nats: float  # mean per response token
    clip_fraction: float  # share of response tokens
    weights_bounded_fraction: float  # share of response tokens whose importance weight was bounded
    ratio_max: float
    bounded_tokens: int  # number of response tokens whose ratio was bounded at e^20 (`algo.ratios`)
    ratio_counts: tuple[int, ...]  # number of response tokens in each bin of `RATIO_EDGES`
    lr: float
    # Effective sample size of the importance weights, as a fraction of the number of responses.
    ess_fraction: float
    skipped: bool  # True if the step changed nothing, because its loss or gradient was not finite
    # Name of another policy -> KL from the policy before the step to the named policy, on those of
    # the step's responses for which the KL is measured. Empty if the KL is not monitored.
    kl: dict[str, Drift]
    critic: CriticStep | None = None  # None if there is no critic


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFigures:
    """Figures of each response that was trained on: (N,) float32 arrays for N responses.

    The entries follow the order of the groups and, within a group, the order of its responses.
    Log-probs are sums over a response's tokens, in nats, and NaN for responses on which the KL was
    not measured. The arrays of log-probs are None if no setting needs them.
    """

    advantages: np.ndarray
    policy_log_probs: np.ndarray | None  # under the policy after the round
    reference_log_probs: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The learner has finished training for a round."""

    round: int  # number of rounds finished so far
    version: int
    steps: list[GradientStep]
    skipped_steps: int  # number of skipped steps so far
    reference_nll_nats: float | None  # per response token; None without a reference
    reference_nll_se: float = 0.0  # see `Drift`
    kl: dict[str, Drift]  # KL to "reference", "previous", "behaviour"; empty if not monitored
    responses: ResponseFigures
    # KL (k3) from sampler to learner on tokens for which both have the same weights. None if there
    # are no such tokens.
    sampler_mismatch_nats: float | None = None
    # KL from the sampler to the teacher, in nats per response. None without a teacher.
    teacher_nats: float | None = None
    kl_coefficient: float  # β, the factor of the KL term, in this round
    critic: CriticFigures | None = None  # None if there is no critic
    at: float
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The learner has published a snapshot."""

    handle: Any  # the transport's receivers use the handle to fetch the snapshot
    version: int
    round: int
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """The learner's part of a checkpoint."""

    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: dict[str, Any] = field(default_factory=dict)
