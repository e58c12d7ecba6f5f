"""The settings of one trial, checked against each other, and the values derived from them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any

from grpo_trainable.config import (
    advantage,
    buffer,
    built_in_tasks,
    env,
    loss,
    model,
    monitoring,
    optim,
    resources,
    rollout,
    schema,
    task,
)
from grpo_trainable.config.adapters import with_adapter
from grpo_trainable.config.advantage import compares_a_group
from grpo_trainable.config.built_in_tasks import MIX
from grpo_trainable.config.conditions import CONTROL
from grpo_trainable.config.loss import TO_THE_SAMPLER, samples_as_it_learns
from grpo_trainable.config.mix import Entry, mix_of
from grpo_trainable.config.model import ModelSettings
from grpo_trainable.config.parsing import (
    Given,
    expand_set,
    flatten,
    make_absolute,
    started_in,
    unknown_key,
    with_defaults,
)
from grpo_trainable.config.schema import CHECKS, DEFAULTS, SECTIONS, SOMETIMES_READ, TrialSettings
from grpo_trainable.config.task import CommonTaskSettings, TaskSettings
from grpo_trainable.config.values import (
    ConfigError,
    Settings,
    checks_of,
    converted,
    section_expected,
    shown,
)
from grpo_trainable.models.hf.files import fetch_small_files
from grpo_trainable.plugins import is_reference

# Checks for settings that contradict each other. Only the first conflict found is reported.
CONFLICTS = (
    schema.placement_conflicts,
    resources.conflicts,
    schema.engine_conflicts,
    advantage.conflicts,
    loss.conflicts,
    rollout.conflicts,
    monitoring.conflicts,
    optim.conflicts,
    buffer.conflicts,
    task.conflicts,
    env.conflicts,
    model.conflicts,
    built_in_tasks.conflicts,
)

# Task settings that all tasks of a mix share.
_SHARED = tuple(name for name in checks_of(CommonTaskSettings) if name not in ("name", "reward"))


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrialSettings):
    """The settings of one trial, checked against each other.

    Raises:
        ConfigError: A value is invalid, has no effect with the other settings, or contradicts
            another value.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # These defaults decide which keys have an effect.
        for name, value in self._defaults_in(self).items():
            object.__setattr__(self, name, value)
        self._put_defaults_in("task")
        self._refuse_unread()
        self.parts  # noqa: B018  # rejects a mix if one of its tasks is invalid on its own
        for name in SECTIONS:
            self._put_defaults_in(name)
        for conflicts in CONFLICTS:
            for applies, key, reason in conflicts(self):
                if applies:
                    raise ConfigError(f"{key}={shown(self[key])}: {reason}")

    def _put_defaults_in(self, name: str) -> None:
        settled = self._defaults_in(self[name])
        if settled:
            object.__setattr__(self, name, replace(self[name], **settled))

    def _defaults_in(self, section: Settings) -> dict[str, Any]:
        """For keys with the general default, return the defaults that depend on other settings.

        These defaults replace the general defaults, so a trial's files show the values that it
        uses.
        """
        return {
            key: value
            for key, check in checks_of(section).items()
            if getattr(section, key) == check.default
            and (default := check.default_at("none"))
            and (value := default.beside(self)) is not None
        }

    def _refuse_unread(self) -> None:
        for key in SOMETIMES_READ:
            value, missing = self[key], CHECKS[key].unmet(self)
            if missing and value not in self._unread_values(key):
                now = " and ".join(f"{k}={shown(self[k])}" for c in missing for k in c.keys)
                needs = " and ".join(condition.needs for condition in missing)
                raise ConfigError(f"{key}={shown(value)}: has no effect with {now}; needs {needs}")

    def _unread_values(self, key: str) -> tuple[Any, ...]:
        """Return the values that a key may have when it has no effect."""
        check = CHECKS[key]
        names = (self.task.name, *(entry["name"] for entry in mix_of(self.task.mix).values()))
        return *check.unremarkable, *(check.of_tasks.get(name, check.default) for name in names)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GRPOConfig:
        """Return the config that nested plain data describes.

        A missing key gets the default of the model or the task if there is one, else the general
        default. The model's small JSON files are read if a default depends on them. If `model.path`
        is a directory of LoRA adapters, `model.adapter` is set (`with_adapter`). Settings that are
        chosen together can be given as one text below `set`, such as
        `{"set": {"actors": "placement=disaggregated,lag=1"}}`.

        Raises:
            ConfigError: A key is unknown, or the settings are invalid.
        """
        values: dict[str, Any] = {}
        for name, value in with_defaults(with_adapter(expand_set(data))).items():
            if name not in DEFAULTS:
                if name in CHECKS:
                    raise ConfigError(f"{name}: must be nested, as {name.split('.')[0]}: {{…}}")
                raise unknown_key(str(name))
            values[name] = _section(name, value) if is_dataclass(DEFAULTS[name]) else value
        return cls(**values)

    def reads(self, key: str) -> bool:
        """Return True if this key has an effect with the other settings."""
        # A user's task always reads its own settings, even those with the name of a built-in one.
        own = key not in CHECKS or self.task.declares(key)
        return own or not CHECKS[key].unmet(self)

    def effective(self, key: str) -> Any:
        """Return the value of a setting, or the value that replaces none when the key is read."""
        value, follows = self[key], CHECKS[key].default_at("read")
        return follows.beside(self) if value is None and follows else value

    @property
    def in_effect(self) -> dict[str, Any]:
        """Value of each dotted key, including values that are derived from other settings."""
        following = {
            key: self.effective(key)
            for key, check in CHECKS.items()
            if check.default_at("read") and self[key] is None and self.reads(key)
        }
        return {**flatten(self.to_dict()), **following}

    @cached_property
    def parts(self) -> dict[str, GRPOConfig]:
        """For each label of the mix, the config of a trial with only the task of that label.

        Raises:
            ConfigError: One of these configs is invalid.
        """
        return {label: self._part(label, entry) for label, entry in mix_of(self.task.mix).items()}

    @property
    def alone(self) -> list[GRPOConfig]:
        """One config per task: the parts of the mix, or only this config if there is no mix."""
        return list(self.parts.values()) or [self]

    def _part(self, label: str, entry: Entry) -> GRPOConfig:
        given = {name: value for name, value in entry.items() if name != "weight"}
        shared = [name for name in _SHARED if name in given]
        if shared:
            raise ConfigError(
                f"task.mix, {label}: {shared[0]} is the same for all tasks; set task.{shared[0]}"
            )
        if given["name"] == MIX:
            raise ConfigError(f"task.mix, {label}: a mix cannot be part of another mix")
        if given["name"] == CONTROL:
            raise ConfigError(
                f"task.mix, {label}: {CONTROL} has no text, so it cannot be part of a mix"
            )
        try:
            own = replace(self, task=_section("task", given))
            common = {f"task.{name}": self[f"task.{name}"] for name in _SHARED}
            together = {key: own[key] for key in CHECKS} | common
            unread = {name for name in _SHARED if CHECKS[f"task.{name}"].unmet(together)}
            read = {name: self[f"task.{name}"] for name in _SHARED if name not in unread}
            return replace(own, task=replace(own.task, **read))
        except ConfigError as error:
            raise ConfigError(f"task.mix, {label}: {error}") from None

    @property
    def in_turns(self) -> bool:
        """Return True if sampling and training take turns, with no call open between two rounds.

        Otherwise, generators sample while the learner trains.
        """
        return self.lag == 0 or self.lag_mode == "exact"

    @property
    def in_mid_batch(self) -> bool:
        """Return True if generators switch to new weights in the middle of a batch.

        If sampling and training take turns, no batch is under way when new weights arrive.
        """
        return self.weight_update != "between_batches" and not self.in_turns

    @property
    def reference_role(self) -> str | None:
        """Actor that runs the frozen reference: learner or generator. None without a reference."""
        asked = self.loss.kl_coef > 0 or self.loss.kl_monitor
        return self.resources.reference if asked else None

    @property
    def teacher(self) -> ModelSettings | None:
        """Model settings of the teacher, with the policy's precision. None without a teacher."""
        if self.loss.teacher is None:
            return None
        dtype, head_fp32 = self.model.dtype, self.model.head_fp32
        return ModelSettings(
            path=self.loss.teacher, dtype=dtype, head_fp32=head_fp32, packing=False
        )

    @property
    def kl_in_reward(self) -> bool:
        """Return True if the KL to the reference is subtracted from the rewards."""
        return self.loss.kl_coef > 0 and self.loss.kl_in == "reward"

    @property
    def adapters_apart(self) -> bool:
        """Return True if the engine keeps LoRA adapters separate from the model.

        The learner also keeps them separate. Merging the adapters into bfloat16 weights would round
        off most of a small update. `auto` chooses `hf` for a model with adapters.
        """
        lora = self.model.lora_rank is not None and self.model.dtype == "bfloat16"
        return lora and self.engine in ("auto", "hf")

    @property
    def samples_as_it_learns(self) -> bool:
        """Return True if the engine promises log-probs equal to the learner's, up to rounding."""
        return samples_as_it_learns(self.engine, self.model.sampler_dtype)

    @property
    def ratio_sees_sampler(self) -> bool:
        """Return True if the ratio must include the difference between the sampler and the learner.

        This is the case if weights are rounded in transit. It is also the case for a loss whose
        ratio measures that difference, unless the engine promises the learner's log-probs.
        """
        rounded = self.transport_dtype != "float32" and self.model.dtype == "float32"
        return rounded or (self.corrects_itself and not self.samples_as_it_learns)

    @property
    def corrects_itself(self) -> bool:
        """Return True if the ratio of the loss measures how far the policy is from the sampler.

        This assumes that there are no importance weights. With them, the ratio measures how far the
        policy has moved since the start of the round.
        """
        return self.loss.type in TO_THE_SAMPLER

    @property
    def taught_by_rewards_alone(self) -> bool:
        """Return True if a group teaches only through differences between its task rewards."""
        shaped = self.kl_in_reward or self.task.length_penalty > 0 or self.task.normalize_parts
        shaped = shaped or self.rollout.overlong == "penalty"
        # `rollout.zero_advantage` leaves groups out before their rewards are shaped.
        otherwise = self.loss.teacher is not None or (
            shaped and self.rollout.zero_advantage == "keep"
        )
        return self.needs_unequal_rewards and not otherwise

    @property
    def overlong_buffer(self) -> int:
        """Number of tokens left before the limit when a penalty or an interruption begins."""
        return self.effective("rollout.overlong_buffer")

    @property
    def clip_high(self) -> float:
        """Limit on how far the ratio may be above 1."""
        return self.effective("loss.clip_high")

    @property
    def clip_low(self) -> float:
        """Limit on how far the ratio may be below 1."""
        assert self.loss.clip is not None, "resolved on construction"
        return self.loss.clip

    @property
    def needs_unequal_rewards(self) -> bool:
        """Return True if a group whose rewards are all equal teaches nothing."""
        return compares_a_group(self.loss.advantage)

    @property
    def has_critic(self) -> bool:
        """Return True if the learner trains a critic."""
        return self.loss.advantage == "gae"

    @property
    def critic_lr(self) -> float:
        """Learning rate of the weights that only the critic uses."""
        return self.effective("critic.lr")

    @property
    def importance_cap(self) -> float | None:
        """Largest importance weight, or None without importance weights."""
        return self.loss.importance_cap or None


