"""Numbers that follow from a trial's settings: its rounds, batches, prompts and chunks."""

from __future__ import annotations

import math

from grpo_trainable.config.conditions import Config
from grpo_trainable.config.values import ALL


def batches_per_round(config: Config) -> int:
    """Return the number of rollout batches that a round trains on for the first time."""
    return config.k if config.k_mode == "fresh_batches" else 1


def prompts_per_round(config: Config) -> int:
    """Return the number of prompts in all rollout batches of one round."""
    return config.rollout.prompts * batches_per_round(config)


def responses_per_round(config: Config) -> int:
    """Return the number of responses to the prompts of one round."""
    return prompts_per_round(config) * config.rollout.group_size


def max_age(config: Config) -> int:
    """Return the maximum number of rounds by which a group may lag when it is trained on."""
    given = config.buffer.max_age
    return config.lag + config.buffer_capacity - 1 if given is None else given


def held_out_prompts(config: Config, *, final: bool) -> int:
    """Return the number of held-out prompts in an evaluation.

    Args:
        config: The trial's settings.
        final: True for the last evaluation of the trial, which may have more prompts.
    """
    given = config.eval.final_prompts
    return config.eval.prompts if given is None or not final else given


def monitored_responses(config: Config) -> int | None:
    """Return the number of a round's responses on which the KL is measured, or None for all.

    The number is a multiple of the number of learners, so each learner measures the same number of
    responses, as fsdp2 requires.
    """
    responses, learners = config.loss.kl_monitor_responses, config.resources.num_learners
    if responses == ALL or not config.reads("loss.kl_monitor_responses"):
        return None
    return -(-responses // learners) * learners


def last_collected(config: Config, round_: int) -> int:
    """Return the last round whose rollouts are complete before the gradient steps of `round_`.

    With `lag_mode=exact`, that round comes `lag` rounds after `round_`, because its rollouts are
    sampled with the newest weights and then wait for `lag` rounds. It is never later than the
    trial's last round.
    """
    ahead = config.lag if config.lag_mode == "exact" else 0
    return min(round_ + ahead, config.rounds - 1)


# ---- Replacement prompts -------------------------------------------------------------------------


def redraws(config: Config) -> int:
    """Return the maximum number of consecutive draws of replacement prompts for a batch."""
    return config.rollout.redraws if config.rollout.zero_advantage == "resample" else 0


def most_drawn(config: Config) -> int:
    """Return the largest number of prompts drawn for a rollout batch."""
    rollout = config.rollout
    if not redraws(config):
        return rollout.prompts
    factor = min(rollout.oversample, 1 + redraws(config))
    return math.floor(round(factor * rollout.prompts, 9))  # 1.1 · 10 gives 11, not 10


def most_prompts(config: Config) -> int:
    """Return the largest number of prompts that a trial requests, counting repeated requests."""
    return config.rounds * batches_per_round(config) * most_drawn(config) + most_given_up(config)


def most_given_up(config: Config) -> int:
    """Return the largest number of prompts that a trial gives up because they are stragglers."""
    if config.rollout.stragglers == "wait":
        return 0
    return config.rounds * prompts_per_round(config)


def redraw_sizes(config: Config, prompts: int) -> list[int]:
    """Return the sizes of the chunks into which `prompts` replacement prompts are split.

    If `rollout.unit_prompts` is set, each chunk but the last has that size. Otherwise no chunk is
    larger than the largest chunk of a rollout batch, and every generator gets a chunk if there are
    enough prompts.
    """
    given, largest = config.rollout.unit_prompts, unit_prompts(config)
    if given is not None:
        return [min(given, prompts - first) for first in range(0, prompts, given)]
    parts = max(-(-prompts // largest), min(config.resources.num_generators, prompts))
    return [prompts * (i + 1) // parts - prompts * i // parts for i in range(parts)]


# ---- Chunks: the prompts that a generator samples in one call ------------------------------------


def chunks(config: Config) -> list[slice]:
    """Split a rollout batch into chunks. A generator samples one chunk per call.

    By default every generator gets the same number of chunks in a round, and the chunk sizes differ
    by at most one prompt. So no generator idles at lag 0, where a generator has no other work. At
    any lag, a batch that several generators share is ready sooner, so it is less stale when it is
    trained on.
    """
    prompts, given = config.rollout.prompts, config.rollout.unit_prompts
    if given is not None:
        return [slice(i, min(i + given, prompts)) for i in range(0, prompts, given)]
    generators = config.resources.num_generators
    parts = min(generators // math.gcd(generators, batches_per_round(config)), prompts)
    return [slice(prompts * i // parts, prompts * (i + 1) // parts) for i in range(parts)]


def unit_prompts(config: Config) -> int:
    """Return the number of prompts in the largest chunk, or `rollout.unit_prompts` if it is set."""
    return max(chunk.stop - chunk.start for chunk in chunks(config))


def chunk_responses(config: Config) -> int:
    """Return the number of responses in the largest chunk of a rollout batch."""
    return unit_prompts(config) * config.rollout.group_size


def most_rows(config: Config) -> int:
    """Return the largest number of responses that a generator samples in one call.

    A call samples one of three things: the responses of a training chunk, completions from one
    state of each response in a chunk, or all responses to one held-out prompt.
    """
    completions = config.vine.samples if config.loss.advantage == "vine" else 1
    return max(chunk_responses(config) * completions, config.eval.samples)


def chunks_at_once(config: Config) -> int:
    """Return the number of chunks that can be sampled at the same time, given the lag."""
    rounds = 1 if config.in_turns else min(config.lag + 1, config.rounds)
    return rounds * batches_per_round(config) * len(chunks(config))
