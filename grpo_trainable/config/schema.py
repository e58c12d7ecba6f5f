"""Every setting of a trial: its name, default, range and meaning, each written once.

The sections are nested by owner. `CHECKS` lists all keys, dotted, with what each accepts and means;
docs/config.md is generated from it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from grpo_trainable.config.mix import Entry, mix_of
from grpo_trainable.config.values import (
    Check,
    Settings,
    checks_of,
    choice,
    choice_or_path,
    choice_or_reference,
    flag,
    gpus,
    integer,
    name_or_reference,
    number,
    pair,
    path,
    path_or_hub_id,
    reference,
    task_mix,
    text,
    texts,
)
from grpo_trainable.engines import ENGINES
from grpo_trainable.plugins import is_reference
from grpo_trainable.transports import TRANSPORTS

MAX_WEIGHT = 1e6  # largest weight of a part of the reward


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The policy that a trial starts from."""

    SECTION: ClassVar[str] = "model"

    preset: str = choice(
        ("tiny", "arithmetic", "games", "small", "course"),
        "What the trial starts from: tiny is the shipped policy that writes stories, arithmetic "
        "the one that solves word problems, games the one that plays at random; small and course "
        "are shapes with random weights.",
    )
    path: str | None = path_or_hub_id(
        None,
        "The directory of the policy to start from, as launch/pretrain.py writes it, or of a "
        "Hugging Face causal language model; or the name of one on the hub.",
    )
    env: str | None = name_or_reference(
        None,
        "The environment of Gymnasium in which a small network acts in place of a language model.",
        what="name that Gymnasium knows",
    )
    chat_template: str = choice_or_path(
        ("off", "on"),
        "Whether a prompt becomes a conversation by the chat template that the model was trained "
        "with, or by a jinja file; off: the policy goes on with the text of the prompt.",
        what="jinja file",
    )
    system: str | None = text(
        None,
        "The system message before every prompt that brings none of its own.",
        expected="text that is not blank",
        valid=lambda message: bool(message.strip()),
    )
    dtype: str = choice(
        ("float32", "bfloat16"),
        "The precision in which the body of the model is held and computed; the optimizer always "
        "has float32 weights and moments.",
    )
    head_fp32: bool = flag(True, "Whether the output head of a bfloat16 model computes in float32.")
    sampler_dtype: str = choice(
        ("float32", "bfloat16"),
        "The precision in which policies of this package sample: bfloat16 holds and multiplies "
        "their matrices in it, and log-probs differ from the learner's by rounding.",
    )
    gradient_checkpointing: bool = flag(
        False,
        "Whether the learner computes the activations of each layer again in the backward pass "
        "instead of keeping them.",
    )
    packing: bool = flag(
        False,
        "Whether the learner computes each token once, the prompt of a group for all its "
        "responses and no padding, which changes gradients by rounding.",
    )
    lora_rank: int | None = integer(
        None,
        "The rank of LoRA adapters, which are trained in place of the model; none: all of the "
        "model is trained.",
        minimum=1,
    )
    lora_alpha: float | None = number(
        None,
        "The scale of LoRA: the product of its matrices counts lora_alpha / lora_rank times; "
        "none: twice the rank.",
        above=0,
    )
    lora_targets: str = text(
        "all-linear",
        "Which layers have adapters: all-linear, all but the head, or names of modules separated "
        "by commas.",
        expected="all-linear or names separated by commas",
        valid=lambda names: all(name.strip() for name in names.split(",")),
    )


@dataclass(frozen=True, kw_only=True)
class PromptFileSettings(Settings):
    """The files that a task reads prompts from."""

    train_file: str | None = path(
        None,
        "A JSONL file of training prompts in a layout of the task (docs/howto); without eval_file "
        "a fifth of it is held out.",
    )
    eval_file: str | None = path(
        None,
        "A JSONL file of held-out prompts; without train_file four fifths of it are trained on.",
    )


