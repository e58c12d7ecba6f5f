"""How responses to train on are sampled, and of which prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config import schedule
from grpo_trainable.config.advantage import COMPARE_A_GROUP, compares_a_group
from grpo_trainable.config.conditions import NOT_PLAYED, OF_TEXT, Config, Conflict, is_true, one_of
from grpo_trainable.config.defaults import by_task, when_read
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.values import Settings, choice, flag, integer, number, text, texts

_RESAMPLED = one_of("rollout.zero_advantage", "resample")
_INTERRUPTED = one_of("rollout.overlong", "interrupt")
_ENABLED = is_true("pools.enabled")


def _is_stop(text: str) -> bool:
    # U+FFFD stands for bytes that are no text, half a surrogate pair for nothing.
    return bool(text) and not re.search("[\0\ufffd\ud800-\udfff]", text)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """How responses to train on are sampled."""

    SECTION: ClassVar[str] = "rollout"

    prompts: int = integer(
        16,
        "Prompts of one rollout batch.",
        minimum=1,
        default_by=by_task(control=8),
        also_called=(
            trl("generation_batch_size", "in prompts, not in responses"),
            trl(
                "gradient_accumulation_steps",
                "a gradient step has all responses of its batch, in microbatches of "
                "optim.microbatch",
            ),
            verl("data.train_batch_size"),
        ),
    )
    unit_prompts: int | None = integer(
        None,
        "Prompts that one call of a generator samples together; none: the generators share a round "
        "out evenly.",
        minimum=1,
    )
    slots: int | None = integer(
        None,
        "Responses that a generator decodes at a time: where one ends, the next of the same call "
        "takes its place; none: all of a call.",
        minimum=1,
        read_if=(NOT_PLAYED, OF_TEXT),
        also_called=(verl("rollout.max_num_seqs"),),
    )
    group_size: int = integer(
        4,
        "Responses sampled for each prompt.",
        minimum=1,
        default_by=by_task(math=8, control=8, guess=8, calculator=8),
        also_called=(trl("num_generations"), verl("rollout.n")),
    )
    min_new_tokens: int = integer(
        1,
        "Tokens of a response before which it cannot end.",
        minimum=1,
        read_if=(NOT_PLAYED, OF_TEXT),
    )
    max_new_tokens: int = integer(
        60,
        "Tokens after which a response is cut off.",
        minimum=1,
        default_by=by_task(math=64, control=500, guess=40, calculator=40),
        also_called=(
            trl("max_completion_length"),
            verl("data.max_response_length"),
            verl("rollout.response_length"),
        ),
    )
    stop: tuple[str, ...] | None = texts(
        None,
        "Strings after which a response ends, and which stay in it, one or a JSON list; a special "
        "token of the tokenizer is spelt out; none: those that the task asks for.",
        expected="a text that is not empty, or a JSON list of such texts",
        valid=_is_stop,
        read_if=OF_TEXT,
    )
    temperature: float = number(
        0.8,
        "The temperature of sampling, under which the learner scores tokens too.",
        above=0,
        default_by=by_task(math=1.0, control=1.0, guess=1.0, calculator=1.0),
        also_called=(verl("rollout.temperature"),),
    )
    zero_advantage: str = choice(
        ("keep", "filter", "resample"),
        "What becomes of a group whose rewards are all equal, which teaches nothing: it stays in "
        "its rollout batch, it is left out, or other prompts are drawn in its place.",
        also_called=(verl("algorithm.filter_groups.enable", value="resample"),),
    )
    oversample: float = number(
        4.0,
        "How many times as many prompts as a rollout batch has may be drawn for it in all.",
        minimum=1,
        read_if=_RESAMPLED,
        harmless=(1.0,),
    )
    redraws: int = integer(
        8,
        "How many times in a row prompts may be drawn in place of those that were left out.",
        minimum=1,
        read_if=_RESAMPLED,
        also_called=(verl("algorithm.filter_groups.max_num_gen_batches"),),
    )
    overlong: str = choice(
        ("score", "filter", "penalty", "interrupt"),
        "What becomes of a response that was cut off or nearly so: it counts as any other, it is "
        "left out of the loss, its length is taken off its reward, or it is interrupted in time "
        "and told to answer.",
        of_training=True,
        also_called=(trl("mask_truncated_completions", value="filter"),),
    )
    overlong_buffer: int | None = integer(
        None,
        "The last of max_new_tokens, in which the penalty grows from 0 to all of it, or which an "
        "interruption and the answer after it share; none: a fifth of them.",
        minimum=1,
        read_if=one_of("rollout.overlong", "penalty", "interrupt"),
        of_training=True,
        default_by=when_read(("rollout.max_new_tokens",), lambda longest: max(1, longest // 5)),
    )
    overlong_penalty: float = number(
        1.0,
        "What a response of max_new_tokens loses of its reward.",
        above=0,
        read_if=one_of("rollout.overlong", "penalty"),
        of_training=True,
    )
    interruption: str = text(
        "Okay, time is up. Let me formulate a final answer now. </think>",
        "The text that an interrupted response reads, as if it had written it; special tokens are "
        "spelt out.",
        expected="text that is not empty",
        valid=bool,
        read_if=_INTERRUPTED,
    )
    thinking_end: str = text(
        "</think>",
        "What a response writes before its answer: one that has written it in time is not "
        "interrupted; a special token is spelt out.",
        expected="a text that is not empty",
        valid=_is_stop,
        read_if=_INTERRUPTED,
    )


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    """Which prompts are drawn: passes over all of them, or by how often the policy solves each."""

    SECTION: ClassVar[str] = "pools"

    enabled: bool = flag(
        False,
        "Whether prompts are drawn from pools, easy, mid and hard ones, by the share of right "
        "responses so far, in place of passes over all prompts.",
    )
    easy: float = number(
        0.1, "The share of prompts drawn from the easy ones.", minimum=0, read_if=_ENABLED
    )
    mid: float = number(
        0.8,
        "The share drawn from those between, to which new prompts belong.",
        minimum=0,
        read_if=_ENABLED,
    )
    hard: float = number(0.1, "The share drawn from the hard ones.", minimum=0, read_if=_ENABLED)
    easy_above: float = number(0.8, "The pass rate above which a prompt is easy.", read_if=_ENABLED)
    hard_below: float = number(0.2, "The pass rate below which a prompt is hard.", read_if=_ENABLED)
    memory: float = number(
        0.5,
        "The weight of earlier groups in the pass rate of a prompt; 0: only the latest counts.",
        minimum=0,
        below=1,
        read_if=_ENABLED,
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other, in the order in which it is reported."""
    yield from _signal_conflicts(config)
    yield from _length_conflicts(config)
    yield from _pool_conflicts(config)