def expanded(data: Mapping[str, Any], base_dir: str | None = None) -> dict[str, Any]:
    """Return a copy of nested settings in which the user's implicit settings are explicit.

    Settings below `set` get their own keys, and relative paths become absolute. If `model.path` is
    a directory of LoRA adapters, that directory becomes `model.adapter`.

    Args:
        data: Nested settings, as the user gives them.
        base_dir: Base directory for relative paths. None: the directory in which Ray was started.

    Raises:
        ConfigError: `set` or the adapters cannot be used.
    """
    directory = started_in() if base_dir is None else base_dir
    return with_adapter(make_absolute(expand_set(data), directory), directory)


def arm_and_seed(data: Mapping[str, Any]) -> str | None:
    """Return `arm/seed` of nested settings. The other settings may be invalid.

    Returns:
        The text, or None if the settings name no arm, or if their arm, seed or `set` is invalid.
    """
    if "arm" not in data:
        return None
    try:
        given = {"seed": DEFAULTS["seed"], **expand_set(data)}
        arm, seed = (converted(key, given[key], CHECKS[key]) for key in ("arm", "seed"))
    except ConfigError:
        return None
    return f"{arm}/{seed}"


def prepared(
    data: Mapping[str, Any], base_dir: str | None = None, *, must_fetch: bool = True
) -> dict[str, Any]:
    """Return the result of `expanded`, and download the model's small files if they are missing.

    Call this before `GRPOConfig.from_dict`, because defaults depend on these files.

    Args:
        data: Nested settings, as the user gives them.
        base_dir: Base directory for relative paths. None: the directory in which Ray was started.
        must_fetch: True: raise an error if the files cannot be downloaded. False: continue without
            the files, because they are needed by another process, on another machine.

    Raises:
        ConfigError: `set` or the adapters cannot be used, or the files cannot be downloaded.
    """
    settings = expanded(data, base_dir)
    try:
        fetch_small_files(flatten(settings).get("model.path"))
    except ValueError as error:
        if must_fetch:
            raise ConfigError(str(error)) from error
    return settings