@dataclass(frozen=True, kw_only=True)
class KeywordSettings(PromptFileSettings):
    """The settings of the keyword task."""

    SECTION: ClassVar[str] = "task"

    keywords_file: str | None = path(
        None, "A UTF-8 file with one keyword a line; none: the shipped nouns."
    )
    keywords_per_prompt: int = integer(1, "How many keywords a prompt asks for at once.", minimum=1)
    match: str = choice(
        ("word", "substring"),
        'How a keyword counts as included: as a whole word, or anywhere, as "hen" in "when".',
    )


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(Settings):
    """How a question is put, and where its answer stands in the response."""

    template: str = choice_or_path(
        ("short", "r1_zero", "boxed", "question_only"),
        "What a question becomes a prompt by; in a file of yours {question} stands for it.",
    )
    answer_in: str = choice(
        ("auto", "tags", "boxed"),
        r"Where a response has its answer: in answer tags after its reasoning, or in \boxed{}; "
        "auto: as the template asks.",
    )


@dataclass(frozen=True, kw_only=True)
class MathSettings(PromptFileSettings, AnswerSettings):
    """The settings of the math task."""

    SECTION: ClassVar[str] = "task"

    equality: str = choice(
        ("auto", "exact", "math_verify"),
        "How an answer is compared with the true one: as a number or a text, or as mathematics by "
        "math-verify; auto: math_verify where a file of problems is given, else exact.",
    )


def _is_options(text: str) -> bool:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(options, dict) and options.keys().isdisjoint({"seed", "size"})


@dataclass(frozen=True, kw_only=True)
class ReasoningGymSettings(AnswerSettings):
    """The settings of the reasoning_gym task."""

    SECTION: ClassVar[str] = "task"

    dataset: str | None = text(
        None,
        "The data set of reasoning-gym that makes the problems and scores the answers.",
        expected="the name of a data set, such as chain_sum",
        valid=str.isidentifier,
    )
    size: int = integer(
        20000,
        "Problems of the data set, a fifth of which is held out; they come round again in another "
        "order.",
        minimum=1,
    )
    options: str = text(
        "{}",
        "The data set's own options as JSON.",
        expected='a JSON object without seed and size, such as {"min_terms": 2}',
        valid=_is_options,
    )


@dataclass(frozen=True, kw_only=True)
class GameSettings(Settings):
    """The settings of the tasks guess and calculator, which have none."""

    SECTION: ClassVar[str] = "task"


@dataclass(frozen=True, kw_only=True)
class ControlSettings(Settings):
    """The settings of the control task, which has none: `model.env` names the environment."""

    SECTION: ClassVar[str] = "task"


@dataclass(frozen=True, kw_only=True)
class MixSettings(Settings):
    """The settings of a mix of tasks."""

    SECTION: ClassVar[str] = "task"

    mix: str | None = task_mix(
        "Tasks and how much of the prompts each has, as JSON, with an object of weight and "
        "settings where a task has some (docs/howto/mix.md); it means task.name=mix."
    )


CONTROL = "control"  # the name of the task of a policy that acts in `model.env`
MIX = "mix"  # the name of a trial's task where it has several

# The settings of each built-in task, besides those that every task has.
TASK_SETTINGS: dict[str, type[Settings]] = {
    "keyword": KeywordSettings,
    "math": MathSettings,
    "reasoning_gym": ReasoningGymSettings,
    "guess": GameSettings,
    "calculator": GameSettings,
    CONTROL: ControlSettings,
    MIX: MixSettings,
}

# Tasks whose prompts only make sense in the environment of the same name.
GAMES = ("guess", "calculator")


def _are_weights(text: str) -> bool:
    try:
        weights = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(weights, dict) or not weights:
        return False
    # True is a number to Python; NaN and infinity are to JSON.
    return all(type(w) in (int, float) and abs(w) <= MAX_WEIGHT for w in weights.values())


