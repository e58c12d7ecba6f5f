"""Select a trial's engine: the configured one or, with `auto`, one that suits the policy."""

from __future__ import annotations

from dataclasses import replace

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.engine_catalog import (
    BY_POLICY,
    ENGINES,
    POLICY_KINDS,
    EngineRecord,
    PolicyKind,
    engine_record,
)
from grpo_trainable.config.resources import sampling_gpus
from grpo_trainable.models.directory import policy_shape
from grpo_trainable.models.hf.attention_limits import attention_limit
from grpo_trainable.models.hf.files import local_directory
from grpo_trainable.models.hf.json_files import is_hugging_face
from grpo_trainable.models.shape import PolicySettings


def chosen_engine(config: GRPOConfig) -> EngineRecord:
    """Return the record of a trial's engine. With `auto`, the kind of policy decides.

    Raises:
        ValueError: The engine cannot sample from the trial's policy, does not support a setting, or
            needs a library that is not installed; or the policy cannot be loaded from the hub. The
            message is one line.
    """
    kind = policy_kind(config.model)
    record = engine_record(BY_POLICY[kind] if config.engine == "auto" else config.engine)
    if kind not in record.samples:
        others = (f"{n} ({r.promise})" for n, r in ENGINES.items() if kind in r.samples)
        valid = ", ".join(("auto", *others))
        raise ValueError(
            f"engine={config.engine}: this engine samples from {_named(record)}, but "
            f"{_start(config)} is {POLICY_KINDS[kind]}; valid: {valid}"
        )
    if config.rollout.slots is not None and not record.queues:
        raise ValueError(
            f"rollout.slots={config.rollout.slots}: {record.name}, which samples from "
            f"model.path={config.model.path or 'none'}, cannot replace a finished response with a "
            "waiting one; use a policy of this package with engine=torch"
        )
    narrows = config.model.sampler_dtype != "float32"
    if narrows and not record.narrows:
        raise ValueError(
            f"model.sampler_dtype={config.model.sampler_dtype}: {record.name}, which samples from "
            f"model.path={config.model.path or 'none'}, always uses the precision of model.dtype; "
            "use engine=vllm, or a policy of this package with engine=torch"
        )
    if config.rollout.overlong == "interrupt" and not record.interrupts:
        raise ValueError(
            f"rollout.overlong=interrupt: {record.name} cannot insert text into a response; use "
            "engine=torch or hf"
        )
    if record.divides and sampling_gpus(config) > 1:
        _refuse_uneven_heads(config)
    missing = record.missing()
    if missing is not None:
        raise ValueError(f"engine={config.engine}: {missing}")
    if config.env.plays and kind == "hugging_face":
        _refuse_limited_attention(config)
    return replace(record, log_prob_error=None, compared=True) if narrows else record


def policy_kind(model: PolicySettings) -> PolicyKind:
    """Return the kind of policy that a trial starts from.

    A path may be a directory or a hub id. Without a path, the policy belongs to this package.
    """
    path = model.path
    if model.env is not None:
        return "control"
    if path is None or not is_hugging_face(local_directory(path)):
        return "ours"
    return "hugging_face"


def _refuse_limited_attention(config: GRPOConfig) -> None:
    """Check that each row of a model's cache may have its own number of tokens.

    Raises:
        ValueError: Some layers do not attend to all earlier tokens, or the model's config cannot be
            read. The message is one line.
    """
    path = config.model.path
    assert path is not None, "the policy is a Hugging Face model"
    limit = attention_limit(local_directory(path))
    if limit is not None:
        raise ValueError(
            f"env.name={config.env.name}: some layers of model.path={path} do not attend to all "
            f"earlier tokens ({limit}); choose a model whose layers all do"
        )


def _refuse_uneven_heads(config: GRPOConfig) -> None:
    """Check that the GPUs of a generator can share the attention heads of the model equally.

    Either each GPU holds the same number of key-value heads, or each key-value head is copied to
    the same number of GPUs.

    Raises:
        ValueError: The GPUs cannot share the heads equally. The message is one line.
    """
    gpus, shape = int(sampling_gpus(config)), policy_shape(config.model)
    heads, kv_heads = shape.heads, shape.kv_heads
    key = "worker_gpus" if config.placement == "colocated" else "generator_gpus"
    if heads is not None and heads % gpus:
        raise ValueError(
            f"resources.{key}={gpus}: engine={config.engine} divides the {heads} attention heads "
            f"of the model equally among the GPUs of a generator; use a divisor of {heads}"
        )
    if kv_heads is not None and kv_heads % gpus and gpus % kv_heads:
        raise ValueError(
            f"resources.{key}={gpus}: engine={config.engine} divides the {kv_heads} key and value "
            f"heads of the model equally among the GPUs of a generator; use a divisor or a "
            f"multiple of {kv_heads}"
        )


def _start(config: GRPOConfig) -> str:
    model = config.model
    return f"model.path={model.path or 'none'}" if model.env is None else f"model.env={model.env}"


def _named(record: EngineRecord) -> str:
    return " or ".join(POLICY_KINDS[kind] for kind in record.samples)
