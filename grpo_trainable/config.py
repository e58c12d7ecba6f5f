"""Every setting of a trial: its name, meaning, unit, default and range, each written once.

`GRPOConfig.from_dict` is the door. It refuses unknown keys, wrong types, values out of range,
contradictions, settings that the chosen combination does not read (rules.py) and choices that this
version names but has not built, each as a one-line `ConfigError`, before Ray or any actor starts.
Behind the door nobody touches a dict.

Only the standard library is imported: the launcher reads this file before torch and Ray load.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

from grpo_trainable.rules import HARMLESS, READ_WITH, unmet


class ConfigError(ValueError):
    """The user's mistake, in one line: the dotted key, the value got, what would be valid."""


# ---- What a single value may be --------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """What one key accepts."""

    default: Any
    expected: str  # completes "must be …"
    convert: Callable[[Any], Any]  # the value as stored; ValueError or TypeError when invalid
    optional: bool  # None is valid
    is_text: bool  # any text is a value, so "7" stays text on the command line
    choices: tuple[str, ...] = ()  # the valid ones, where they can be listed


def _checked(
    default: Any,
    expected: str,
    convert: Callable[[Any], Any],
    *,
    optional: bool = False,
    is_text: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    optional = optional or default is None
    expected = f"none or {expected}" if optional else expected
    check = Check(default, expected, convert, optional, is_text, choices)
    return field(default=default, metadata={"check": check})


def _integer(
    default: int | None, *, minimum: int, maximum: int | None = None, optional: bool = False
) -> Any:
    expected = f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError
        number = int(value)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError
        return number

    return _checked(default, expected, convert, optional=optional)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _number(
    default: float | None,
    *,
    above: float | None = None,
    minimum: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> Any:
    bounds = ((">", above), (">=", minimum), ("<", below), ("<=", maximum))
    limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def convert(value: Any) -> float:
        number = _finite(value)
        if (
            (above is not None and number <= above)
            or (minimum is not None and number < minimum)
            or (below is not None and number >= below)
            or (maximum is not None and number > maximum)
        ):
            raise ValueError
        return number

    return _checked(default, f"a number {limits}", convert)


def _pair(default: tuple[float, float] | None, expected: str, valid: Callable[..., bool]) -> Any:
    def convert(value: Any) -> tuple[float, float]:
        if not isinstance(value, list | tuple):
            raise TypeError
        first, second = (_finite(item) for item in value)
        if not valid(first, second):
            raise ValueError
        return first, second

    return _checked(default, expected, convert)


def _flag(default: bool) -> Any:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return _checked(default, "true or false", convert)


def _choice(default: str, *others: str) -> Any:
    """The default is the first of the values named in an error."""
    values = (default, *others)

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if value not in values:
            raise ValueError
        return value

    return _checked(default, f"one of {', '.join(values)}", convert, is_text=True, choices=values)


def _text(default: str | None, expected: str, valid: Callable[[str], bool]) -> Any:
    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if not valid(value):
            raise ValueError
        return value

    return _checked(default, expected, convert, is_text=True)


def _path(default: str | None) -> Any:
    return _text(default, "a non-empty path", lambda text: bool(text.strip()) and "\0" not in text)


def _is_label(text: str) -> bool:
    # Labels become parts of trial names and of report tables: no path may hide in them.
    return 0 < len(text) <= 64 and text.isprintable() and not re.search(r"[/\\]|^\.|^\s|\s$", text)


def _is_function(text: str) -> bool:
    where, _, function = text.rpartition(":")
    if "\0" in where or not function.isidentifier():
        return False
    if where.endswith(".py"):
        return True
    return all(part.isidentifier() for part in where.split("."))


def _gpus(default: float) -> Any:
    def convert(value: Any) -> float:
        number = _finite(value)
        if number < 0 or (number > 1 and number != int(number)):
            raise ValueError
        return number

    # Ray shares one GPU by fractions and gives several only whole.
    return _checked(default, "a number from 0 to 1, or a whole number above", convert)


def shown(value: Any) -> str:
    """A value as an error prints it: one line, at most 80 characters, "1" told apart from 1."""
    if value is None:
        return "none"
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./~][\w./:~+-]*", value)
    if is_word and value.lower() not in ("true", "false", "null", "nan", "infinity"):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=repr)
        except (TypeError, ValueError, RecursionError):
            # A key that is no text, a loop, an integer too long for Python to print.
            text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:79] + "…"


