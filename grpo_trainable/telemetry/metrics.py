"""The names of all metrics, and functions that compute each stage's seconds from actors' spans.

Names are `area/name_unit`; values are floats. Code that only writes or shows metrics needs no
torch, so this module does not import torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from grpo_trainable.telemetry.stages import IDLE, IDLE_SIDES, STAGES, WORK
from grpo_trainable.telemetry.timers import Span, covered_seconds

# After a round, the KL from the policy to each of these policies is measured.
KL_TO = ("reference", "previous", "behaviour")

# Metrics that are estimated from a sample of a round's responses. For each metric NAME, the metric
# NAME_se is the standard error, which is 0 if all responses are measured.
SE = "_se"
SAMPLED = (
    *(f"kl/{other}{kind}_nats" for other in KL_TO for kind in ("", "_k3")),
    "response/reference_nll_nats",
)

# Bins of the histogram of token ratios, evenly spaced in the logarithm. A ratio of 1 is at the
# centre of a bin.
RATIO_EDGES = np.exp(np.linspace(-1.5, 1.5, 62)).astype(np.float32)

# Areas whose metrics measure time. These metrics differ between any two runs, even if all else is
# equal.
TIMED = ("time/", "throughput/", "cost/", "sync/")

# The size of each difficulty pool, and the number of a round's prompts drawn from it.
POOL_METRICS = (
    *(f"pool/{pool}_size" for pool in ("easy", "mid", "hard", "new")),
    *(f"pool/{pool}_drawn" for pool in ("easy", "mid", "hard")),
)
CRITIC = (
    *("critic/loss", "critic/clip_fraction", "critic/grad_norm"),
    *("critic/value_mean", "critic/return_mean", "critic/explained_variance"),
)

# An entry of a row, but not a metric. If a trial continues from the checkpoint of another trial, as
# it does with PBT, this entry of the next row is the name of the other trial's directory.
COPIED_FROM = "copied_from"

JUDGE = (
    *("count/judge_calls", "count/judge_retries", "count/judge_cached"),
    *("count/judge_prompt_tokens", "count/judge_completion_tokens"),
)

# Metrics that a round omits if a feature is off or if the round has nothing to measure.
SOMETIMES = frozenset(
    {
        "reward/format_mean",
        *("kl/sampler_mismatch_nats", "kl/teacher_nats"),
        *("response/turns_mean", "response/interrupted_fraction"),
        *POOL_METRICS,
        *CRITIC,
        *JUDGE,
    }
)

# RLlib's name -> our name for the same figure. Tools written for RLlib look for RLlib's names.
RLLIB_NAMES = {
    "env_runners/episode_return_mean": "reward/train_mean",
    "learners/default_policy/total_loss": "loss/policy",
    "learners/default_policy/curr_lr": "optim/lr",
    "learners/default_policy/gradients_default_optimizer_global_norm": "optim/grad_norm",
}

NAMES = frozenset(
    (
        *("reward/train_mean", "reward/train_std", "reward/format_mean", "reward/answer_mean"),
        "reward/drawn_mean",
        *("reward/eval_mean", "reward/eval_first", "eval/round", "eval/unscored"),
        *(f"time/{stage}_s" for stage in (*STAGES, *IDLE_SIDES)),
        *("time/checkpoint_s", "time/step_s", "time/wall_clock_s", "time/warm_up_s"),
        "time/disturbed_fraction",
        *(f"time/{stage}_fraction" for stage in STAGES),
        *("version/learner", "version/generator", "version/gap_max", "lag/max", "lag/mean"),
        *("buffer/size", "buffer/age_mean", "buffer/age_max", "buffer/uses_mean"),
        *("response/length_mean", "response/truncated_fraction", "response/turns_mean"),
        *("response/interrupted_fraction", "response/repeated_fraction"),
        "response/drawn_length_mean",
        *(name for sampled in SAMPLED for name in (sampled, f"{sampled}{SE}")),
        *("kl/sampler_mismatch_nats", "kl/teacher_nats"),
        *("loss/policy", "loss/clip_fraction", "loss/ratio_max", "loss/bounded_tokens"),
        *("loss/kl_coef", "loss/weights_bounded_fraction"),
        *CRITIC,
        *("policy/entropy_nats", "off_policy/ess_fraction"),
        *("optim/grad_norm", "optim/lr", "optim/skipped_steps"),
        *("group/zero_advantage_fraction", "group/drawn", "group/filtered", "group/resampled"),
        "group/accepted_fraction",
        *POOL_METRICS,
        *("throughput/samples_per_s", "throughput/tokens_per_s", "cost/device_hours"),
        *(
            "count/requested",
            "count/redispatched",
            "count/requeued",
            "count/trained",
            "count/waiting",
            "count/in_flight",
        ),
        *("count/dropped", "count/dropped_stale", "count/dropped_reward", "count/dropped_lost"),
        *("count/dropped_zero_advantage", "count/dropped_straggler"),
        *("count/reward_errors", "count/checkpoint_failures"),
        *("count/skipped_rounds", "count/short_batches", "count/unverified", "count/completions"),
        *JUDGE,
        *("sync/bytes", "sync/gb_per_s", "sync/first_s"),
        *("fleet/generators", "fleet/niceness"),
        *RLLIB_NAMES,
        *("env_runners/num_episodes_lifetime", "num_env_steps_sampled_lifetime"),
    )
)


# Metrics of each task in `task.mix`; LABEL stands for the task's label. If a round has no group of
# a task, only `drawn` and `groups` are logged for that task.
BY_TASK = (
    *("task/LABEL/drawn", "task/LABEL/groups", "task/LABEL/reward_mean"),
    *("task/LABEL/format_mean", "task/LABEL/answer_mean", "task/LABEL/length_mean"),
    *("task/LABEL/truncated_fraction", "task/LABEL/zero_advantage_fraction"),
    *("eval/LABEL/reward_mean", "eval/LABEL/reward_first", "eval/LABEL/unscored"),
)

# A metric for each number in the `info` of environments; NAME stands for the number's name. Once an
# episode has reported a number, the trial logs the number in every round.
INFO_MEAN = "env/NAME_mean"

# Metrics for each part that a reward function returns; NAME stands for the part's name. PART_MEAN
# is about the responses that a round trained on, EVAL_PART_MEAN about held-out responses, and
# EVAL_PART_FIRST about held-out responses before training.
PART_MEAN, EVAL_PART_MEAN = "part/NAME_mean", "eval_part/NAME_mean"
EVAL_PART_FIRST = "eval_part/NAME_first"


def named_metrics(metric: str, means: Mapping[str, float]) -> dict[str, float]:
    """Return the means as metrics. In `metric`, the name of each mean replaces NAME."""
    return {metric.replace("NAME", name): mean for name, mean in means.items()}


def is_named_by_user(name: str) -> bool:
    """Return True if the metric contains a name from an environment or from a reward function."""
    return name.startswith(("env/", "part/", "eval_part/"))


# A trial counts as standing still after this number of consecutive rounds in which no group had
# unequal rewards.
PATIENCE = 4

# If more than this share of the responses is cut off, the token limit may hide what the policy can
# do.
TRUNCATED_ABOVE = 0.25


def without_signal(row: Mapping[str, float]) -> bool:
    """Return True if no group that a row's round could train on had unequal rewards."""
    # A round that trained on no group has no training metrics.
    return row.get("group/zero_advantage_fraction") == 1.0 or "reward/train_mean" not in row


