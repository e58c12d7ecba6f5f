"""All settings of a trial, each with its name, meaning, unit, default and range in one place.

`GRPOConfig.from_dict` builds a config from plain data. It rejects unknown keys, wrong types, values
out of range, settings that contradict each other, and settings that have no effect in combination
with the others. The error is a one-line `ConfigError`, raised before Ray or any actor starts. All
other code reads a `GRPOConfig` and never a dict.

This package imports only the standard library, because the launcher uses it before importing
torch and Ray.
"""

from grpo_trainable.config.advantage import VineSettings
from grpo_trainable.config.buffer import fresh_wanted
from grpo_trainable.config.env import EnvSettings
from grpo_trainable.config.loss import LossSettings
from grpo_trainable.config.mix import mix_of, mix_text, weights_of
from grpo_trainable.config.model import ModelSettings
from grpo_trainable.config.optim import OptimSettings
from grpo_trainable.config.parsing import (
    expand_set,
    flatten,
    make_absolute,
    parse_assignment,
    parse_assignments,
    set_dotted,
    started_in,
    unknown_key,
)
from grpo_trainable.config.resources import threads
from grpo_trainable.config.schema import CHECKS, OF_TRAINING, of_other_placement
from grpo_trainable.config.task import CommonTaskSettings, TaskSettings
from grpo_trainable.config.trial import (
    GRPOConfig,
    arm_and_seed,
    default_beside,
    defaults_with,
    expanded,
    explained_defaults,
    prepared,
)
from grpo_trainable.config.values import (
    Check,
    ConfigError,
    checks_of,
    choice,
    choice_or_path,
    choice_or_reference,
    converted,
    flag,
    integer,
    number,
    pair,
    path,
    reference,
    shown,
    text,
    texts,
)

__all__ = [
    "CHECKS",
    "OF_TRAINING",
    "Check",
    "CommonTaskSettings",
    "ConfigError",
    "EnvSettings",
    "GRPOConfig",
    "LossSettings",
    "ModelSettings",
    "OptimSettings",
    "TaskSettings",
    "VineSettings",
    "arm_and_seed",
    "checks_of",
    "choice",
    "choice_or_path",
    "choice_or_reference",
    "converted",
    "default_beside",
    "defaults_with",
    "expand_set",
    "expanded",
    "explained_defaults",
    "flag",
    "flatten",
    "fresh_wanted",
    "integer",
    "make_absolute",
    "mix_of",
    "mix_text",
    "number",
    "of_other_placement",
    "pair",
    "parse_assignment",
    "parse_assignments",
    "path",
    "prepared",
    "reference",
    "set_dotted",
    "shown",
    "started_in",
    "text",
    "texts",
    "threads",
    "unknown_key",
    "weights_of",
]