def explained_defaults(config: GRPOConfig) -> dict[str, str]:
    """Return the keys whose value is the default for the model or for a GPU, with the reasons."""
    settings, found = config.to_dict(), {}
    given = Given(settings)
    explained = {key for key, check in CHECKS.items() if check.of_models or check.of_gpus}
    for key in [key for key in flatten(settings) if key in explained]:
        value, reason = _default_beside(given, key)
        if reason and value == config[key]:
            found[key] = reason
    return found


def default_beside(config: GRPOConfig, key: str) -> tuple[Any, str]:
    """Return a key's default under the other settings, and the reason for that default.

    The reason is empty if the default does not depend on the model or on GPUs.
    """
    return _default_beside(Given(config.to_dict()), key)


def _default_beside(given: Given, key: str) -> tuple[Any, str]:
    value, reason = given.without(key).default_of(key) or (None, "")
    return converted(key, value, CHECKS[key]) if reason else None, reason


def defaults_with(task_name: str) -> dict[str, Any]:
    """Return the default of each dotted key in a trial of this task."""
    # The constructor resolves defaults that depend on other settings, such as the default of
    # `loss.clip`.
    resolved = flatten(GRPOConfig().to_dict())
    return {
        key: check.of_tasks.get(task_name, resolved.get(key, check.default))
        for key, check in CHECKS.items()
    }


