"""The `model` section: the policy that a trial starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_trainable.config.built_in_tasks import BEGIN_RESPONSE
from grpo_trainable.config.conditions import (
    CHAT,
    CONTROL,
    OF_TEXT,
    Config,
    Conflict,
    given,
    none_given,
    one_of,
)
from grpo_trainable.config.defaults import TEMPLATES, by_gpu, by_model, by_task
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.values import (
    Settings,
    choice,
    choice_or_path,
    flag,
    integer,
    json_object,
    name_or_reference,
    number,
    path_or_hub_id,
    text,
)
from grpo_trainable.config.values import path as directory  # ModelSettings has a field `path`
from grpo_trainable.models.hf.json_files import PACKED, ModelFacts

_HUGGING_FACE = given("model.path", "a Hugging Face model")
_LORA = given("model.lora_rank")


# Arguments that this package or transformers passes to every template, so a user cannot set them.
_ALWAYS_SET = {
    *("conversation", "messages", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
}


def _are_arguments(arguments: dict[str, Any]) -> bool:
    return bool(arguments) and _ALWAYS_SET.isdisjoint(arguments)


def _default_chat_template(model: ModelFacts, templates: frozenset[str]) -> str | None:
    usable = model.has_chat_template and templates.isdisjoint(BEGIN_RESPONSE)
    return "on" if usable else None


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Policy that a trial starts from."""

    SECTION: ClassVar[str] = "model"

    preset: str = choice(
        ("tiny", "arithmetic", "games", "small", "course"),
        "Policy to start from. Three policies ship with the package: `tiny` writes stories, "
        "`arithmetic` solves word problems, and `games` makes random moves. `small` and `course` "
        "are larger policies with random weights.",
        read_if=(none_given("model.path"), OF_TEXT),
        default_by=by_task(math="arithmetic", guess="games", calculator="games"),
    )
    path: str | None = path_or_hub_id(
        None,
        "Policy to start from: a directory that launch/pretrain.py wrote, the directory of a "
        "Hugging Face causal language model, or the name of such a model on the hub. A directory "
        "of LoRA adapters is valid too. In that case, the directory becomes model.adapter, and the "
        "model that the adapters belong to becomes model.path.",
        read_if=OF_TEXT,
        also_called=(trl("model_name_or_path"), verl("model.path")),
    )
    env: str | None = name_or_reference(
        None,
        "Gymnasium environment in which a small network acts in place of a language model.",
        what="name that Gymnasium knows",
        read_if=one_of("task.name", CONTROL),
        default_by=by_task(control="CartPole-v1"),
    )
    chat_template: str = choice_or_path(
        ("off", "on"),
        "Chat template that turns a prompt into a conversation: the model's own template (on), or "
        "a jinja file. With `off`, the policy continues the text of the prompt.",
        what="jinja file",
        read_if=OF_TEXT,
        default_by=by_model(
            "the model has a chat template",
            _default_chat_template,
            keys=(TEMPLATES,),
            told="`on` if the model has a chat template, unless task.template or task.code_in "
            "already begins the response",
        ),
    )
    system: str | None = text(
        None,
        "System message for every prompt that has no system message.",
        expected="text that is not blank",
        valid=lambda message: bool(message.strip()),
        read_if=CHAT,
    )
    template_args: str | None = json_object(
        None,
        "Arguments of the chat template, as JSON. The model's template defines their names.",
        expected='a JSON object of arguments, such as {"enable_thinking": false}',
        valid=_are_arguments,
        read_if=CHAT,
        also_called=(
            trl("chat_template_kwargs", "JSON text"),
            verl("data.apply_chat_template_kwargs", "JSON text"),
        ),
    )
    dtype: str = choice(
        ("float32", "bfloat16"),
        "Precision of the weights and computations in the body of the model. The optimizer always "
        "keeps float32 weights and moments.",
        read_if=_HUGGING_FACE,
        also_called=(
            trl("torch_dtype"),
            trl(
                "bf16",
                "only for the model's body; optimizer and head use float32",
                value="bfloat16",
            ),
        ),
    )
    head_fp32: bool = flag(
        True,
        "Compute the output head of a bfloat16 model in float32.",
        read_if=one_of("model.dtype", "bfloat16"),
        harmless=(False,),
        also_called=(trl("cast_lm_head_to_fp32"),),
    )
    sampler_dtype: str = choice(
        ("float32", "bfloat16"),
        "Precision in which the engines torch and vllm sample. `bfloat16` stores and multiplies "
        "the policy's matrices in bfloat16 (with vllm, also its states and its KV cache), so "
        "rounding makes log-probs differ from the learner's. "
        "A model with model.dtype=bfloat16 always samples in bfloat16.",
        read_if=OF_TEXT,
    )
    gradient_checkpointing: bool = flag(
        False,
        "Recompute the activations of each layer in the learner's backward pass instead of "
        "keeping them.",
        read_if=OF_TEXT,
        of_training=True,
        also_called=(verl("model.enable_gradient_checkpointing"),),
    )
    packing: bool = flag(
        True,
        "Pack rows in the learner: process each prompt once for all responses of its group, and "
        "skip padding. Log-probs and gradients differ only by rounding. The model has to support "
        "packing. The default is `false` for a learner on a GPU and for kinds of Hugging Face "
        "models that have not been tested with packing.",
        read_if=OF_TEXT,
        harmless=(False,),
        default_by=(
            by_gpu("on a GPU, packing can take longer than padding", False, told="`false`"),
            by_model(
                "packing is tested with this kind of model",
                lambda model: model.packs or None,
                told=f"`true` for {', '.join(PACKED)} without sliding windows or dynamic RoPE",
            ),
            by_model(
                "packing is not tested with this kind of model",
                lambda model: False,
                told="`false`",
            ),
        ),
        of_training=True,
        also_called=(verl("model.use_remove_padding"),),
    )
    adapter: str | None = directory(
        None,
        "Directory of the LoRA adapters that training starts from. peft must have written the "
        "adapters for the model in model.path. Their rank, scale and layers become lora_rank, "
        "lora_alpha and lora_targets.",
        read_if=_HUGGING_FACE,
        also_called=(verl("model.lora_adapter_path"),),
    )
    lora_rank: int | None = integer(
        None,
        "Rank of the LoRA adapters that are trained in place of the model. `none` trains the "
        "whole model.",
        minimum=1,
        read_if=_HUGGING_FACE,
        also_called=(trl("lora_r"), trl("use_peft"), verl("model.lora_rank")),
    )
    lora_alpha: float | None = number(
        None,
        "Scale of LoRA: the product of its matrices is multiplied by lora_alpha / lora_rank. "
        "`none` means twice lora_rank.",
        above=0,
        read_if=_LORA,
    )
    lora_targets: str = text(
        "all-linear",
        "Layers that get adapters: all linear layers except the head (all-linear), or a list of "
        "module names, separated by commas.",
        expected="all-linear or names separated by commas",
        valid=lambda names: all(name.strip() for name in names.split(",")),
        read_if=_LORA,
        also_called=(
            trl("lora_target_modules"),
            trl("target_modules", "a field of PEFT's LoraConfig, which TRL reads"),
        ),
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts that involve a policy that acts in an environment."""
    acts, engine = config.task.name == CONTROL, config.engine
    advantage, overlong = config.loss.advantage, config.rollout.overlong

    yield (
        acts and config.model.env is None,
        "model.env",
        f"task.name={CONTROL} needs an environment to act in, such as CartPole-v1",
    )
    yield (
        acts and engine not in ("auto", CONTROL),
        "engine",
        f"cannot sample actions; task.name={CONTROL} needs engine=auto or {CONTROL}",
    )
    yield (
        not acts and engine == CONTROL,
        "engine",
        f"only acts in environments; needs task.name={CONTROL}",
    )
    yield (
        acts and advantage == "vine",
        "loss.advantage",
        f"must not be vine with task.name={CONTROL}: an environment cannot return to an earlier "
        "state",
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