@dataclass(frozen=True, kw_only=True)
class CommonTaskSettings(Settings):
    """The settings that every task has."""

    SECTION: ClassVar[str] = "task"

    name: str = choice_or_reference(
        tuple(TASK_SETTINGS), "The task, which makes prompts and scores responses.", what="Class"
    )
    reward: str | None = reference(
        None,
        "A function f(response, ground_truth) that scores a response in place of the task.",
        what="function",
    )
    reward_deadline_s: float = number(
        10.0,
        "Seconds that scoring one response may take, where that has processes of its own.",
        above=0,
    )
    max_error_rate: float = number(
        0.1,
        "The largest share of failed rewards; a trial with more of them ends.",
        minimum=0,
        maximum=1,
    )
    reward_weights: str | None = text(
        None,
        "Parts of the reward and their weights as JSON: their weighted sum is what is trained on; "
        "every reward has the parts format and answer; none: the reward itself.",
        expected='a JSON object of numbers, such as {"answer": 1, "format": 0.5}',
        valid=_are_weights,
    )
    normalize_parts: bool = flag(
        False,
        "Whether each part is normalised within its group, as by group_std, before it is weighted.",
    )
    length_penalty: float = number(
        0.0,
        "α: what each token that a response is longer or shorter than length_target takes off its "
        "reward.",
        minimum=0,
    )
    length_target: int | None = integer(None, "The tokens that a response should have.", minimum=1)
    strict: bool = flag(
        False,
        "Whether the first failed reward ends the trial, and a malformed line of a prompt file is "
        "an error.",
    )


@dataclass(frozen=True, kw_only=True)
class TaskSettings(
    MixSettings, ReasoningGymSettings, MathSettings, KeywordSettings, CommonTaskSettings
):
    """Where prompts come from and how responses are scored. A task of your own adds the settings
    that it declares."""

    # What is given for the settings that a user's task declares: (name, value). The task's class
    # says which there are and what they accept, and only a process that runs the task loads it.
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def part_weights(self) -> dict[str, float]:
        """Part of the reward -> its weight; empty where the reward itself is trained on."""
        weights = json.loads(self.reward_weights or "{}")
        return {part: float(weight) for part, weight in weights.items()}

    @property
    def is_custom(self) -> bool:
        """Whether the task is a user's class."""
        return is_reference(self.name)

    @property
    def has_custom_reward(self) -> bool:
        """Whether code of the user's scores responses: a function, or a task's."""
        mixed = mix_of(self.mix).values()
        return (
            self.reward is not None
            or self.is_custom
            or any("reward" in entry or is_reference(entry["name"]) for entry in mixed)
        )

    @property
    def is_scored_apart(self) -> bool:
        """Whether the task, or what stands in for its reward, scores in processes of its own, since
        that may take long."""
        return scored_apart(self.reward, self.name, self.equality, self.mix)

    def to_dict(self) -> dict[str, Any]:
        """The settings that the task has; those of other tasks are left out."""
        settings = super().to_dict()
        own = dict(settings.pop("own"))
        of_task = {} if self.is_custom else checks_of(TASK_SETTINGS[self.name])
        keys = {**checks_of(CommonTaskSettings), **of_task}
        return {key: settings[key] for key in settings if key in keys} | own


def settled_equality(equality: str, train_file: str | None, eval_file: str | None) -> str:
    """How the math task compares answers, where it may choose."""
    if equality != "auto":
        return equality
    return "exact" if train_file is None and eval_file is None else "math_verify"


def scored_apart(reward: str | None, name: str, equality: str, mix: str | None) -> bool:
    """Whether a task with these settings scores responses, or some of them, in processes of their
    own."""
    verified = name == "reasoning_gym" or (name == "math" and equality == "math_verify")
    mixed = any(_entry_scored_apart(entry) for entry in mix_of(mix).values())
    return reward is not None or is_reference(name) or verified or mixed


def _entry_scored_apart(entry: Entry) -> bool:
    files = entry.get("train_file"), entry.get("eval_file")
    equality = settled_equality(entry.get("equality", "auto"), *files)
    return scored_apart(entry.get("reward"), entry["name"], equality, None)


