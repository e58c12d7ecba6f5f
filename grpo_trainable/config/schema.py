"""All settings of a trial, at the top level and in sections.

Each section has its own file, with its fields and their conflicts. A field declares its default,
range and meaning, the conditions under which it has an effect, and its names in other libraries.
`CHECKS` contains the check of every dotted key. docs/config.md is generated from these checks.
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
from grpo_trainable.config.defaults import where_none
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
    # Labels become parts of trial names and report tables, so they must not contain paths.
    return (
        0 < len(label) <= 64 and label.isprintable() and not re.search(r"[/\\]|^\.|^\s|\s$", label)
    )


@dataclass(frozen=True, kw_only=True)
class TrialSettings(Settings):
    """All settings of a trial.

    The most frequently searched settings are at the top level. All other settings are in sections.
    """

    arm: str = text(
        "custom",
        "Label of the arm that the trial belongs to.",
        expected="a label of 1 to 64 printable characters without slashes",
        valid=_is_label,
    )
    placement: str = choice(
        ("colocated", "disaggregated"),
        "Placement of the actors: one actor samples and trains in turn (colocated), or generators "
        "and learners are separate actors, which can work at the same time (disaggregated).",
        also_called=(trl("vllm_mode", "colocate is colocated, server is disaggregated"),),
    )
    rounds: int = integer(
        96,
        "Number of rounds in a trial.",
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
        "Number of gradient steps in a round.",
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
        "Data for the k steps: one rollout batch k times (same_batch), the parts of one rollout "
        "batch (minibatches), or k rollout batches (fresh_batches).",
    )
    lag: int = integer(
        0,
        "Maximum number of rounds by which a group may be behind the learner at its first use in "
        "training.",
        minimum=0,
    )
    lag_mode: str = choice(
        ("bounded", "exact"),
        "Meaning of `lag`. With `bounded`, generators run ahead of the learner, and a group is at "
        "most `lag` rounds behind. With `exact`, sampling and training take turns, and every group "
        "waits until it is exactly `lag` rounds behind. The first `lag` rounds train on groups "
        "that were sampled with the initial weights.",
    )
    weight_update: str = choice(
        ("between_batches", "interrupt_recompute", "in_flight"),
        "Point at which generators switch to new weights: between batches (between_batches), or "
        "within a batch. Within a batch, the KV cache is either rebuilt (interrupt_recompute) or "
        "kept (in_flight).",
        read_if=(DISAGGREGATED, at_least("lag", 1), one_of("lag_mode", "bounded")),
    )
    buffer_capacity: int = integer(
        1, "Number of rounds whose rollouts are kept. 1 means no replay.", minimum=1
    )
    buffer_sampling: str = choice(
        ("auto", "recency", "uniform", "fifo", "mixed"),
        "Groups that a gradient step draws from the buffer: the newest (recency), random ones "
        "(uniform), the least often used (fifo), or fresh groups mixed with random older ones "
        "(mixed). `auto` means `mixed` if there is replay, and `recency` otherwise.",
        read_if=REPLAY,
        harmless=("recency",),
        default_by=where_none(
            ("buffer_capacity",), lambda capacity: "mixed" if capacity > 1 else "recency"
        ),
    )
    engine: str = choice_or_reference(
        ("auto", *ENGINES),
        "Engine that samples the responses. `auto` chooses torch for policies of this package, hf "
        "for Hugging Face models, and control for networks that act in an environment. `vllm` "
        "samples from policies of this package and from Hugging Face models. Your own Class also "
        "works.",
        what="Class",
        also_called=(
            trl("use_vllm", "on CPUs, vLLM also needs placement=disaggregated", value="vllm"),
            verl("rollout.name"),
        ),
    )
    transport: str = choice_or_reference(
        ("auto", *TRANSPORTS),
        "Transport of weights from the learner to the generators. `auto` chooses in_process for "
        "placement=colocated. For placement=disaggregated, `auto` chooses shm if all actors are on "
        "one machine, by_machine if only some generators are on the learner's machine, and "
        "object_store otherwise. Your own record of a transport also works.",
    )
    transport_dtype: str = choice(
        ("float32", "bfloat16"),
        "Precision in which weights are sent from the learner to the generators.",
        read_if=one_of("model.dtype", "float32"),
    )
    seed: int = integer(0, "Seed for all random draws.", minimum=0, maximum=2**32 - 1)

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
        """Return the value at a dotted key, as in `config["optim.lr"]`."""
        value: Any = self
        for name in key.split("."):
            value = getattr(value, name)
        return value


DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(TrialSettings)}
SECTIONS: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if is_dataclass(value)}


# The check of every dotted key.
CHECKS: dict[str, Check] = {
    **checks_of(TrialSettings),
    **{
        key: check
        for name, section in SECTIONS.items()
        for key, check in checks_of(section, f"{name}.").items()
    },
}

# Keys that affect only training: neither the sampled tokens nor their rewards depend on them.
OF_TRAINING = tuple(key for key, check in CHECKS.items() if check.of_training)

# Keys that have an effect only with some values of other keys. If several given keys have no
# effect, the error names the first of them.
SOMETIMES_READ = [key for key, check in CHECKS.items() if check.read_if]


def of_other_placement(key: str, placement: str) -> bool:
    """Return True if `key` is a setting of `resources` that has no effect in this placement."""
    conditions = CHECKS[key].read_if if key in CHECKS else ()
    return key.startswith("resources.") and any(
        condition.keys == ("placement",) and not condition.holds(placement)
        for condition in conditions
    )


# The names that our settings have in TRL and in verl, keyed by the library's spelling.
TRL, VERL = by_name(name.of(key) for key, check in CHECKS.items() for name in check.also_called)


def placement_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts that involve placement, lag and transport."""
    colocated = config.placement == "colocated"
    # A user's transport has no record here. It is checked before the trial starts, on the machine
    # that has the file of the transport.
    transport, r = TRANSPORTS.get(config.transport), config.resources
    in_process = transport is not None and transport.sidedness == "in_process"
    refused = transport and transport.refuses_actors(**r.actors)

    yield (
        colocated and not config.in_turns,
        "lag",
        "needs placement=disaggregated, got colocated; or set lag_mode=exact",
    )
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
    """Yield conflicts that involve the engine."""
    # With engine=auto, the trial chooses an engine that supports these settings. So the checks
    # below skip `auto` if they depend on what an engine supports.
    record = engine_record(config.engine)
    refused = record.refused_transports.get(config.transport)
    lowest, sampler = record.lowest_temperature, config.model.sampler_dtype
    on_cpus = config.placement == "colocated" and not config.resources.worker_gpus

    yield (
        on_cpus and bool(record.apart_on_cpus),
        "engine",
        f"does not work with placement=colocated: {record.apart_on_cpus}",
    )
    yield (
        refused is not None,
        "transport",
        f"does not work with engine={config.engine}: {refused}; use auto",
    )
    yield (
        config.rollout.slots is not None and config.engine != "auto" and not record.queues,
        "rollout.slots",
        f"must be none with engine={config.engine}; other values need engine=torch",
    )
    yield (
        sampler != "float32" and config.engine != "auto" and not record.narrows,
        "model.sampler_dtype",
        f"must be float32 with engine={config.engine}; bfloat16 needs engine=torch or vllm",
    )
    yield (
        sampler != "float32" and config.importance_cap is None and not config.corrects_itself,
        "loss.importance_cap",
        f"must be above 0 with model.sampler_dtype={sampler}, which changes log-probs",
    )
    yield (
        config.rollout.overlong == "interrupt"
        and config.engine != "auto"
        and not record.interrupts,
        "rollout.overlong",
        f"does not work with engine={config.engine}, which cannot insert text into a response; use "
        "engine=torch or hf",
    )
    yield (
        config.eval.top_p < 1 and config.engine != "auto" and not record.top_p,
        "eval.top_p",
        f"must be 1 with engine={config.engine}; lower values need engine=torch, hf or vllm",
    )
    for section in ("rollout", "eval"):
        temperature = config[f"{section}.temperature"]
        yield (
            0 < temperature < lowest,
            f"{section}.temperature",
            f"must be >= {lowest:g} with engine={config.engine}, which rounds lower temperatures "
            "up",
        )
