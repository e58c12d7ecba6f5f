"""The `optim` section: the optimizer and its gradient steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import Config, Conflict, none_given, one_of
from grpo_trainable.config.defaults import by_model, by_task
from grpo_trainable.config.foreign_names import IN_ROUNDS, MICROBATCH, trl, verl
from grpo_trainable.config.values import Settings, choice, integer, number, pair

FULL_LR, LORA_LR = 5e-6, 5e-5  # default learning rates for Hugging Face models
NOT_A_SHARE = "a number of rounds, not a share of the steps"
WARMUP_PART, LONGEST_WARMUP = 20, 5  # default warm-up: a twentieth of the rounds, at most 5


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Settings):
    """Optimizer and its gradient steps."""

    SECTION: ClassVar[str] = "optim"

    lr: float = number(
        3e-4,
        "Learning rate of AdamW. With 0, the policy never changes.",
        minimum=0,
        default_by=(
            by_model(
                "adapters of a Hugging Face model",
                lambda model, rank: None if rank is None else LORA_LR,
                keys=("model.lora_rank",),
                told=f"`{LORA_LR:g}` with LoRA",
            ),
            by_model(
                "all weights of a Hugging Face model",
                lambda model: FULL_LR,
                told=f"`{FULL_LR:g}`",
            ),
            by_task(math=0.0001, control=0.003, guess=0.0005, calculator=0.0005),
        ),
        also_called=(trl("learning_rate"), verl("actor.optim.lr")),
    )
    betas: tuple[float, float] = pair(
        (0.9, 0.95),
        "Decay rates of AdamW's two moments.",
        expected="two numbers >= 0 and < 1",
        valid=lambda first, second: 0 <= first < 1 and 0 <= second < 1,
        also_called=(
            trl("adam_beta1", "give both betas, such as [0.9, 0.95]"),
            trl("adam_beta2", "give both betas, such as [0.9, 0.95]"),
        ),
    )
    weight_decay: float = number(
        0.0,
        "Decoupled weight decay of AdamW.",
        minimum=0,
        also_called=(verl("actor.optim.weight_decay"),),
    )
    grad_clip: float = number(
        1.0,
        "Largest norm of a gradient. A gradient with a larger norm is scaled down to this norm.",
        above=0,
        also_called=(trl("max_grad_norm"), verl("actor.grad_clip")),
    )
    microbatch: int = integer(
        16,
        "Number of responses in one forward and backward pass.",
        minimum=1,
        read_if=none_given("optim.microbatch_tokens"),
        default_by=by_task(control=64),
        also_called=(
            trl("per_device_train_batch_size", MICROBATCH),
            verl("actor.ppo_micro_batch_size_per_gpu", MICROBATCH),
        ),
    )
    microbatch_tokens: int | None = integer(
        None,
        "Maximum number of tokens in one forward and backward pass, prompts and padding included. "
        "This limit replaces optim.microbatch. A row with more tokens gets its own pass.",
        minimum=1,
        also_called=(
            verl("actor.ppo_max_token_len_per_gpu"),
            verl("actor.use_dynamic_bsz", "set the maximum number of tokens in one pass"),
        ),
    )
    epochs: int = integer(
        1,
        "Number of passes over a rollout batch that is split into minibatches.",
        minimum=1,
        read_if=one_of("k_mode", "minibatches"),
        also_called=(
            trl("num_iterations", "with k_mode=minibatches; with k_mode=same_batch, set k instead"),
            verl("actor.ppo_epochs", "only with k_mode=minibatches"),
        ),
    )
    schedule: str = choice(
        ("constant", "linear", "cosine"),
        "Schedule of the learning rate over all gradient steps after the warm-up. `linear` and "
        "`cosine` reduce the rate to 0.",
        also_called=(
            trl("lr_scheduler_type", "only constant, linear and cosine, after the warm-up"),
        ),
    )
    warmup_rounds: int = integer(
        0,
        "Number of warm-up rounds. During the warm-up, the learning rate rises linearly to lr with "
        "each gradient step.",
        minimum=0,
        default_by=by_model(
            "early AdamW steps can easily damage a pretrained model",
            lambda model, rounds: min(LONGEST_WARMUP, -(-rounds // WARMUP_PART)),
            keys=("rounds",),
            told=f"a twentieth of the rounds, at most {LONGEST_WARMUP}",
        ),
        also_called=(
            trl("warmup_steps", IN_ROUNDS),
            trl("warmup_ratio", NOT_A_SHARE),
            verl("actor.optim.lr_warmup_steps", IN_ROUNDS),
            verl("actor.optim.lr_warmup_steps_ratio", NOT_A_SHARE),
        ),
    )
    max_skipped_steps: int = integer(
        3,
        "Maximum number of consecutive gradient steps that may be skipped because their loss or "
        "gradient is not finite. One more skipped step ends the trial.",
        minimum=0,
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts that involve microbatches and minibatches."""
    epochs, prompts = config.optim.epochs, config.rollout.prompts
    split = config.k_mode == "minibatches"
    tokens, longest = config.optim.microbatch_tokens, config.rollout.max_new_tokens

    yield (
        tokens is not None and tokens < longest,
        "optim.microbatch_tokens",
        f"must be >= rollout.max_new_tokens={longest}: a single response may be that long",
    )
    yield (
        split and config.k % epochs != 0,
        "k",
        f"must be a multiple of optim.epochs={epochs} with k_mode=minibatches",
    )
    yield (
        split and config.k // epochs > prompts,
        "k",
        f"must be <= optim.epochs × rollout.prompts ({epochs * prompts} here), because each "
        "minibatch needs a group",
    )