def names_with(labels: Iterable[str]) -> frozenset[str]:
    """Return the names of a trial's metrics, except the metrics for numbers in `info`.

    Args:
        labels: the labels of the tasks in `task.mix`; empty without a mix.
    """
    return NAMES | {name.replace("LABEL", label) for name in BY_TASK for label in labels}


@dataclass(frozen=True, slots=True)
class ActorSpan:
    """A span with its role and actor; a colocated actor has two roles."""

    role: str  # "generator" or "learner"
    actor: str
    span: Span


def stage_seconds(spans: Iterable[ActorSpan]) -> dict[str, float]:
    """Return `time/<stage>_s` of one round, and the idle time of each role.

    Actors of a role work in parallel, so the time of a stage is the time of the actor that spent
    longest on it. The times of the two roles are added: in the stage `sync`, for example, the
    learner publishes weights before the generators load them. If two threads of an actor work on
    the same stage at the same time, that time counts once. Idle time is the mean over the actors of
    a role. An actor with both roles is idle while neither role works.
    """
    by_actor: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
    actors: dict[str, set[str]] = {"generator": set(), "learner": set()}
    idle: dict[str, float] = defaultdict(float)
    for item in spans:
        actors[item.role].add(item.actor)
        if item.span.stage == IDLE:
            idle[item.actor] += item.span.seconds
        else:
            by_actor[item.span.stage, item.role, item.actor].append(item.span)
    seconds = {f"time/{stage}_s": 0.0 for stage in WORK}
    for stage in WORK:
        for role in ("generator", "learner"):
            spent = (
                covered_seconds(spans, -math.inf, math.inf)
                for (name, r, _), spans in by_actor.items()
                if (name, r) == (stage, role)
            )
            seconds[f"time/{stage}_s"] += max(spent, default=0.0)
    for role, side in actors.items():
        seconds[f"time/{role}_idle_s"] = sum(idle[actor] for actor in side) / max(len(side), 1)
    return seconds


def rllib_metrics(row: Mapping[str, float], responses: int, tokens: int) -> dict[str, float]:
    """Return the figures of a row under RLlib's names.

    Args:
        row: the metrics of a round.
        responses: number of responses sampled for training in the whole trial so far.
        tokens: number of tokens in these responses.
    """
    return {
        **{theirs: row[ours] for theirs, ours in RLLIB_NAMES.items() if ours in row},
        "env_runners/num_episodes_lifetime": float(responses),
        "num_env_steps_sampled_lifetime": float(tokens),
    }
