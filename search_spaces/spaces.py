"""The shipped search spaces. Each is a question with the arms that answer it."""

from __future__ import annotations

from typing import Any

from grpo_trainable.config.transport_catalog import TRANSPORTS
from search_spaces.columns import (
    DRIFT,
    ESS,
    IMPORTANCE,
    LEARNING,
    LENGTH,
    OFF_POLICY,
    REUSE,
    SIGNAL,
    SPEED,
    STALENESS,
    STEPS,
    SYNC,
)
from search_spaces.presets import ALGORITHMS
from search_spaces.search_space import SearchSpace

# ---- Synchronous or asynchronous? Complete systems side by side, at equal samples. ---------------

ROUNDS = 96  # rounds of the arms with one rollout batch per round
EVAL_EVERY = 16


def fresh(k: int, rounds: int = ROUNDS, every: int = EVAL_EVERY) -> dict[str, Any]:
    """Return settings for k rollout batches per round and `rounds` / k rounds.

    So the number of samples and the number of evaluations are the same for every k.
    """
    return {
        "k": k,
        "k_mode": "fresh_batches",
        "rounds": rounds // k,
        "eval.every": every // k,
    }


ASYNC_VS_SYNC = SearchSpace(
    name="async_vs_sync",
    question="how much wall-clock time does asynchrony save, and how much reward does it cost, at "
    "equal numbers of samples?",
    arms={
        "colocated_k1": {"placement": "colocated", **fresh(1)},
        # This arm reserves as many cores as the disaggregated arms, and trains with two threads.
        "colocated_k1_two_cores": {
            "placement": "colocated",
            "resources.worker_cpus": 1.9,
            **fresh(1),
        },
        "colocated_k2": {"placement": "colocated", **fresh(2)},
        "colocated_k4": {"placement": "colocated", **fresh(4)},
        "colocated_k8": {"placement": "colocated", **fresh(8)},
        "sync": {"placement": "disaggregated", "lag": 0, **fresh(1)},
        "async_k1": {"placement": "disaggregated", "lag": 1, **fresh(1)},
        "async_k4": {"placement": "disaggregated", "lag": 1, **fresh(4)},
    },
    columns=(SPEED, *STALENESS, *OFF_POLICY, *DRIFT),
)


# ---- How many gradient steps from one round's rollouts, and of which kind? -----------------------

KS = (2, 4, 8)


def _reused(k_mode: str, k: int) -> dict[str, Any]:
    """Return settings for one rollout batch per round, so samples and rounds do not depend on k."""
    return {**fresh(1), "k": k, "k_mode": k_mode}


GRADIENT_STEPS = SearchSpace(
    name="gradient_steps",
    question="how many gradient steps per rollout batch, and of which kind, at equal numbers of "
    "samples?",
    arms={
        "k1": fresh(1),
        # k passes over the batch: k times as many steps.
        **{f"same_batch_k{k}": _reused("same_batch", k) for k in KS},
        # The batch in k parts: k times as many steps, each on 1/k of the rows.
        **{f"minibatches_k{k}": _reused("minibatches", k) for k in KS},
        # k batches per round, all sampled by the same version: as many steps as with k = 1.
        **{f"fresh_batches_k{k}": fresh(k) for k in KS},
    },
    columns=(STEPS, SPEED, *OFF_POLICY, *DRIFT),
)


# ---- How stale may rollouts be, and does truncated importance sampling help? ---------------------

LAGS = (0, 1, 2, 4, 8)
CAP = 2.0
# Two passes over each batch make training slower than sampling, so the generator runs ahead as far
# as the lag allows.
STALE = {"placement": "disaggregated", **fresh(1), "k": 2, "k_mode": "same_batch"}

LAG = SearchSpace(
    name="lag",
    question="how stale may rollouts be, with and without a cap on the importance weight?",
    arms={
        **{f"lag{lag}": {**STALE, "lag": lag} for lag in LAGS},
        **{f"lag{lag}_capped": {**STALE, "lag": lag, "loss.importance_cap": CAP} for lag in LAGS},
    },
    columns=(*STALENESS, SPEED, *OFF_POLICY, *DRIFT),
)


# ---- What does staleness alone cost? Each rollout is exactly `lag` rounds old, on any machine. ---

EXACT = {**STALE, "placement": "colocated", "lag_mode": "exact"}

LAG_EXACT = SearchSpace(
    name="lag_exact",
    question="how much reward does staleness cost if every rollout is exactly `lag` rounds old?",
    arms={f"lag{lag}": {**EXACT, "lag": lag} for lag in LAGS},
    columns=(*STALENESS, *OFF_POLICY, ESS, *DRIFT),
)


# ---- What does a replay buffer gain? -------------------------------------------------------------

SAMPLINGS = ("fifo", "uniform", "mixed")


def _replay(capacity: int, sampling: str) -> dict[str, Any]:
    """Return settings for gradient steps on two rollout batches from the last `capacity` rounds."""
    return {
        **fresh(1),
        "buffer_capacity": capacity,
        "buffer_sampling": sampling,
        "buffer.sample_batches": 2,
    }


REPLAY = SearchSpace(
    name="replay",
    question="what does training on rollouts more than once gain, at equal numbers of fresh "
    "samples?",
    arms={
        "no_replay": fresh(1),
        # With a capacity of two, a draw of two batches takes all groups, with any kind of sampling.
        "capacity2": _replay(2, "recency"),
        **{f"capacity{c}_{s}": _replay(c, s) for c in (4, 8) for s in SAMPLINGS},
    },
    columns=(*REUSE, SPEED, *OFF_POLICY, *DRIFT),
)


# ---- How should weights be transferred? ----------------------------------------------------------