# ---- The sections, by owner ------------------------------------------------------------------


class _Settings:
    """Checks and converts every field of the dataclass below it, however it was constructed."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        prefix = f"{self.SECTION}." if self.SECTION else ""
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            check: Check | None = item.metadata.get("check")
            if check is not None:
                object.__setattr__(self, item.name, _convert(prefix + item.name, value, check))
            elif type(value) is not type(item.default):
                raise ConfigError(f"{item.name}={shown(value)}: {_section_expected(item.default)}")


def _convert(key: str, value: Any, check: Check) -> Any:
    if value is None and check.optional:
        return None
    try:
        return check.convert(value)
    except (TypeError, ValueError, OverflowError):
        is_text = isinstance(value, str)
        near = difflib.get_close_matches(value, check.choices, n=1) if is_text else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}={shown(value)}: must be {check.expected}{hint}") from None


def _section_expected(section: Any) -> str:
    return "must be a mapping with keys from " + ", ".join(item.name for item in fields(section))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Settings):
    SECTION: ClassVar[str] = "model"

    preset: str = _choice("tiny", "small", "course")  # the shape of TransformerLM
    path: str | None = _path(None)  # a policy directory; None: `tiny` starts from the shipped
    #                                 policy, the other presets from random weights drawn by `seed`
    head_fp32: bool = _flag(False)  # output head in float32 when the body is bfloat16
    dtype: str = _choice("float32", "bfloat16")  # of the body


@dataclass(frozen=True, kw_only=True)
class TaskSettings(_Settings):
    SECTION: ClassVar[str] = "task"

    name: str = _choice("keyword", "math")
    keywords_file: str | None = _path(None)  # one word a line, UTF-8; None: the shipped nouns
    keywords_per_prompt: int = _integer(1, minimum=1)
    match: str = _choice("word", "substring")  # "hen" in "when" counts only as a substring
    train_file: str | None = _path(None)  # JSONL with prompt, answer, optional keywords
    eval_file: str | None = _path(None)  # the same; one file alone is split 80/20
    reward: str | None = _text(  # None: the task's own reward
        None, "module:function or file.py:function", _is_function
    )
    length_penalty: float = _number(0.0, minimum=0)  # α of r − α·|n_target − n|, n in tokens
    reward_deadline_s: float = _number(10.0, above=0)  # seconds for one call of a user's reward
    max_error_rate: float = _number(0.1, minimum=0, maximum=1)  # of rewards; more ends the trial
    strict: bool = _flag(False)  # the first failed reward ends the trial


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(_Settings):
    SECTION: ClassVar[str] = "rollout"

    prompts: int = _integer(16, minimum=1)  # of one rollout batch
    # Prompts sampled together. None: the generators share a round out evenly; one takes it whole.
    unit_prompts: int | None = _integer(None, minimum=1)
    group_size: int = _integer(4, minimum=1)  # responses to one prompt
    min_new_tokens: int = _integer(1, minimum=1)  # no end-of-text before it
    max_new_tokens: int = _integer(60, minimum=1)
    temperature: float = _number(0.8, above=0)  # the learner scores under it too
    zero_advantage: str = _choice("keep", "filter", "resample")  # groups of equal rewards
    oversample: float = _number(1.0, minimum=1)  # generated / needed, when resampling
    overlong: str = _choice("score", "filter", "penalty", "interrupt")  # truncated responses


@dataclass(frozen=True, kw_only=True)
class LossSettings(_Settings):
    SECTION: ClassVar[str] = "loss"

    type: str = _choice(
        "grpo_clip", "no_baseline", "reinforce_with_baseline", "dapo", "cispo", "gspo", "ppo"
    )
    advantage: str = _choice("group_std", "none", "group_mean", "rloo", "batch", "gae", "vine")
    advantage_eps: float = _number(1e-8, above=0)  # added to the standard deviation
    aggregation: str = _choice("sequence_mean", "token_mean", "constant")
    # ε: the ratio is held in [1 − ε, 1 + clip_high]. None: 0.2, for gspo what GSPO_CLIPS says.
    clip: float | None = _number(None, above=0, below=1)
    clip_high: float | None = _number(None, above=0)  # None: clip, for dapo DAPO_CLIP_HIGH
    kl_coef: float = _number(0.0, minimum=0)  # β of the KL to the reference; 0 only monitors
    kl_estimator: str = _choice("k3", "k1", "k2")  # of the KL inside the loss
    kl_monitor: bool = _flag(True)  # measure KL after each round; costs forward passes
    importance_cap: float | None = _number(None, above=0)  # C of truncated importance sampling


@dataclass(frozen=True, kw_only=True)
class OptimSettings(_Settings):
    SECTION: ClassVar[str] = "optim"

    lr: float = _number(2e-4, minimum=0)  # AdamW; 0 is a control run that never learns
    betas: tuple[float, float] = _pair(
        (0.9, 0.95),
        "two numbers >= 0 and < 1",
        lambda first, second: 0 <= first < 1 and 0 <= second < 1,
    )
    weight_decay: float = _number(0.0, minimum=0)
    grad_clip: float = _number(1.0, above=0)  # largest norm of the gradient
    microbatch: int = _integer(16, minimum=1)  # rows (responses) of one forward and backward pass
    epochs: int = _integer(1, minimum=1)  # passes over the rollout batch, k_mode=minibatches only
    schedule: str = _choice("constant", "linear", "cosine")  # of lr, over all gradient steps
    max_skipped_steps: int = _integer(3, minimum=0)  # non-finite ones in a row; more ends the trial


@dataclass(frozen=True, kw_only=True)
class EvalSettings(_Settings):
    SECTION: ClassVar[str] = "eval"

    every: int = _integer(16, minimum=1)  # rounds; round 0 and the last are always evaluated
    prompts: int = _integer(128, minimum=1)  # held-out ones
    samples: int = _integer(2, minimum=1)  # responses to each
    temperature: float = _number(0.8, above=0)


@dataclass(frozen=True, kw_only=True)
class BufferSettings(_Settings):
    SECTION: ClassVar[str] = "buffer"

    sample_batches: int = _integer(1, minimum=1)  # rollout batches of one gradient step
    max_age: int | None = _integer(None, minimum=0)  # rounds; None: lag + buffer_capacity − 1
    fresh_fraction: float = _number(0.5, above=0, maximum=1)  # of a sample, buffer_sampling=mixed


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(_Settings):
    SECTION: ClassVar[str] = "checkpoint"

    every: int = _integer(10, minimum=1)  # rounds
    # The newest, and those that another trial may go on from under PBT (docs/faults.md); None: all.
    keep: int | None = _integer(2, minimum=1, optional=True)


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(_Settings):
    SECTION: ClassVar[str] = "callbacks"

    kl_band: tuple[float, float] | None = _pair(  # nats: a warning when kl/reference_nats leaves it
        None,
        "two numbers, 0 <= low < high",
        lambda low, high: 0 <= low < high,
    )
    kl_stop: float | None = _number(
        None, above=0
    )  # nats: a larger kl/reference_nats ends the trial
    verbose: bool = _flag(False)  # print version changes and example responses


@dataclass(frozen=True, kw_only=True)
class ResourceSettings(_Settings):
    SECTION: ClassVar[str] = "resources"

    num_generators: int = _integer(1, minimum=1)
    num_learners: int = _integer(1, minimum=1)
    # Who makes the pass of the frozen reference, where something asks for it: with lag >= 1 a
    # generator that waits for the learner has the time for it.
    reference: str = _choice("learner", "generator")
    # Each; None: 0.95 / num_generators. A colocated worker samples with as many threads as these
    # buy, since a small policy decodes fastest on one, and trains with worker_cpus' threads.
    generator_cpus: float | None = _number(None, minimum=0.01)
    generator_gpus: float = _gpus(0.0)  # each
    learner_cpus: float = _number(0.95, minimum=0.01)
    learner_gpus: float = _gpus(0.0)
    # Of a colocated worker. One core: the shipped policy trains slower on two threads.
    worker_cpus: float = _number(0.95, minimum=0.01)
    worker_gpus: float = _gpus(0.0)
    reward_workers: int = _integer(1, minimum=1)  # processes of each generator for a user's reward
    reward_cpus: float = _number(0.0, minimum=0)  # reserved for them beside the generator's own
    deadline_s: float = _number(  # seconds without an answer or progress of an actor that owes one
        600.0, above=0
    )


# ---- The whole -------------------------------------------------------------------------------

CLIP = 0.2
DAPO_CLIP_HIGH = 0.28  # arXiv 2503.14476
GSPO_CLIPS = (3e-4, 4e-4)  # low and high, arXiv 2507.18071
HANGS_A_UNIT = 10  # of a user's reward; for the rest of the unit it is not asked any more

# Named by the design, refused until built: for each such key the values that are valid now.
NOT_BUILT_YET: dict[str, tuple[Any, ...]] = {
    "model.dtype": ("float32",),
    "model.head_fp32": (False,),
    "task.name": ("keyword",),
    "task.length_penalty": (0.0,),
    "rollout.zero_advantage": ("keep",),
    "rollout.oversample": (1.0,),
    "rollout.overlong": ("score",),
    "loss.type": (
        "grpo_clip",
        "no_baseline",
        "reinforce_with_baseline",
        "dapo",
        "cispo",
        "gspo",
    ),
    "loss.advantage": ("group_std", "none", "group_mean", "rloo", "batch"),
    "resources.num_learners": (1,),
}


def fresh_wanted(fraction: float, count: int) -> int:
    """ceil(fraction · count), of the number that was meant: 0.28 · 25 is 7."""
    return math.ceil(round(fraction * count, 9))


def threads(cpus: float) -> int:
    """Compute threads of an actor that reserved `cpus`: 0.95 gives 1, 1.9 gives 2."""
    return max(1, math.floor(cpus + 0.1))


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(_Settings):
    """One trial. What is usually searched stands at the top; the rest is nested by owner."""

    arm: str = _text(  # label of a search arm
        "custom", "a label of 1 to 64 printable characters without slashes", _is_label
    )
    placement: str = _choice("colocated", "disaggregated")  # one actor, or generator(s) and learner
    rounds: int = _integer(96, minimum=1)  # the trial reports done after it
    k: int = _integer(1, minimum=1)  # gradient steps of a round
    k_mode: str = _choice("same_batch", "minibatches", "fresh_batches")  # what the k steps train on
    lag: int = _integer(0, minimum=0)  # rounds a group may be behind at its first training
    weight_update: str = _choice("between_batches", "interrupt_recompute", "in_flight")
    buffer_capacity: int = _integer(1, minimum=1)  # rounds' worth of rollouts kept; 1: no replay
    buffer_sampling: str = _choice("recency", "uniform", "fifo", "mixed")
    transport: str = _choice(  # auto: in_process when colocated, shm on one machine, object_store
        "auto", "in_process", "object_store", "shm", "nixl", "gloo", "nccl", "cuda_ipc"
    )
    transport_dtype: str = _choice("float32", "bfloat16")  # of the weights on their way
    seed: int = _integer(0, minimum=0, maximum=2**32 - 1)

    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    loss: LossSettings = LossSettings()
    optim: OptimSettings = OptimSettings()
    eval: EvalSettings = EvalSettings()
    buffer: BufferSettings = BufferSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    callbacks: CallbackSettings = CallbackSettings()
    resources: ResourceSettings = ResourceSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_unread()
        self._settle_clip()
        # A contradiction stays one when the missing choice is built: it is the more useful answer.
        for wrong, key, reason in self._contradictions():
            if wrong:
                raise ConfigError(f"{key}={shown(self[key])}: {reason}")
        for key, valid in NOT_BUILT_YET.items():
            if self[key] not in valid:
                raise ConfigError(
                    f"{key}={shown(self[key])} is not built yet; "
                    f"valid now: {', '.join(shown(value) for value in valid)}"
                )

    def _refuse_unread(self) -> None:
        for key in READ_WITH:
            value = self[key]
            missing = unmet(key, self)
            if missing and value not in (CHECKS[key].default, HARMLESS.get(key)):
                now = " and ".join(f"{k}={shown(self[k])}" for c in missing for k in c.keys)
                needs = " and ".join(condition.needs for condition in missing)
                raise ConfigError(f"{key}={shown(value)}: not read with {now}; needs {needs}")

    def _settle_clip(self) -> None:
        """The default clip range of the loss, as numbers, so that a trial's files show it."""
        if self.loss.clip is not None:
            return
        clips = {"clip": CLIP}
        if self.loss.type == "gspo":
            low, high = GSPO_CLIPS
            clips = {"clip": low, "clip_high": self.loss.clip_high or high}
        object.__setattr__(self, "loss", replace(self.loss, **clips))

    def _contradictions(self) -> Iterator[tuple[bool, str, str]]:
        """(whether it applies, the key to blame, why)."""
        colocated = self.placement == "colocated"
        alone = self.rollout.group_size == 1
        advantage = self.loss.advantage
        splits = self.k // self.optim.epochs
        sample = self.buffer.sample_batches
        gpus = (self.resources.generator_gpus, self.resources.learner_gpus)

        yield self.lag > 0 and colocated, "lag", "needs placement=disaggregated, got colocated"
        yield (
            colocated and self.transport not in ("auto", "in_process"),
            "transport",
            "placement=colocated moves weights inside one actor; valid: auto, in_process",
        )
        yield (
            not colocated and self.transport == "in_process",
            "transport",
            f"needs placement=colocated, got {self.placement}",
        )
        yield (
            self.transport in ("nccl", "cuda_ipc") and min(gpus) == 0,
            "transport",
            "needs resources.generator_gpus > 0 and resources.learner_gpus > 0, "
            f"got {gpus[0]:g} and {gpus[1]:g}",
        )

        shared = gpus[0] * self.resources.num_generators + gpus[1]
        yield (
            self.transport == "cuda_ipc" and shared > 1,
            "transport",
            f"all actors must share one GPU, and they ask for {shared:g}",
        )
        yield (
            self.transport == "nccl" and 0 < min(gpus) < 1,
            "transport",
            "every actor needs a GPU of its own, "
            f"got resources.generator_gpus={gpus[0]:g} and resources.learner_gpus={gpus[1]:g}",
        )
        yield (
            self.transport == "gloo" and max(gpus) > 0,
            "transport",
            "moves what lies in main memory; on GPUs use nccl, or auto",
        )

        yield (
            alone and advantage in ("group_std", "group_mean", "rloo"),
            "rollout.group_size",
            f"must be >= 2 with loss.advantage={advantage}: it compares the responses of a group",
        )
        yield (
            alone and advantage == "batch" and self.rollout.prompts == 1,
            "rollout.prompts",
            "must be >= 2 with loss.advantage=batch and rollout.group_size=1",
        )
        yield (
            self.loss.type == "no_baseline" and advantage != "none",
            "loss.type",
            f"needs loss.advantage=none, got {advantage}",
        )
        yield (
            self.loss.type != "no_baseline" and advantage == "none",
            "loss.advantage",
            f"needs loss.type=no_baseline, got {self.loss.type}",
        )

        yield (
            self.rollout.min_new_tokens > self.rollout.max_new_tokens,
            "rollout.min_new_tokens",
            f"must be <= rollout.max_new_tokens={self.rollout.max_new_tokens}",
        )
        yield (
            (self.rollout.unit_prompts or 1) > self.rollout.prompts,
            "rollout.unit_prompts",
            f"must be <= rollout.prompts={self.rollout.prompts}",
        )
        yield (
            self.resources.num_generators > self.units_at_once,
            "resources.num_generators",
            f"only {self.units_at_once} can sample at a time, one unit each; set it to "
            f"{self.units_at_once}, "
            + (
                "or raise rollout.prompts"
                if self.unit_prompts == 1
                else "or rollout.unit_prompts to none, which shares a round out"
            ),
        )

        yield (
            self.k_mode == "minibatches" and self.k % self.optim.epochs != 0,
            "k",
            f"must be a multiple of optim.epochs={self.optim.epochs} with k_mode=minibatches",
        )
        yield (
            self.k_mode == "minibatches" and splits > self.rollout.prompts,
            "k",
            f"must be <= optim.epochs × rollout.prompts, "
            f"{self.optim.epochs * self.rollout.prompts} here: each minibatch needs a group",
        )

        yield (
            sample > self.buffer_capacity,
            "buffer.sample_batches",
            f"must be <= buffer_capacity={self.buffer_capacity}",
        )
        replay = self.buffer_capacity > 1
        yield (
            self.buffer_sampling == "recency" and self.buffer_capacity > sample,
            "buffer_capacity",
            f"buffer_sampling=recency never reuses a group unless it is <= "
            f"buffer.sample_batches={sample}; valid: fifo, uniform, mixed sampling",
        )
        # Each draw would be filled by fresh groups alone.
        yield (
            replay and self.buffer_sampling == "fifo" and sample == 1,
            "buffer.sample_batches",
            "must be >= 2 with buffer_sampling=fifo, which never reuses a group while there are "
            "unused ones",
        )
        drawn = sample * self.rollout.prompts
        yield (
            replay
            and self.buffer_sampling == "mixed"
            and fresh_wanted(self.buffer.fresh_fraction, drawn) >= drawn
            and sample == 1,
            "buffer.fresh_fraction",
            "never reuses a group with buffer.sample_batches=1; lower it",
        )
        yield (
            replay and self.max_age == self.lag,
            "buffer.max_age",
            f"a group that was first used at lag={self.lag} is never reused; must be above it",
        )
        yield self.max_age < self.lag, "buffer.max_age", f"must be >= lag={self.lag}"

        # A generator that waits for a reward must not pass for one that hangs itself.
        enough_s = 2 * self.task.reward_deadline_s
        yield (
            self.task.reward is not None and enough_s > self.resources.deadline_s,
            "resources.deadline_s",
            f"must be >= {enough_s:g}, twice "
            f"task.reward_deadline_s={self.task.reward_deadline_s:g}",
        )

    def __getitem__(self, key: str) -> Any:
        """The value at a dotted key: `config["optim.lr"]`."""
        value: Any = self
        for name in key.split("."):
            value = getattr(value, name)
        return value

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GRPOConfig:
        """The config that nested plain data describes; a missing key has its default."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"config={shown(data)}: must be a mapping")
        values: dict[str, Any] = {}
        for name, value in data.items():
            default = _DEFAULTS.get(name)
            if name not in _DEFAULTS:
                if name in CHECKS:
                    raise ConfigError(f"{name}: must be nested, as {name.split('.')[0]}: {{…}}")
                raise unknown_key(str(name))
            if not is_dataclass(default):
                values[name] = value
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={shown(value)}: {_section_expected(default)}")
            for key in value:
                if f"{name}.{key}" not in CHECKS:
                    raise unknown_key(f"{name}.{key}")
            values[name] = type(default)(**value)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data, every key present; `from_dict` gives an equal config back."""

        def plain(value: Any) -> Any:
            if is_dataclass(value):
                return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
            return list(value) if isinstance(value, tuple) else value

        return plain(self)

    @property
    def prompts_per_round(self) -> int:
        """Prompts of all rollout batches of one round."""
        return self.rollout.prompts * self.batches_per_round

    @property
    def batches_per_round(self) -> int:
        """Rollout batches that a round trains on for the first time."""
        return self.k if self.k_mode == "fresh_batches" else 1

    @property
    def units(self) -> list[slice]:
        """The units of a rollout batch: which of its prompts one call of a generator samples.

        By default each generator gets as many units of a round as any other, in sizes that differ
        by at most one prompt. So none idles at lag 0, where nothing else is under way; at any lag
        a batch that is shared out is there sooner, so that it is trained on with newer weights.
        """
        prompts, given = self.rollout.prompts, self.rollout.unit_prompts
        if given is not None:
            return [slice(i, min(i + given, prompts)) for i in range(0, prompts, given)]
        generators = self.resources.num_generators
        parts = min(generators // math.gcd(generators, self.batches_per_round), prompts)
        return [slice(prompts * i // parts, prompts * (i + 1) // parts) for i in range(parts)]

    @property
    def responses_per_round(self) -> int:
        """Responses to the prompts of one round."""
        return self.prompts_per_round * self.rollout.group_size

    @property
    def unit_prompts(self) -> int:
        """Prompts of the largest unit."""
        return max(unit.stop - unit.start for unit in self.units)

    @property
    def units_at_once(self) -> int:
        """Units that can be under way at the same time, of the rounds that the gate admits."""
        rounds = min(self.lag + 1, self.rounds)
        return rounds * self.batches_per_round * len(self.units)

    @property
    def in_mid_batch(self) -> bool:
        """Whether generators take new weights in the middle of a batch. At lag 0 none is under way
        when weights come."""
        return self.weight_update != "between_batches" and self.lag > 0

    @property
    def reference_role(self) -> str | None:
        """Who keeps the frozen reference: learner or generator; None where nothing asks for it."""
        asked = self.loss.kl_coef > 0 or self.loss.kl_monitor
        return self.resources.reference if asked else None

    @property
    def max_age(self) -> int:
        """Rounds a group may be behind at any training."""
        given = self.buffer.max_age
        return self.lag + self.buffer_capacity - 1 if given is None else given

    @property
    def clip_high(self) -> float:
        """How far above 1 the ratio may go."""
        if self.loss.clip_high is not None:
            return self.loss.clip_high
        return DAPO_CLIP_HIGH if self.loss.type == "dapo" else self.clip_low

    @property
    def clip_low(self) -> float:
        """How far below 1 the ratio may go."""
        assert self.loss.clip is not None, "settled when constructed"
        return self.loss.clip

    @property
    def generator_cpus(self) -> float:
        """CPUs of each generator."""
        given = self.resources.generator_cpus
        if given is not None:
            return given
        # Ray rounds to 1e-4: three times 0.95 / 3 rounded up would not fit beside 0.1 + 0.95 on two
        # cores, and a placement group that does not fit waits for ever.
        return math.floor(0.95 / self.resources.num_generators * 1e4) / 1e4

    @property
    def worker_cpus(self) -> float:
        """CPUs of a colocated worker: what the busier of its two roles computes with."""
        return max(self.resources.worker_cpus, self.resources.generator_cpus or 0.0)

    def bundles(self) -> list[dict[str, float]]:
        """Resources of the trial's own process, then of each actor: worker, or learner and
        generators."""
        r = self.resources
        # The trial's own process mostly waits. On two cores a whole CPU for it would keep the
        # trial pending for ever.
        driver = {"CPU": 0.1}
        if self.placement == "colocated":
            return [driver, _bundle(self.worker_cpus + r.reward_cpus, r.worker_gpus)]
        generator = _bundle(self.generator_cpus + r.reward_cpus, r.generator_gpus)
        return [driver, _bundle(r.learner_cpus, r.learner_gpus), *[generator] * r.num_generators]

    @property
    def uses_gpus(self) -> bool:
        return any("GPU" in bundle for bundle in self.bundles())

    @property
    def devices(self) -> float:
        """What an hour of the trial costs: its GPUs, or its actors' CPU cores if it has none."""
        _, *actors = self.bundles()
        gpus = sum(bundle.get("GPU", 0.0) for bundle in actors)
        return gpus or sum(bundle["CPU"] for bundle in actors)


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(GRPOConfig)}
_SECTIONS: dict[str, Any] = {
    name: value for name, value in _DEFAULTS.items() if is_dataclass(value)
}

# Every key, dotted, with what it accepts.
CHECKS: dict[str, Check] = {
    **{item.name: item.metadata["check"] for item in fields(GRPOConfig) if item.metadata},
    **{
        f"{name}.{item.name}": item.metadata["check"]
        for name, section in _SECTIONS.items()
        for item in fields(section)
    },
}


def unknown_key(key: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest that do."""
    section, _, leaf = key.rpartition(".")
    by_leaf: dict[str, list[str]] = {}
    for name in CHECKS:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    siblings = {
        name.rpartition(".")[2]: [name] for name in CHECKS if name.startswith(f"{section}.")
    }
    sections = {} if section else {name: [name] for name in _SECTIONS}

    def close(names: dict[str, list[str]]) -> list[str]:
        matches = difflib.get_close_matches(leaf, names, n=1, cutoff=0.65)
        return names[matches[0]] if matches else []

    # The right name in the wrong place comes first, then a slip of the fingers.
    near = by_leaf.get(leaf) or close(siblings) or close(by_leaf | sections)
    if near:
        advice = f"did you mean {' or '.join(near)}?"
    elif siblings:
        advice = "valid: " + ", ".join(f"{section}.{name}" for name in siblings)
    else:
        top = [name for name in _DEFAULTS if name not in _SECTIONS]
        advice = "valid: " + ", ".join([*top, *(f"{name}.…" for name in _SECTIONS)])
    return ConfigError(f"{shown(key)}: unknown key; {advice}")


# ---- Plain dicts on their way to the door ----------------------------------------------------


def parse_assignment(text: str) -> tuple[str, Any]:
    """`("optim.lr", 0.001)` from `optim.lr=1e-3`, as `--set` takes it.

    The value is read as JSON where the key is no text; `none` and `null` are None where the key
    may be None. Whether the value is valid is `GRPOConfig.from_dict`'s to say.
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"{shown(text)}: must be KEY=VALUE, for example optim.lr=1e-4")
    if key in _SECTIONS:
        names = ", ".join(name for name in CHECKS if name.startswith(f"{key}."))
        raise ConfigError(f"{key}={shown(raw)}: is a section; set one of {names}")
    if key not in CHECKS:
        raise unknown_key(key)
    check = CHECKS[key]
    if raw.lower() in ("none", "null") and (check.optional or not check.is_text):
        return key, None
    if check.is_text and not raw.startswith('"'):
        return key, raw
    if raw.lower() in ("true", "false"):
        return key, raw.lower() == "true"
    # JSON knows neither ".5" nor "+1"; what is no number either stays text for the error to show.
    for read in (json.loads, float):
        try:
            return key, read(raw)
        except (ValueError, RecursionError):
            continue
    return key, raw


def set_dotted(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at a dotted key of nested dicts, in place, making the sections it needs."""
    *sections, leaf = key.split(".")
    for name in sections:
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict) or "grid_search" in mapping:
            raise ConfigError(f"{key}={shown(value)}: {name} is searched as a whole, not by key")
    mapping[leaf] = value


def flatten(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → leaf value, of a resolved nested config."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": leaf for key, leaf in flatten(value).items()})
        else:
            flat[name] = value
    return flat


def make_absolute(config: Mapping[str, Any], base_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """A copy whose paths are absolute, relative ones meaning `base_dir`.

    Call it on the driver: Tune moves a trial's process to a directory of its own.
    """
    result = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()
    }

    def absolute(path: str) -> str:
        return os.path.abspath(os.path.join(base_dir, os.path.expanduser(path)))

    for section, name in (
        ("model", "path"),
        ("task", "keywords_file"),
        ("task", "train_file"),
        ("task", "eval_file"),
        ("task", "reward"),
    ):
        owner = result.get(section)
        if not isinstance(owner, dict):
            continue
        text = owner.get(name)
        # What is no text or empty is left as it is, for `from_dict` to refuse by name.
        if not isinstance(text, str) or not text.strip():
            continue
        if name != "reward":
            owner[name] = absolute(text)
        elif (file := text.rpartition(":")[0]).endswith(".py"):
            owner[name] = f"{absolute(file)}:{text.rpartition(':')[2]}"
    return result
