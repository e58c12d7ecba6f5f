"""The policy that a trial starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import (
    CONTROL,
    OF_TEXT,
    Condition,
    Config,
    Conflict,
    given,
    none_given,
    one_of,
)
from grpo_trainable.config.defaults import by_task
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.values import (
    Settings,
    choice,
    choice_or_path,
    flag,
    integer,
    name_or_reference,
    number,
    path_or_hub_id,
    text,
)

_HUGGING_FACE = given("model.path", "a Hugging Face model")
_LORA = given("model.lora_rank")
_CHAT = Condition(
    keys=("model.chat_template",),
    needs="model.chat_template=on or a file",
    holds=lambda template: template != "off",
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The policy that a trial starts from."""

    SECTION: ClassVar[str] = "model"

    preset: str = choice(
        ("tiny", "arithmetic", "games", "small", "course"),
        "What the trial starts from: tiny is the shipped policy that writes stories, arithmetic "
        "the one that solves word problems, games the one that plays at random; small and course "
        "are shapes with random weights.",
        read_if=(none_given("model.path"), OF_TEXT),
        default_by=by_task(math="arithmetic", guess="games", calculator="games"),
    )
    path: str | None = path_or_hub_id(
        None,
        "The directory of the policy to start from, as launch/pretrain.py writes it, or of a "
        "Hugging Face causal language model; or the name of one on the hub.",
        read_if=OF_TEXT,
        also_called=(trl("model_name_or_path"), verl("model.path")),
    )
    env: str | None = name_or_reference(
        None,
        "The environment of Gymnasium in which a small network acts in place of a language model.",
        what="name that Gymnasium knows",
        read_if=one_of("task.name", CONTROL),
        default_by=by_task(control="CartPole-v1"),
    )
    chat_template: str = choice_or_path(
        ("off", "on"),
        "Whether a prompt becomes a conversation by the chat template that the model was trained "
        "with, or by a jinja file; off: the policy goes on with the text of the prompt.",
        what="jinja file",
        read_if=OF_TEXT,
    )
    system: str | None = text(
        None,
        "The system message before every prompt that brings none of its own.",
        expected="text that is not blank",
        valid=lambda message: bool(message.strip()),
        read_if=_CHAT,
    )
    dtype: str = choice(
        ("float32", "bfloat16"),
        "The precision in which the body of the model is held and computed; the optimizer always "
        "has float32 weights and moments.",
        read_if=_HUGGING_FACE,
        also_called=(
            trl(
                "bf16", "of the body of the model; optimizer and head are float32", value="bfloat16"
            ),
        ),
    )
    head_fp32: bool = flag(
        True,
        "Whether the output head of a bfloat16 model computes in float32.",
        read_if=one_of("model.dtype", "bfloat16"),
        harmless=(False,),
    )
    sampler_dtype: str = choice(
        ("float32", "bfloat16"),
        "The precision in which policies of this package sample: bfloat16 holds and multiplies "
        "their matrices in it, and log-probs differ from the learner's by rounding.",
        read_if=OF_TEXT,
    )
    gradient_checkpointing: bool = flag(
        False,
        "Whether the learner computes the activations of each layer again in the backward pass "
        "instead of keeping them.",
        read_if=OF_TEXT,
        of_training=True,
        also_called=(verl("model.enable_gradient_checkpointing"),),
    )
    packing: bool = flag(
        False,
        "Whether the learner computes each token once, the prompt of a group for all its "
        "responses and no padding, which changes gradients by rounding.",
        read_if=OF_TEXT,
        of_training=True,
        also_called=(verl("model.use_remove_padding"),),
    )
    lora_rank: int | None = integer(
        None,
        "The rank of LoRA adapters, which are trained in place of the model; none: all of the "
        "model is trained.",
        minimum=1,
        read_if=_HUGGING_FACE,
        also_called=(trl("lora_r"), verl("model.lora_rank")),
    )
    lora_alpha: float | None = number(
        None,
        "The scale of LoRA: the product of its matrices counts lora_alpha / lora_rank times; "
        "none: twice the rank.",
        above=0,
        read_if=_LORA,
    )
    lora_targets: str = text(
        "all-linear",
        "Which layers have adapters: all-linear, all but the head, or names of modules separated "
        "by commas.",
        expected="all-linear or names separated by commas",
        valid=lambda names: all(name.strip() for name in names.split(",")),
        read_if=_LORA,
        also_called=(trl("lora_target_modules"),),
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    acts, engine = config.task.name == CONTROL, config.engine
    advantage, overlong = config.loss.advantage, config.rollout.overlong

    yield (
        acts and config.model.env is None,
        "model.env",
        f"task.name={CONTROL} needs the environment to act in, such as CartPole-v1",
    )
    yield (
        acts and engine not in ("auto", CONTROL),
        "engine",
        f"samples no actions; task.name={CONTROL} needs engine=auto or {CONTROL}",
    )
    yield (
        not acts and engine == CONTROL,
        "engine",
        f"acts in environments; needs task.name={CONTROL}",
    )
    yield (
        acts and advantage == "vine",
        "loss.advantage",
        f"must not be vine with task.name={CONTROL}: an environment cannot be put back",
    )
    yield (
        not acts and advantage == "group_to_go",
        "loss.advantage",
        f"group_to_go compares episodes step by step; needs task.name={CONTROL}",
    )
    yield (
        acts and overlong == "interrupt",
        "rollout.overlong",
        f"must not be interrupt with task.name={CONTROL}, which has no text",
    )
