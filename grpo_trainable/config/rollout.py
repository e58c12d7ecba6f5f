"""The `rollout` and `pools` sections: the choice of prompts and the sampling of responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config import schedule
from grpo_trainable.config.advantage import COMPARE_A_GROUP, compares_a_group
from grpo_trainable.config.built_in_tasks import PROBLEMS
from grpo_trainable.config.conditions import (
    NOT_PLAYED,
    OF_TEXT,
    Config,
    Conflict,
    at_least,
    is_true,
    one_of,
)
from grpo_trainable.config.defaults import TASKS, by_model, by_task, when_read
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.values import Settings, choice, flag, integer, number, text, texts
from grpo_trainable.models.hf.json_files import ModelFacts
from grpo_trainable.text import plural

REASONING = 256  # default max_new_tokens for a Hugging Face model that solves problems

_RESAMPLED = one_of("rollout.zero_advantage", "resample")
_INTERRUPTED = one_of("rollout.overlong", "interrupt")
_ENABLED = is_true("pools.enabled")


def _default_max_new_tokens(model: ModelFacts, tasks: frozenset[str]) -> int | None:
    if tasks.isdisjoint(PROBLEMS):
        return None
    context = model.context_length
    return REASONING if context is None else min(REASONING, max(1, context // 2))


def _is_stop(text: str) -> bool:
    # U+FFFD stands for bytes that are not text, and half a surrogate pair is not a character. So
    # neither can be part of a stop string.
    return bool(text) and not re.search("[\0\ufffd\ud800-\udfff]", text)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """Sampling of the responses to train on."""

    SECTION: ClassVar[str] = "rollout"

    prompts: int = integer(
        16,
        "Number of prompts in a rollout batch.",
        minimum=1,
        default_by=by_task(control=8),
        also_called=(
            trl("generation_batch_size", "counted in prompts, not in responses"),
            trl(
                "gradient_accumulation_steps",
                "a gradient step uses all responses of its batch, in microbatches of "
                "optim.microbatch responses",
            ),
            verl("data.train_batch_size"),
        ),
    )
    unit_prompts: int | None = integer(
        None,
        "Number of prompts in one call to a generator. `none` divides the prompts of each round "
        "evenly among the generators.",
        minimum=1,
    )
    slots: int | None = integer(
        None,
        "Number of responses that a generator decodes at the same time. When a response ends, the "
        "next response of the same call takes its place. `none` decodes all responses of a call "
        "together.",
        minimum=1,
        read_if=(NOT_PLAYED, OF_TEXT),
        also_called=(verl("rollout.max_num_seqs"),),
    )
    group_size: int = integer(
        4,
        "Number of responses sampled for each prompt.",
        minimum=1,
        default_by=by_task(math=8, control=8, guess=8, calculator=8),
        also_called=(trl("num_generations"), verl("rollout.n")),
    )
    min_new_tokens: int = integer(
        1,
        "Minimum number of tokens in a response.",
        minimum=1,
        read_if=(NOT_PLAYED, OF_TEXT),
    )
    max_new_tokens: int = integer(
        60,
        "Maximum number of tokens in a response. Longer responses are cut off.",
        minimum=1,
        default_by=(
            by_model(
                "room for reasoning within the model's context",
                _default_max_new_tokens,
                keys=(TASKS,),
                told="`256` for mathematics, but at most half the context",
            ),
            by_task(math=64, control=500, guess=40, calculator=40),
        ),
        also_called=(
            trl("max_completion_length"),
            verl("data.max_response_length"),
            verl("rollout.response_length"),
        ),
    )
    stop: tuple[str, ...] | None = texts(
        None,
        "Strings that end a response and remain in the response: one string, or a JSON list of "
        "strings. Write a special token as the tokenizer spells it. `none` uses the strings of the "
        "task.",
        expected="a string that is not empty, or a JSON list of such strings",
        valid=_is_stop,
        read_if=OF_TEXT,
    )
    temperature: float = number(
        0.8,
        "Sampling temperature. The learner computes log-probs at the same temperature.",
        above=0,
        default_by=by_task(math=1.0, control=1.0, guess=1.0, calculator=1.0),
        also_called=(verl("rollout.temperature"),),
    )
    zero_advantage: str = choice(
        ("keep", "filter", "resample"),
        "Treatment of groups that teach nothing because all their rewards are equal: keep them in "
        "the rollout batch (keep), leave them out (filter), or draw other prompts in their place "
        "(resample).",
        also_called=(verl("algorithm.filter_groups.enable", value="resample"),),
    )
    oversample: float = number(
        4.0,
        "Maximum number of prompts drawn for a rollout batch, as a multiple of rollout.prompts.",
        minimum=1,
        read_if=_RESAMPLED,
        harmless=(1.0,),
    )
    redraws: int = integer(
        8,
        "Maximum number of consecutive draws of replacement prompts for a rollout batch.",
        minimum=1,
        read_if=_RESAMPLED,
        also_called=(verl("algorithm.filter_groups.max_num_gen_batches"),),
    )
    stragglers: str = choice(
        ("wait", "drop", "requeue"),
        "Treatment of prompts that hold up a round while the limit `lag` keeps a generator idle: "
        "wait for their responses (wait), discard the incomplete responses and train on other "
        "prompts (drop), or discard them and sample the prompts again later (requeue). "
        "Responses are discarded only if the idle generator has already sampled two chunks that "
        "began later than these responses. A round waits for every prompt that is sampled again.",
        read_if=(
            at_least("lag", 1),
            one_of("lag_mode", "bounded"),
            at_least("resources.num_generators", 2),
            NOT_PLAYED,
            OF_TEXT,
        ),
    )
    overlong: str = choice(
        ("score", "filter", "penalty", "interrupt"),
        "Treatment of responses that reach or nearly reach the length limit: count them like all "
        "others (score), leave them out of the loss (filter), lower their reward (penalty), or "
        "interrupt them before the limit and ask for the answer (interrupt).",
        of_training=True,
        also_called=(trl("mask_truncated_completions", value="filter"),),
    )
    overlong_buffer: int | None = integer(
        None,
        "Length, in tokens, of the range just before the limit max_new_tokens. With `penalty`, the "
        "penalty grows from 0 to its full value over these tokens. With `interrupt`, the inserted "
        "text and the answer share these tokens. `none` means a fifth of max_new_tokens.",
        minimum=1,
        read_if=one_of("rollout.overlong", "penalty", "interrupt"),
        of_training=True,
        default_by=when_read(("rollout.max_new_tokens",), lambda longest: max(1, longest // 5)),
    )
    overlong_penalty: float = number(
        1.0,
        "Full value of the penalty: the reward that a response of max_new_tokens tokens loses.",
        above=0,
        read_if=one_of("rollout.overlong", "penalty"),
        of_training=True,
    )
    interruption: str = text(
        "Okay, time is up. Let me formulate a final answer now. </think>",
        "Text that is inserted into an interrupted response, as if the policy had written it. "
        "Write a special token as the tokenizer spells it.",
        expected="a string that is not empty",
        valid=bool,
        read_if=_INTERRUPTED,
    )
    thinking_end: str = text(
        "</think>",
        "String that ends the thinking of a response, before the answer. A response that writes "
        "this string before the point of interruption is not interrupted. Write a special token as "
        "the tokenizer spells it.",
        expected="a string that is not empty",
        valid=_is_stop,
        read_if=_INTERRUPTED,
    )


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    """Choice of prompts: in passes over all prompts, or by how often the policy solves them."""

    SECTION: ClassVar[str] = "pools"

    enabled: bool = flag(
        False,
        "Draw prompts from three pools (easy, mid, hard) instead of taking all prompts in turn. "
        "The pass rate of a prompt, a running mean of its answer rewards, decides which pool "
        "the prompt belongs to.",
    )
    easy: float = number(
        0.1, "Share of prompts drawn from the easy pool.", minimum=0, read_if=_ENABLED
    )
    mid: float = number(
        0.8,
        "Share of prompts drawn from the mid pool, to which new prompts belong.",
        minimum=0,
        read_if=_ENABLED,
    )
    hard: float = number(
        0.1, "Share of prompts drawn from the hard pool.", minimum=0, read_if=_ENABLED
    )
    easy_above: float = number(0.8, "Pass rate above which a prompt is easy.", read_if=_ENABLED)
    hard_below: float = number(0.2, "Pass rate below which a prompt is hard.", read_if=_ENABLED)
    memory: float = number(
        0.5,
        "Weight of earlier groups in the pass rate of a prompt. 0 counts only the latest group.",
        minimum=0,
        below=1,
        read_if=_ENABLED,
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between sampling and other settings. Only the first conflict is reported."""
    yield from _signal_conflicts(config)
    yield from _length_conflicts(config)
    yield from _pool_conflicts(config)
    yield from _straggler_conflicts(config)


