"""What happens beside training: evaluations, checkpoints, what is watched and printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import Config, Conflict, is_true
from grpo_trainable.config.defaults import by_task
from grpo_trainable.config.foreign_names import IN_ROUNDS, trl, verl
from grpo_trainable.config.values import Settings, flag, integer, number, pair

_KL_IS_MEASURED = is_true("loss.kl_monitor", ", which measures the KL")


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """How the policy is evaluated on held-out prompts."""

    SECTION: ClassVar[str] = "eval"

    every: int = integer(
        16,
        "Rounds between evaluations; round 0 and the last are always evaluated.",
        minimum=1,
        also_called=(trl("eval_steps", IN_ROUNDS), verl("trainer.test_freq", IN_ROUNDS)),
    )
    prompts: int = integer(
        128, "Held-out prompts of an evaluation.", minimum=1, default_by=by_task(control=20)
    )
    samples: int = integer(
        2,
        "Responses sampled for each held-out prompt.",
        minimum=1,
        default_by=by_task(control=1),
        also_called=(verl("rollout.val_kwargs.n"),),
    )
    temperature: float = number(
        0.8,
        "The temperature of sampling in an evaluation; 0 takes the most likely token.",
        minimum=0,
        default_by=by_task(math=1.0, control=0.0, guess=1.0, calculator=1.0),
        also_called=(verl("rollout.val_kwargs.temperature"),),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """When checkpoints are written, and which are kept."""

    SECTION: ClassVar[str] = "checkpoint"

    every: int = integer(
        10,
        "Rounds between checkpoints.",
        minimum=1,
        also_called=(trl("save_steps", IN_ROUNDS), verl("trainer.save_freq", IN_ROUNDS)),
    )
    keep: int | None = integer(
        2,
        "Checkpoints that are kept, beside those that another trial may go on from under PBT; "
        "none: all.",
        minimum=1,
        optional=True,
        also_called=(trl("save_total_limit"), verl("trainer.max_actor_ckpt_to_keep")),
    )


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(Settings):
    """What is watched and printed while a trial runs."""

    SECTION: ClassVar[str] = "callbacks"

    kl_band: tuple[float, float] | None = pair(
        None,
        "The band of kl/reference_nats; a warning says when it is left.",
        expected="two numbers, 0 <= low < high",
        valid=lambda low, high: 0 <= low < high,
        read_if=_KL_IS_MEASURED,
    )
    kl_stop: float | None = number(
        None, "A larger kl/reference_nats ends the trial.", above=0, read_if=_KL_IS_MEASURED
    )
    verbose: bool = flag(False, "Whether changes of version and example responses are printed.")
    leave_out_disturbed: bool = flag(
        True,
        "Whether speeds leave out the rounds in which other work took CPU time from the trial "
        "(time/disturbed_fraction above 0.1).",
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    yield (
        config.eval.temperature == 0 and config.eval.samples > 1,
        "eval.samples",
        "must be 1 with eval.temperature=0, where all responses to a prompt are the same",
    )
