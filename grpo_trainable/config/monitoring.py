"""The `eval`, `checkpoint` and `callbacks` sections: everything that accompanies training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import OF_TEXT, Config, Conflict, is_true, positive
from grpo_trainable.config.defaults import by_model, by_task
from grpo_trainable.config.foreign_names import IN_ROUNDS, trl, verl
from grpo_trainable.config.values import Settings, flag, integer, number, pair

KL_PER_TOKEN = 0.2  # nats per token by which a Hugging Face model may drift without a warning

_KL_IS_MEASURED = is_true("loss.kl_monitor", ", which measures the KL")


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Evaluation of the policy on held-out prompts."""

    SECTION: ClassVar[str] = "eval"

    every: int = integer(
        16,
        "Number of rounds between evaluations. The policy is always evaluated before training "
        "(round 0) and after the last round.",
        minimum=1,
        of_training=True,
        also_called=(
            *(trl(name, IN_ROUNDS) for name in ("eval_steps", "eval_strategy")),
            verl("trainer.test_freq", IN_ROUNDS),
        ),
    )
    prompts: int = integer(
        128,
        "Number of held-out prompts in an evaluation.",
        minimum=1,
        default_by=by_task(control=20),
    )
    final_prompts: int | None = integer(
        None,
        "Number of held-out prompts in the last evaluation of a trial, by default `eval.prompts`. "
        "More prompts make the final reward more precise, and the other evaluations stay short. "
        "The last evaluation begins with the prompts of the other evaluations. No prompt may occur "
        "twice in the last evaluation.",
        minimum=1,
        of_training=True,
    )
    samples: int = integer(
        2,
        "Number of responses sampled for each held-out prompt.",
        minimum=1,
        default_by=by_task(control=1),
        also_called=(trl("num_generations_eval"), verl("rollout.val_kwargs.n")),
    )
    temperature: float = number(
        0.8,
        "Sampling temperature of an evaluation. 0 always chooses the most likely token.",
        minimum=0,
        default_by=by_task(math=1.0, control=0.0, guess=1.0, calculator=1.0),
        also_called=(verl("rollout.val_kwargs.temperature"),),
    )
    top_p: float = number(
        1.0,
        "Top-p (nucleus) sampling in an evaluation: each token is sampled from the most likely "
        "tokens whose probabilities add up to this share. 1 samples from all tokens, as in "
        "training.",
        above=0,
        maximum=1,
        read_if=(positive("eval.temperature"), OF_TEXT),
        also_called=(verl("rollout.val_kwargs.top_p"),),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Checkpoints: how often they are written and how many are kept."""

    SECTION: ClassVar[str] = "checkpoint"

    every: int = integer(
        10,
        "Number of rounds between checkpoints.",
        minimum=1,
        also_called=(
            *(trl(name, IN_ROUNDS) for name in ("save_steps", "save_strategy")),
            verl("trainer.save_freq", IN_ROUNDS),
        ),
    )
    keep: int | None = integer(
        2,
        "Number of checkpoints to keep. With PBT, checkpoints that another trial may continue from "
        "are kept as well. `none` keeps all.",
        minimum=1,
        optional=True,
        also_called=(trl("save_total_limit"), verl("trainer.max_actor_ckpt_to_keep")),
    )


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(Settings):
    """Warnings, limits and output while a trial runs."""

    SECTION: ClassVar[str] = "callbacks"

    kl_band: tuple[float, float] | None = pair(
        None,
        "Expected range of kl/reference_nats. When the KL leaves this range, a warning is printed.",
        expected="two numbers, 0 <= low < high",
        valid=lambda low, high: 0 <= low < high,
        read_if=_KL_IS_MEASURED,
        default_by=by_model(
            f"{KL_PER_TOKEN:g} nats for each of rollout.max_new_tokens tokens",
            lambda model, longest: (0.0, round(KL_PER_TOKEN * longest, 6)),
            keys=("rollout.max_new_tokens",),
            told=f"from 0 to {KL_PER_TOKEN:g} × rollout.max_new_tokens",
        ),
    )
    kl_stop: float | None = number(
        None,
        "Limit for kl/reference_nats. A larger value ends the trial.",
        above=0,
        read_if=_KL_IS_MEASURED,
    )
    verbose: bool = flag(
        False,
        "Print example responses, and each change of an actor's policy version.",
        also_called=(
            trl(
                "log_completions",
                "every response is stored anyway, in the trial's directory rollouts/",
                value="true",
            ),
        ),
    )
    leave_out_disturbed: bool = flag(
        True,
        "Exclude a round from measured speeds if other processes took CPU time from the trial "
        "during the round (time/disturbed_fraction above 0.1).",
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between evaluation settings."""
    final = config.eval.final_prompts
    yield (
        final is not None and final < config.eval.prompts,
        "eval.final_prompts",
        f"must be >= eval.prompts={config.eval.prompts}",
    )
    yield (
        config.eval.temperature == 0 and config.eval.samples > 1,
        "eval.samples",
        "must be 1 with eval.temperature=0, which makes all responses to a prompt equal",
    )