def _section(name: str, value: Any) -> Any:
    """Return the section of this name, built from plain data."""
    default = DEFAULTS[name]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)}: {section_expected(default)}")
    if name == "task" and _is_custom(value.get("name")):
        return _custom_task(value)
    for leaf in value:
        if f"{name}.{leaf}" not in CHECKS:
            raise unknown_key(f"{name}.{leaf}")
    return type(default)(**value)


def _is_custom(name: Any) -> bool:
    return isinstance(name, str) and is_reference(name)


def _custom_task(given: Mapping[str, Any]) -> TaskSettings:
    """Return the `task` section for a user's task.

    Settings that are not common to all tasks go to `own`, and the user's task checks them.
    """
    common = checks_of(CommonTaskSettings)
    own = {str(name): value for name, value in given.items() if name not in common}
    for name, value in own.items():
        if not name.isidentifier():
            raise unknown_key(f"task.{name}")
        own[name] = _frozen(f"task.{name}", value)
    settings = {name: value for name, value in given.items() if name in common}
    return TaskSettings(**settings, own=tuple(sorted(own.items())))


def _frozen(key: str, value: Any) -> Any:
    """Return `value` with lists turned into tuples, and other libraries' numbers into Python's."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(_frozen(key, item) for item in value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ConfigError(
        f"{key}={shown(value)}: must be a string, a number, true, false, none or a list"
    )