def _signal_conflicts(config: Config) -> Iterator[Conflict]:
    rollout, advantage = config.rollout, config.loss.advantage
    left_out = rollout.zero_advantage != "keep"

    yield (
        left_out and config.loss.teacher is not None,
        "rollout.zero_advantage",
        "must be keep with loss.teacher, from which groups of equal rewards learn as well",
    )
    yield (
        left_out and not compares_a_group(advantage),
        "rollout.zero_advantage",
        f"must be keep with loss.advantage={advantage}, by which groups of equal rewards teach "
        f"something; needs one of {', '.join(COMPARE_A_GROUP)} or a function of your own",
    )
    yield (
        left_out and rollout.group_size == 1,
        "rollout.zero_advantage",
        "must be keep with rollout.group_size=1: one reward alone is always equal to itself",
    )
    yield (
        schedule.redraws(config) > 0 and schedule.most_drawn(config) == rollout.prompts,
        "rollout.oversample",
        "leaves no prompt to draw in place of one of "
        f"rollout.prompts={rollout.prompts}; raise it, or set rollout.zero_advantage=filter",
    )


def _length_conflicts(config: Config) -> Iterator[Conflict]:
    rollout = config.rollout
    thinking = rollout.max_new_tokens - config.overlong_buffer

    yield (
        rollout.min_new_tokens > rollout.max_new_tokens,
        "rollout.min_new_tokens",
        f"must be <= rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    yield (
        config.overlong_buffer > rollout.max_new_tokens,
        "rollout.overlong_buffer",
        f"must be <= rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    yield (
        rollout.overlong == "interrupt" and config.overlong_buffer >= rollout.max_new_tokens,
        "rollout.overlong_buffer",
        f"must be < rollout.max_new_tokens={rollout.max_new_tokens} with "
        "rollout.overlong=interrupt: else there is no token to think",
    )
    # The learner counts sampled tokens, the sampler all: before the interruption they are the same.
    yield (
        rollout.overlong == "interrupt" and rollout.min_new_tokens - 1 > thinking,
        "rollout.min_new_tokens",
        f"must be <= {thinking + 1} with rollout.overlong=interrupt, which interrupts a response "
        f"after {thinking} tokens",
    )
    yield (
        (rollout.unit_prompts or 1) > rollout.prompts,
        "rollout.unit_prompts",
        f"must be <= rollout.prompts={rollout.prompts}",
    )
    yield (
        (rollout.slots or 0) >= schedule.most_rows(config),
        "rollout.slots",
        f"must be < {schedule.most_rows(config)}, the responses of the largest call of a "
        "generator: none would wait; none decodes all of them at once",
    )
    yield (
        config.resources.num_generators > schedule.chunks_at_once(config),
        "resources.num_generators",
        f"only {schedule.chunks_at_once(config)} can sample at a time, one chunk each; set it to "
        f"{schedule.chunks_at_once(config)}, "
        + (
            "or raise rollout.prompts"
            if schedule.unit_prompts(config) == 1
            else "or rollout.unit_prompts to none, which shares a round out"
        ),
    )


def _pool_conflicts(config: Config) -> Iterator[Conflict]:
    pools = config.pools

    yield (
        pools.easy + pools.mid + pools.hard == 0,
        "pools.mid",
        "the shares of all pools are 0, so no prompt could be drawn",
    )
    yield (
        pools.hard_below > pools.easy_above,
        "pools.hard_below",
        f"must be <= pools.easy_above={pools.easy_above:g}",
    )