def _signal_conflicts(config: Config) -> Iterator[Conflict]:
    rollout, advantage = config.rollout, config.loss.advantage
    left_out = rollout.zero_advantage != "keep"

    yield (
        left_out and config.loss.teacher is not None,
        "rollout.zero_advantage",
        "must be keep with loss.teacher, which teaches the policy even in groups of equal rewards",
    )
    yield (
        left_out and not compares_a_group(advantage),
        "rollout.zero_advantage",
        f"must be keep with loss.advantage={advantage}, which also learns from groups of equal "
        f"rewards; needs one of {', '.join(COMPARE_A_GROUP)} or a function of your own",
    )
    yield (
        left_out and rollout.group_size == 1,
        "rollout.zero_advantage",
        "must be keep with rollout.group_size=1: a group of one response always has equal rewards",
    )
    yield (
        schedule.redraws(config) > 0 and schedule.most_drawn(config) == rollout.prompts,
        "rollout.oversample",
        f"allows no prompt beyond rollout.prompts={rollout.prompts}; raise rollout.oversample, or "
        "set rollout.zero_advantage=filter",
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
        "rollout.overlong=interrupt: otherwise no token is left for thinking",
    )
    # The learner counts only sampled tokens, but the sampler counts all tokens. The two counts
    # agree only before the interruption, so min_new_tokens must be reached by then.
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
        f"must be < {schedule.most_rows(config)}, the number of responses in the largest call to "
        "a generator: otherwise no response would wait; set rollout.slots to none to decode all "
        "responses together",
    )
    yield (
        config.resources.num_generators > schedule.chunks_at_once(config),
        "resources.num_generators",
        f"at most {plural(schedule.chunks_at_once(config), 'generator')} can have work at any "
        "time, one chunk of prompts each; set resources.num_generators to "
        f"{schedule.chunks_at_once(config)}, "
        + (
            "or raise rollout.prompts"
            if schedule.unit_prompts(config) == 1
            else "or set rollout.unit_prompts to none, which divides the prompts of each round "
            "evenly"
        ),
    )


def _pool_conflicts(config: Config) -> Iterator[Conflict]:
    pools = config.pools

    yield (
        pools.easy + pools.mid + pools.hard == 0,
        "pools.mid",
        "the shares of all pools are 0, so no prompt could be drawn; raise one of them",
    )
    yield (
        pools.hard_below > pools.easy_above,
        "pools.hard_below",
        f"must be <= pools.easy_above={pools.easy_above:g}",
    )


def _straggler_conflicts(config: Config) -> Iterator[Conflict]:
    stragglers, generators = config.rollout.stragglers, config.resources.num_generators
    chunks = len(schedule.chunks(config)) * schedule.batches_per_round(config)

    yield (
        stragglers == "requeue" and config.pools.enabled,
        "rollout.stragglers",
        "must be wait or drop with pools.enabled=true, where pass rates decide which prompt is "
        "sampled again",
    )
    # Otherwise, `lag` may allow so few chunks that no generator can overtake another one twice.
    yield (
        stragglers != "wait" and chunks < generators,
        "rollout.stragglers",
        f"must be wait if a round has fewer chunks of prompts ({chunks}) than there are generators "
        f"({generators}); lower rollout.unit_prompts",
    )
