"""The numbers of a trial's rounds, which follow from its settings."""

from __future__ import annotations

import math

from grpo_trainable.config.conditions import Config


def batches_per_round(config: Config) -> int:
    """Return the rollout batches that a round trains on for the first time."""
    return config.k if config.k_mode == "fresh_batches" else 1


def prompts_per_round(config: Config) -> int:
    """Return the prompts of all rollout batches of one round."""
    return config.rollout.prompts * batches_per_round(config)


def responses_per_round(config: Config) -> int:
    """Return the responses to the prompts of one round."""
    return prompts_per_round(config) * config.rollout.group_size


def max_age(config: Config) -> int:
    """Return the rounds that a group may be behind at any training."""
    given = config.buffer.max_age
    return config.lag + config.buffer_capacity - 1 if given is None else given


# ---- Prompts that are drawn in place of others ---------------------------------------------------


def redraws(config: Config) -> int:
    """Return how many times in a row a batch draws prompts in place of those left out."""
    return config.rollout.redraws if config.rollout.zero_advantage == "resample" else 0


def most_drawn(config: Config) -> int:
    """Return the most prompts that are drawn for a rollout batch."""
    rollout = config.rollout
    if not redraws(config):
        return rollout.prompts
    factor = min(rollout.oversample, 1 + redraws(config))
    return math.floor(round(factor * rollout.prompts, 9))  # 1.1 · 10 is 11


def most_prompts(config: Config) -> int:
    """Return the most prompts that a trial draws."""
    return config.rounds * batches_per_round(config) * most_drawn(config)


def redraw_sizes(config: Config, prompts: int) -> list[int]:
    """Return the sizes of the chunks in which `prompts` are drawn in place of others.

    Each generator gets as many chunks, of at most `unit_prompts`.
    """
    given, largest = config.rollout.unit_prompts, unit_prompts(config)
    if given is not None:
        return [min(given, prompts - first) for first in range(0, prompts, given)]
    parts = max(-(-prompts // largest), min(config.resources.num_generators, prompts))
    return [prompts * (i + 1) // parts - prompts * i // parts for i in range(parts)]


# ---- Chunks: what one call of a generator samples ------------------------------------------------


def chunks(config: Config) -> list[slice]:
    """Return the chunks of a rollout batch: the prompts that one call of a generator samples.

    By default each generator gets as many chunks of a round as any other, in sizes that differ
    by at most one prompt. So none idles at lag 0, where nothing else is under way; at any lag
    a batch that is shared out is there sooner, so that it is trained on with newer weights.
    """
    prompts, given = config.rollout.prompts, config.rollout.unit_prompts
    if given is not None:
        return [slice(i, min(i + given, prompts)) for i in range(0, prompts, given)]
    generators = config.resources.num_generators
    parts = min(generators // math.gcd(generators, batches_per_round(config)), prompts)
    return [slice(prompts * i // parts, prompts * (i + 1) // parts) for i in range(parts)]


def unit_prompts(config: Config) -> int:
    """Return the prompts of the largest chunk: `rollout.unit_prompts` where it is set."""
    return max(chunk.stop - chunk.start for chunk in chunks(config))


def chunk_responses(config: Config) -> int:
    """Return the responses of the largest chunk of training."""
    return unit_prompts(config) * config.rollout.group_size


def most_rows(config: Config) -> int:
    """Return the most responses that a call of a generator samples.

    A call samples a chunk of training, completions of a state of each of its responses, or all
    responses to one held-out prompt.
    """
    completions = config.vine.samples if config.loss.advantage == "vine" else 1
    return max(chunk_responses(config) * completions, config.eval.samples)


def chunks_at_once(config: Config) -> int:
    """Return the chunks that can be under way together, of the rounds that the gate admits."""
    rounds = min(config.lag + 1, config.rounds)
    return rounds * batches_per_round(config) * len(chunks(config))