# The arms are asynchronous, so the generator and the learner do other work during most of a sync.
ASYNCHRONOUS = {"placement": "disaggregated", "lag": 1, **fresh(1)}
GPUS: dict[str, dict[str, Any]] = {
    "nccl": {"resources.generator_gpus": 1, "resources.learner_gpus": 1},
    "cuda_ipc": {"resources.generator_gpus": 0.5, "resources.learner_gpus": 0.5},
}

TRANSPORT = SearchSpace(
    name="transport",
    question="how should weights be transferred, and what share of a round does the transfer take?",
    arms={
        name: {**ASYNCHRONOUS, "transport": name, **GPUS.get(name, {})}
        for name in ("object_store", "shm", "gloo", "nixl", "nccl", "cuda_ipc")
    },
    columns=(*SYNC, SPEED, *STALENESS),
    missing=lambda name: TRANSPORTS[name].missing_on_machine(),
)


# ---- Which loss? ---------------------------------------------------------------------------------

# Four gradient steps on parts of the batch. In the first step of a round every ratio is 1, so the
# losses hardly differ in that step.
FOUR_STEPS = {**fresh(1), "k": 4, "k_mode": "minibatches"}
TYPES = (
    *("grpo_clip", "reinforce_with_baseline", "dapo", "cispo", "gspo", "gmpo", "sapo", "topr"),
    *("dppo_tv", "dppo_kl", "m2po", "clip_cov", "kl_cov"),
)


def _loss(**loss: Any) -> dict[str, Any]:
    return {**FOUR_STEPS, **{f"loss.{name}": value for name, value in loss.items()}}


LOSSES = SearchSpace(
    name="losses",
    question="which loss is best, all else equal, with four gradient steps per round?",
    arms={
        **{name: _loss(type=name) for name in TYPES},
        "dual_clip": _loss(type="grpo_clip", dual_clip=3.0),
    },
    columns=(*LEARNING, *OFF_POLICY, *DRIFT, SPEED),
)


# ---- What is a response compared with? -----------------------------------------------------------

BASELINE_NAMES = ("group_mean", "rloo", "group_std", "group_mean_batch_std", "batch", "maxrl")

# The losses of these arms have neither a ratio nor a clip range, so the arms differ only in the
# advantage.
BASELINES = SearchSpace(
    name="baselines",
    question="what should a response be compared with: nothing, its group, the rest of its "
    "group, or the batch?",
    arms={
        "none": {**fresh(1), "loss.type": "no_baseline", "loss.advantage": "none"},
        **{
            name: {**fresh(1), "loss.type": "reinforce_with_baseline", "loss.advantage": name}
            for name in BASELINE_NAMES
        },
    },
    columns=(*LEARNING, *SIGNAL, *DRIFT, SPEED),
)


# ---- What is the loss of a response divided by? --------------------------------------------------

LENGTH_NORM = SearchSpace(
    name="length_norm",
    question="does dividing by the length of a response change how long responses become?",
    arms={
        aggregation: {**fresh(1), "loss.aggregation": aggregation}
        for aggregation in ("sequence_mean", "token_mean", "constant")
    },
    columns=(*LENGTH, *LEARNING, *DRIFT, SPEED),
)


# ---- Is the advantage divided by a standard deviation? -------------------------------------------

NORMS = {
    "group_std": "group_std",
    "no_std": "group_mean",
    "batch_std": "group_mean_batch_std",
}

STD_NORM = SearchSpace(
    name="std_norm",
    question="should advantages be divided by the standard deviation of their group, by that of "
    "the batch, or not at all?",
    arms={arm: {**fresh(1), "loss.advantage": name} for arm, name in NORMS.items()},
    columns=(*LEARNING, *SIGNAL, *DRIFT, SPEED),
)


# ---- Which learning rate? ------------------------------------------------------------------------

# The default is first, because the other rates are compared with it.
RATES = ("3e-4", "2e-5", "5e-5", "1e-4", "5e-4", "1e-3")

LEARNING_RATE = SearchSpace(
    name="learning_rate",
    question="how high can the learning rate be before it damages the policy?",
    arms={f"lr{rate}": {**fresh(1), "optim.lr": float(rate)} for rate in RATES},
    columns=(*LEARNING, *DRIFT, SPEED),
)


# ---- How much staleness does each objective tolerate? --------------------------------------------

OBJECTIVE_LAGS = (0, 4, 8)
# Only the loss settings of these presets are used, so all arms sample and train in the same way.
OBJECTIVES = (
    *("grpo", "dr_grpo", "dapo", "cispo", "gspo", "gmpo", "sapo", "topr", "dppo_tv", "dppo_kl"),
    *("m2po", "clip_cov", "kl_cov", "rloo", "maxrl", "icepop"),
)


def objective(name: str) -> dict[str, Any]:
    """Return the loss settings of a preset."""
    settings = ALGORITHMS[name].settings
    return {key: value for key, value in settings.items() if key.startswith("loss.")}


OBJECTIVES_BY_LAG = SearchSpace(
    name="objectives_by_lag",
    question="how much staleness does each objective tolerate?",
    arms={
        f"{name}_lag{lag}": {**EXACT, "lag": lag, **objective(name)}
        for name in OBJECTIVES
        for lag in OBJECTIVE_LAGS
    },
    columns=(*STALENESS, *OFF_POLICY, *IMPORTANCE, *LEARNING, *DRIFT),
)


SPACES: dict[str, SearchSpace] = {
    space.name: space
    for space in (
        *(ASYNC_VS_SYNC, GRADIENT_STEPS, LAG, LAG_EXACT, REPLAY, TRANSPORT),
        *(LOSSES, BASELINES, LENGTH_NORM, STD_NORM, LEARNING_RATE, OBJECTIVES_BY_LAG),
    )
}
