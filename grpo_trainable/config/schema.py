"""All settings of a trial together: those at the top, and a section for each owner.

Each section has a file with its fields, each with its default, range and meaning, when it is read
and what others call it, and with what contradicts it. `CHECKS` lists all keys, dotted;
docs/config.md is generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from grpo_trainable.config.advantage import CriticSettings, VineSettings
from grpo_trainable.config.buffer import BufferSettings
from grpo_trainable.config.conditions import (
    DISAGGREGATED,
    REPLAY,
    Config,
    Conflict,
    at_least,
    one_of,
)
from grpo_trainable.config.engine_catalog import ENGINES, engine_record
from grpo_trainable.config.env import EnvSettings
from grpo_trainable.config.foreign_names import (
    IN_ROUNDS,
    LENGTH,
    MINIBATCHES,
    NO_PASSES,
    by_name,
    trl,
    verl,
)
from grpo_trainable.config.loss import LossSettings
from grpo_trainable.config.model import ModelSettings
from grpo_trainable.config.monitoring import CallbackSettings, CheckpointSettings, EvalSettings
from grpo_trainable.config.optim import OptimSettings
from grpo_trainable.config.resources import ResourceSettings
from grpo_trainable.config.rollout import PoolSettings, RolloutSettings
from grpo_trainable.config.task import TaskSettings
from grpo_trainable.config.transport_catalog import TRANSPORTS
from grpo_trainable.config.values import (
    Check,
    Settings,
    checks_of,
    choice,
    choice_or_reference,
    integer,
    text,
)


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
    rounds: int = integer(
        96,
        "Rounds after which the trial is done.",
        minimum=1,
        also_called=(
            trl("max_steps", f"{IN_ROUNDS}; {LENGTH}"),
            trl("num_train_epochs", NO_PASSES),
            verl("trainer.total_training_steps", f"{IN_ROUNDS}; {LENGTH}"),
            verl("trainer.total_epochs", NO_PASSES),
        ),
    )
    k: int = integer(
        1,
        "Gradient steps of a round.",
        minimum=1,
        also_called=(
            trl("steps_per_generation", also=MINIBATCHES),
            verl(
                "actor.ppo_mini_batch_size",
                "k is train_batch_size / ppo_mini_batch_size",
                also=MINIBATCHES,
            ),
        ),
    )
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
        read_if=(DISAGGREGATED, at_least("lag", 1)),
    )
    buffer_capacity: int = integer(
        1, "Rounds' worth of rollouts that are kept; 1: no replay.", minimum=1
    )
    buffer_sampling: str = choice(
        ("recency", "uniform", "fifo", "mixed"),
        "Which groups of the buffer are drawn.",
        read_if=REPLAY,
    )
    engine: str = choice_or_reference(
        ("auto", *ENGINES),
        "What samples the responses; auto: torch for policies of this package, hf for Hugging Face "
        "models; vllm takes both; or a Class of yours.",
        what="Class",
        also_called=(
            trl("use_vllm", value="vllm", also=("placement=disaggregated",)),
            verl("rollout.name"),
        ),
    )
    transport: str = choice_or_reference(
        ("auto", *TRANSPORTS),
        "How weights travel; auto: in_process when colocated, shm on one machine, object_store "
        "to others, by_machine where generators are on the learner's and on others; or a record "
        "of yours.",
    )
    transport_dtype: str = choice(
        ("float32", "bfloat16"),
        "The precision of the weights on their way.",
        read_if=one_of("model.dtype", "float32"),
    )
    seed: int = integer(0, "What every random draw is keyed by.", minimum=0, maximum=2**32 - 1)

    model: ModelSettings = field(default=ModelSettings())
    task: TaskSettings = field(default=TaskSettings())
    rollout: RolloutSettings = field(default=RolloutSettings())
    env: EnvSettings = field(default=EnvSettings())
    pools: PoolSettings = field(default=PoolSettings())
    loss: LossSettings = field(default=LossSettings())
    critic: CriticSettings = field(default=CriticSettings())
    vine: VineSettings = field(default=VineSettings())
    optim: OptimSettings = field(default=OptimSettings())
    eval: EvalSettings = field(default=EvalSettings())
    buffer: BufferSettings = field(default=BufferSettings())
    checkpoint: CheckpointSettings = field(default=CheckpointSettings())
    callbacks: CallbackSettings = field(default=CallbackSettings())
    resources: ResourceSettings = field(default=ResourceSettings())

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

# Keys that change neither what is sampled nor its reward, only what training makes of that.
OF_TRAINING = tuple(key for key, check in CHECKS.items() if check.of_training)

# The keys that only some combinations read. Of several that are not read the first is reported.
SOMETIMES_READ = [key for key, check in CHECKS.items() if check.read_if]


def of_other_placement(key: str, placement: str) -> bool:
    """Check whether `key` is a resource that only the other placement reserves."""
    conditions = CHECKS[key].read_if if key in CHECKS else ()
    return key.startswith("resources.") and any(
        condition.keys == ("placement",) and not condition.holds(placement)
        for condition in conditions
    )


# What other libraries call our settings, each by its spelling there.
TRL, VERL = by_name(name.of(key) for key, check in CHECKS.items() for name in check.also_called)


def placement_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    colocated = config.placement == "colocated"
    # A user's transport has no record here: it is asked before the trial starts, where its file is.
    transport, r = TRANSPORTS.get(config.transport), config.resources
    in_process = transport is not None and transport.sidedness == "in_process"
    refused = transport and transport.refuses_actors(**r.actors)

    yield config.lag > 0 and colocated, "lag", "needs placement=disaggregated, got colocated"
    yield (
        colocated and not in_process and config.transport != "auto",
        "transport",
        "placement=colocated moves weights inside one actor; valid: auto, in_process",
    )
    yield (
        not colocated and in_process,
        "transport",
        f"needs placement=colocated, got {config.placement}",
    )
    yield bool(refused), "transport", refused or ""


def engine_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield what contradicts each other."""
    # `auto` takes an engine that works with everything.
    record = engine_record(config.engine)
    placement = record.refused_placements.get(config.placement)
    transport = TRANSPORTS.get(config.transport)
    lowest, gpus = record.lowest_temperature, config.resources.generator_gpus
    sampler = config.model.sampler_dtype

    yield (
        placement is not None,
        "engine",
        f"does not work with placement={config.placement}: {placement}",
    )
    yield (
        bool(record.refuses_two_sided) and transport is not None and transport.two_sided,
        "transport",
        f"not with engine={config.engine}: {record.refuses_two_sided}; use auto",
    )
    yield (
        gpus > 0 and not record.gpus,
        "resources.generator_gpus",
        f"must be 0 with engine={config.engine}, which samples on CPUs",
    )
    yield (
        config.rollout.slots is not None and config.engine != "auto" and not record.queues,
        "rollout.slots",
        f"must be none with engine={config.engine}; needs engine=torch",
    )
    yield (
        sampler != "float32" and config.engine != "auto" and not record.narrows,
        "model.sampler_dtype",
        f"must be float32 with engine={config.engine}; needs engine=torch",
    )
    yield (
        sampler != "float32" and config.importance_cap is None and not config.corrects_itself,
        "loss.importance_cap",
        f"must be above 0 with model.sampler_dtype={sampler}, by which log-probs change",
    )
    yield (
        config.rollout.overlong == "interrupt"
        and config.engine != "auto"
        and not record.interrupts,
        "rollout.overlong",
        f"not with engine={config.engine}, which cannot feed a text to a response; needs "
        "engine=torch or hf",
    )
    for section in ("rollout", "eval"):
        temperature = config[f"{section}.temperature"]
        yield (
            0 < temperature < lowest,
            f"{section}.temperature",
            f"must be >= {lowest:g} with engine={config.engine}, which rounds lower ones up",
        )