def _is_stop(text: str) -> bool:
    # U+FFFD stands for bytes that are no text, half a surrogate pair for nothing.
    return bool(text) and not re.search("[\0\ufffd\ud800-\udfff]", text)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """How responses to train on are sampled."""

    SECTION: ClassVar[str] = "rollout"

    prompts: int = integer(16, "Prompts of one rollout batch.", minimum=1)
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
    )
    group_size: int = integer(4, "Responses sampled for each prompt.", minimum=1)
    min_new_tokens: int = integer(1, "Tokens of a response before which it cannot end.", minimum=1)
    max_new_tokens: int = integer(60, "Tokens after which a response is cut off.", minimum=1)
    stop: tuple[str, ...] | None = texts(
        None,
        "Strings after which a response ends, and which stay in it, one or a JSON list; a special "
        "token of the tokenizer is spelt out; none: those that the task asks for.",
        expected="a text that is not empty, or a JSON list of such texts",
        valid=_is_stop,
    )
    temperature: float = number(
        0.8, "The temperature of sampling, under which the learner scores tokens too.", above=0
    )
    zero_advantage: str = choice(
        ("keep", "filter", "resample"),
        "What becomes of a group whose rewards are all equal, which teaches nothing: it stays in "
        "its rollout batch, it is left out, or other prompts are drawn in its place.",
    )
    oversample: float = number(
        4.0,
        "How many times as many prompts as a rollout batch has may be drawn for it in all.",
        minimum=1,
    )
    redraws: int = integer(
        8,
        "How many times in a row prompts may be drawn in place of those that were left out.",
        minimum=1,
    )
    overlong: str = choice(
        ("score", "filter", "penalty", "interrupt"),
        "What becomes of a response that was cut off or nearly so: it counts as any other, it is "
        "left out of the loss, its length is taken off its reward, or it is interrupted in time "
        "and told to answer.",
    )
    overlong_buffer: int | None = integer(
        None,
        "The last of max_new_tokens, in which the penalty grows from 0 to all of it, or which an "
        "interruption and the answer after it share; none: a fifth of them.",
        minimum=1,
    )
    overlong_penalty: float = number(
        1.0, "What a response of max_new_tokens loses of its reward.", above=0
    )
    interruption: str = text(
        "Okay, time is up. Let me formulate a final answer now. </think>",
        "The text that an interrupted response reads, as if it had written it; special tokens are "
        "spelt out.",
        expected="text that is not empty",
        valid=bool,
    )
    thinking_end: str = text(
        "</think>",
        "What a response writes before its answer: one that has written it in time is not "
        "interrupted; a special token is spelt out.",
        expected="a text that is not empty",
        valid=_is_stop,
    )


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Settings):
    """Episodes of several turns: what the policy writes is answered by an environment."""

    SECTION: ClassVar[str] = "env"

    name: str = choice_or_reference(
        ("off", "guess", "calculator", "python"),
        "The environment in which responses are played, and which rewards them in place of the "
        "task: a number to guess, a calculator, a Python interpreter, or a Class of yours.",
        what="Class",
    )
    allow_unsafe: bool = flag(
        False,
        "Whether code that the policy writes runs uncontained: it can then read, change and delete "
        "your files and end your processes.",
    )
    max_turns: int = integer(8, "Actions of an episode after which it is cut off.", minimum=1)
    discount: float = number(
        1.0, "What the reward of an action counts for each action before it.", above=0, maximum=1
    )
    step_deadline_s: float = number(
        10.0, "Seconds that an environment may take to begin or to answer.", above=0
    )
    episode_deadline_s: float = number(
        60.0, "Seconds that an environment may take for an episode in all.", above=0
    )
    patience_s: float = number(
        1.0,
        "Seconds that a call of a generator waits in all for environments while others of its "
        "episodes could go on; a call that waits no longer repeats bit by bit.",
        minimum=0,
    )

    @property
    def plays(self) -> bool:
        """Whether responses are episodes."""
        return self.name != "off"


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    """Which prompts are drawn: passes over all of them, or by how often the policy solves each."""

    SECTION: ClassVar[str] = "pools"

    enabled: bool = flag(
        False,
        "Whether prompts are drawn from pools, easy, mid and hard ones, by the share of right "
        "responses so far, in place of passes over all prompts.",
    )
    easy: float = number(0.1, "The share of prompts drawn from the easy ones.", minimum=0)
    mid: float = number(
        0.8, "The share drawn from those between, to which new prompts belong.", minimum=0
    )
    hard: float = number(0.1, "The share drawn from the hard ones.", minimum=0)
    easy_above: float = number(0.8, "The pass rate above which a prompt is easy.")
    hard_below: float = number(0.2, "The pass rate below which a prompt is hard.")
    memory: float = number(
        0.5,
        "The weight of earlier groups in the pass rate of a prompt; 0: only the latest counts.",
        minimum=0,
        below=1,
    )


PUBLISHED = "whole algorithms are presets, such as --preset rloo (docs/algorithms.md#presets)"


@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """What the gradient steps minimise."""

    SECTION: ClassVar[str] = "loss"

    type: str = choice_or_reference(
        (
            *("grpo_clip", "no_baseline", "reinforce_with_baseline", "dapo", "ppo", "cispo"),
            *("gspo", "gmpo", "sapo", "topr", "dppo_tv", "dppo_kl"),
            *("m2po", "clip_cov", "kl_cov"),
        ),
        "The policy loss of a token, or a function of your own that computes it.",
        what="function",
        advice=PUBLISHED,
    )
    advantage: str = choice_or_reference(
        (
            *("group_std", "none", "group_mean", "rloo", "batch"),
            *("group_mean_batch_std", "maxrl", "zero", "gae", "vine", "group_to_go"),
        ),
        "How rewards become advantages, or a function of your own; none: the reward itself; zero: "
        "not at all, so that only a teacher counts; gae: of tokens, by a critic; vine: of tokens, "
        "by completions of the response; group_to_go: of steps, by what the episodes of the group "
        "earn from there on.",
        what="function",
        advice=PUBLISHED,
    )
    advantage_eps: float = number(
        1e-8,
        "What is added to the standard deviation, or with maxrl to the mean, that rewards are "
        "divided by; a function of your own is given it.",
        above=0,
    )
    gamma: float = number(
        1.0,
        "γ: what a reward counts a token earlier than it is earned.",
        minimum=0,
        maximum=1,
    )
    gae_lambda: float = number(
        1.0,
        "λ of generalised advantage estimation: 1 trusts the rewards alone, 0 the critic's value "
        "of the next state.",
        minimum=0,
        maximum=1,
    )
    whiten: bool = flag(
        True,
        "Whether the advantages of all tokens of a rollout batch are brought to mean 0 and "
        "standard deviation 1.",
    )
    aggregation: str = choice(
        ("sequence_mean", "token_mean", "constant"),
        "How the losses of tokens are averaged into the loss of a batch.",
    )
    clip: float | None = number(
        None,
        "ε of the clip range: the ratio is held above 1 − ε, with gmpo above e^−ε; how far a "
        "probability (dppo_tv) or its KL (dppo_kl) may move down; none: 0.2, but 0.0003 for gspo, "
        "0.4 for gmpo, 0.15 for dppo_tv and 0.05 for dppo_kl.",
        above=0,
        below=1,
    )
    clip_high: float | None = number(
        None,
        "The same on the other side: the ratio is held below 1 + clip_high, with gmpo below "
        "e^clip_high; none: clip, but 0.28 for dapo, and 0.0004 for gspo where clip is none too.",
        above=0,
    )
    dual_clip: float | None = number(
        None,
        "The ratio of a token with a negative advantage is held below it, so that one unlikely "
        "token cannot outweigh all others; none: it is not.",
        above=1,
    )
    tau_positive: float = number(
        1.0, "τ of tokens with a positive advantage, the steepness of their gate.", above=0
    )
    tau_negative: float = number(
        1.05, "τ of all other tokens; above tau_positive, their gate closes earlier.", above=0
    )
    second_moment: float = number(
        0.04,
        "What the mean (log ratio)² of tokens may be; those with the largest are left out until it "
        "is.",
        minimum=0,
    )
    cov_fraction: float = number(
        2e-4,
        "The share of a gradient step's tokens, at least one, that is singled out because "
        "log-prob and advantage go together.",
        above=0,
        maximum=1,
    )
    cov_band: tuple[float, float] = pair(
        (1.0, 5.0),
        "The band of covariances that clip_cov draws its tokens from.",
        expected="two numbers, low < high",
        valid=lambda low, high: low < high,
    )
    cov_kl_coef: float = number(
        1.0,
        "The weight of the KL to the old policy on the tokens that kl_cov singles out.",
        minimum=0,
    )
    teacher: str | None = path_or_hub_id(
        None,
        "The teacher, a policy with the same tokenizer: its directory, or that of a Hugging Face "
        "model, or the name of one on the hub; its log-prob of each token, less the sampler's, is "
        "added to the advantage.",
    )
    teacher_coef: float = number(1.0, "The weight of that.", above=0)
    kl_coef: float = number(0.0, "β, the weight of the KL to the reference.", minimum=0)
    kl_in: str = choice(
        ("loss", "reward"),
        "Where that KL counts: as a term of the loss, or taken off the reward of each response "
        "before rewards become advantages.",
    )
    kl_target: float | None = number(
        None,
        "Nats of a response that the KL to the reference is steered to, by changing β after each "
        "round; none: β stays as it is.",
        above=0,
    )
    kl_gain: float = number(
        0.1,
        "How hard it is steered: β grows or shrinks by at most a fifth of it in a round.",
        above=0,
        maximum=1,
    )
    kl_estimator: str = choice(
        ("k3", "k2", "k1"),
        "The estimator of the KL inside the loss; k1 is refused there, since its expected gradient "
        "is 0.",
    )
    kl_monitor: bool = flag(
        True, "Whether the KL is measured after each round, which costs forward passes."
    )
    importance_cap: float | None = number(
        None,
        "C, the largest importance weight; 0: no importance weights; none: 0 with the engines "
        "auto, torch and hf, 2 with others and with model.sampler_dtype=bfloat16, whose log-probs "
        "may not be the learner's.",
        minimum=0,
    )
    importance_level: str = choice(
        ("token", "sequence"),
        "Whose importance weight it is: each token's, or one for the response, the product of its "
        "tokens'.",
    )
    importance_rule: str = choice(
        ("truncate", "mask"),
        "What becomes of a weight above the cap: it is cut to the cap, or it is 0.",
    )
    importance_floor: float | None = number(
        None, "A weight below it is 0; none: no weight is too small.", above=0
    )


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """How the critic of `loss.advantage=gae` is made and trained."""

    SECTION: ClassVar[str] = "critic"

    body: str = choice(
        ("own", "shared"),
        "What the critic computes values from: a copy of the starting policy that it trains for "
        "itself, or the hidden states of the policy in training.",
    )
    lr: float | None = number(
        None,
        "The learning rate of what only the critic uses; none: 5 times optim.lr.",
        minimum=0,
    )
    coef: float = number(
        0.5,
        "The weight of the value loss, which trains the body of the policy too.",
        above=0,
    )
    clip: float = number(
        0.2,
        "How far a value may move from the one before the round until its loss stops pulling; 0: "
        "as far as it likes.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class VineSettings(Settings):
    """How `loss.advantage=vine` values the states of a response."""

    SECTION: ClassVar[str] = "vine"

    samples: int = integer(
        4, "K, the completions that are sampled from each state to value it.", minimum=1
    )
    states: str = choice(
        ("chunks", "sentences"),
        "Which states are valued beside the prompt: one every chunk_tokens tokens, or the ends of "
        "sentences and lines that are at least as far apart.",
    )
    chunk_tokens: int = integer(
        16, "Tokens between two states, which share an advantage.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Settings):
    """How gradient steps are taken."""

    SECTION: ClassVar[str] = "optim"

    lr: float = number(
        3e-4, "The learning rate of AdamW; 0 makes a control run that never learns.", minimum=0
    )
    betas: tuple[float, float] = pair(
        (0.9, 0.95),
        "The decay rates of AdamW's two moments.",
        expected="two numbers >= 0 and < 1",
        valid=lambda first, second: 0 <= first < 1 and 0 <= second < 1,
    )
    weight_decay: float = number(0.0, "The decoupled weight decay of AdamW.", minimum=0)
    grad_clip: float = number(
        1.0, "The largest norm of a gradient; a longer one is scaled.", above=0
    )
    microbatch: int = integer(16, "Responses of one forward and backward pass.", minimum=1)
    microbatch_tokens: int | None = integer(
        None,
        "Tokens of one forward and backward pass, prompts and padding included, in place of "
        "microbatch; a longer row is a pass by itself.",
        minimum=1,
    )
    epochs: int = integer(1, "Passes over a rollout batch that is split.", minimum=1)
    schedule: str = choice(
        ("constant", "linear", "cosine"),
        "The course of the learning rate over all gradient steps.",
    )
    max_skipped_steps: int = integer(
        3,
        "Gradient steps in a row that may be skipped because they are not finite; more end the "
        "trial.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """How the policy is evaluated on held-out prompts."""

    SECTION: ClassVar[str] = "eval"

    every: int = integer(
        16, "Rounds between evaluations; round 0 and the last are always evaluated.", minimum=1
    )
    prompts: int = integer(128, "Held-out prompts of an evaluation.", minimum=1)
    samples: int = integer(2, "Responses sampled for each held-out prompt.", minimum=1)
    temperature: float = number(
        0.8,
        "The temperature of sampling in an evaluation; 0 takes the most likely token.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class BufferSettings(Settings):
    """How rollouts are used again; `buffer_capacity` turns it on."""

    SECTION: ClassVar[str] = "buffer"

    sample_batches: int = integer(
        1, "How many rollout batches' worth of groups a gradient step draws.", minimum=1
    )
    max_age: int | None = integer(
        None,
        "Rounds that a group may be behind when it is trained on; none: lag + buffer_capacity − 1.",
        minimum=0,
    )
    fresh_fraction: float = number(
        0.5, "The share of a draw that has not been trained on before.", above=0, maximum=1
    )


def fresh_wanted(fraction: float, count: int) -> int:
    """ceil(fraction · count), of the number that was meant: 0.28 · 25 is 7."""
    return math.ceil(round(fraction * count, 9))


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """When checkpoints are written, and which are kept."""

    SECTION: ClassVar[str] = "checkpoint"

    every: int = integer(10, "Rounds between checkpoints.", minimum=1)
    keep: int | None = integer(
        2,
        "Checkpoints that are kept, beside those that another trial may go on from under PBT; "
        "none: all.",
        minimum=1,
        optional=True,
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
    )
    kl_stop: float | None = number(None, "A larger kl/reference_nats ends the trial.", above=0)
    verbose: bool = flag(False, "Whether changes of version and example responses are printed.")
    leave_out_disturbed: bool = flag(
        True,
        "Whether speeds leave out the rounds in which other work took CPU time from the trial "
        "(time/disturbed_fraction above 0.1).",
    )


@dataclass(frozen=True, kw_only=True)
class ResourceSettings(Settings):
    """The actors of a trial and what they reserve."""

    SECTION: ClassVar[str] = "resources"

    num_generators: int = integer(1, "Generator actors of a trial.", minimum=1)
    reference: str = choice(
        ("learner", "generator"),
        "Who makes the forward pass of the frozen reference: with lag >= 1 a generator that waits "
        "for the learner has the time for it.",
    )
    generator_cpus: float | None = number(
        None,
        "CPUs of each generator, and of a colocated worker while it samples; none: 0.95 / "
        "num_generators.",
        minimum=0.01,
    )
    generator_gpus: float = gpus(0.0, "GPUs of each generator.")
    num_learners: int = integer(
        1, "Learner actors of a trial, which share the rows of each gradient step.", minimum=1
    )
    learner_strategy: str = choice(
        ("replicated", "fsdp2"),
        "How several learners hold the policy: each of them whole, or a part of every parameter "
        "and of its moments each.",
    )
    elastic: bool = flag(
        False,
        "Whether the other learners go on where one but the first is lost, on CPUs only; false: "
        "the trial fails and goes on from its checkpoint.",
    )
    learner_cpus: float = number(0.95, "CPUs of each learner.", minimum=0.01)
    learner_gpus: float = gpus(0.0, "GPUs of each learner.")
    worker_cpus: float = number(
        0.95,
        "CPUs that a colocated worker trains with; 1.9 buy a second thread, which makes gradient "
        "steps of the shipped policy 1.4 to 1.5 times as fast.",
        minimum=0.01,
    )
    worker_gpus: float = gpus(0.0, "GPUs of a colocated worker.")
    spread: str = choice(
        ("pack", "spread", "one_node_learners"),
        "How the actors of a trial are placed on the nodes of a cluster: on as few as possible; on "
        "as many, so that the death of one costs few of them; or all learners on one, whose "
        "gradients then never leave it, and generators wherever there is room.",
    )
    reward_workers: int = integer(
        1, "Processes of each generator that call your own reward.", minimum=1
    )
    reward_cpus: float = number(
        0.0, "CPUs reserved for these processes beside the generator's own.", minimum=0
    )
    deadline_s: float = number(
        600.0,
        "Seconds without an answer or progress after which an actor that owes one is given up; an "
        "answer may take as long to arrive from another machine.",
        above=0,
    )

    @property
    def actors(self) -> dict[str, Any]:
        """How many actors there are and which GPUs they have, for `Transport.refuses_actors`."""
        names = ("generator_gpus", "learner_gpus", "num_generators", "num_learners")
        return {name: getattr(self, name) for name in names}


def _is_label(label: str) -> bool:
    # Labels become parts of trial names and of report tables: no path may hide in them.
    return (
        0 < len(label) <= 64 and label.isprintable() and not re.search(r"[/\\]|^\.|^\s|\s$", label)
    )


@dataclass(frozen=True, kw_only=True)
class TrialSettings(Settings):
    """All settings: what is usually searched stands at the top, the rest is nested by owner."""

    arm: str = text(
        "custom",
        "The label of a search arm.",
        expected="a label of 1 to 64 printable characters without slashes",
        valid=_is_label,
    )
    placement: str = choice(
        ("colocated", "disaggregated"),
        "Whether one actor samples and trains in turn, or generators and a learner work "
        "side by side.",
    )
    rounds: int = integer(96, "Rounds after which the trial is done.", minimum=1)
    k: int = integer(1, "Gradient steps of a round.", minimum=1)
    k_mode: str = choice(
        ("same_batch", "minibatches", "fresh_batches"),
        "What the k steps train on: one rollout batch k times, its parts, or k batches.",
    )
    lag: int = integer(
        0, "Rounds that a group may be behind when it is first trained on.", minimum=0
    )
    weight_update: str = choice(
        ("between_batches", "interrupt_recompute", "in_flight"),
        "When generators take new weights: between batches, or in the middle of one, where "
        "interrupt_recompute rebuilds the KV cache and in_flight keeps it.",
    )
    buffer_capacity: int = integer(
        1, "Rounds' worth of rollouts that are kept; 1: no replay.", minimum=1
    )
    buffer_sampling: str = choice(
        ("recency", "uniform", "fifo", "mixed"), "Which groups of the buffer are drawn."
    )
    engine: str = choice_or_reference(
        ("auto", *ENGINES),
        "What samples the responses; auto: torch for policies of this package, hf for Hugging Face "
        "models; vllm takes both; or a Class of yours.",
        what="Class",
    )
    transport: str = choice_or_reference(
        ("auto", *TRANSPORTS),
        "How weights travel; auto: in_process when colocated, shm on one machine, object_store "
        "to others, by_machine where generators are on the learner's and on others; or a record "
        "of yours.",
    )
    transport_dtype: str = choice(
        ("float32", "bfloat16"), "The precision of the weights on their way."
    )
    seed: int = integer(0, "What every random draw is keyed by.", minimum=0, maximum=2**32 - 1)

    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    env: EnvSettings = EnvSettings()
    pools: PoolSettings = PoolSettings()
    loss: LossSettings = LossSettings()
    critic: CriticSettings = CriticSettings()
    vine: VineSettings = VineSettings()
    optim: OptimSettings = OptimSettings()
    eval: EvalSettings = EvalSettings()
    buffer: BufferSettings = BufferSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    callbacks: CallbackSettings = CallbackSettings()
    resources: ResourceSettings = ResourceSettings()

    def __getitem__(self, key: str) -> Any:
        """The value at a dotted key: `config["optim.lr"]`."""
        value: Any = self
        for name in key.split("."):
            value = getattr(value, name)
        return value


DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(TrialSettings)}
SECTIONS: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if is_dataclass(value)}


# Every key, dotted.
CHECKS: dict[str, Check] = {
    **checks_of(TrialSettings),
    **{
        key: check
        for name, section in SECTIONS.items()
        for key, check in checks_of(section, f"{name}.").items()
    },
}

# Keys of the sections of a task and of sampling that change neither what is sampled nor its reward,
# only what training makes of that, unless rollout.overlong=interrupt.
OF_TRAINING = (
    *("task.length_penalty", "task.length_target", "task.normalize_parts"),
    *("rollout.overlong", "rollout.overlong_buffer", "rollout.overlong_penalty"),
)
