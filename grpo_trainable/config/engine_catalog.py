"""One record for each engine, with the engine's promises about the tokens that it samples.

This module imports only the standard library, so the config can list the engines and the launcher
can query them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grpo_trainable.plugins import missing_library

PolicyKind = Literal["ours", "hugging_face", "control"]

# Kinds of policies that a trial can start from, in words.
POLICY_KINDS: dict[PolicyKind, str] = {
    "ours": "a policy of this package",
    "hugging_face": "a Hugging Face model",
    "control": "a network that acts in an environment",
}
_OF_TEXT: tuple[PolicyKind, ...] = ("ours", "hugging_face")


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """Facts about an engine that are known before it is built."""

    name: str
    build: str  # `module:name` of a function that turns an `EngineSetup` into an `Engine`
    samples: tuple[PolicyKind, ...] = _OF_TEXT
    # True: for equal requests, any process on this machine samples the same tokens with the same
    # log-probs, bit for bit. False: a resumed run may differ from an uninterrupted run.
    same_bits: bool = False
    # Largest difference, in nats, between the engine's log-prob of a token and the log-prob that
    # the learner computes from float32 weights. None: unknown.
    log_prob_error: float | None = None
    # True: at the start of a trial, the engine's log-probs are compared with the learner's.
    compared: bool = False
    # Why the engine cannot share a process with a learner that trains on CPUs. Empty: it can.
    apart_on_cpus: str = ""
    # Transports that the engine does not support, each with the reason.
    refused_transports: Mapping[str, str] = field(default_factory=dict)
    divides: bool = False  # True: the engine divides a model among a generator's GPUs
    fits_cache: bool = False  # True: on GPUs, the KV cache takes the memory that is left
    # Lowest valid temperature above 0. At temperature 0, an engine chooses the most likely token.
    lowest_temperature: float = 0.0
    top_p: bool = False  # True: supports `eval.top_p`
    plays: bool = False  # True: can add an environment's answers to a response
    interrupts: bool = False  # True: can insert text in the middle of a response
    queues: bool = False  # True: supports `rollout.slots`, so responses may wait until others end
    narrows: bool = False  # True: may sample in `model.sampler_dtype`
    narrows_cache: bool = False  # True: its KV cache may have `model.sampler_dtype`
    libraries: tuple[str, ...] = ()  # optional libraries that the engine needs
    install: str = ""  # the command that installs the libraries

    def missing(self) -> str | None:
        """Return which library this process lacks and how to install it, or None."""
        missing = (missing_library(library, self.install) for library in self.libraries)
        return next(filter(None, missing), None)

    @property
    def promise(self) -> str:
        """The promises of the engine, in words."""
        bits = "repeats bit for bit" if self.same_bits else "different tokens after a resume"
        if self.log_prob_error is None:
            checked = "compared with the learner's at the start" if self.compared else "unchecked"
            return f"{bits}, log-probs {checked}"
        return f"{bits}, log-probs within {self.log_prob_error:g} of the learner's"


ENGINES: dict[str, EngineRecord] = {
    record.name: record
    for record in (
        EngineRecord(
            name="torch",
            build="grpo_trainable.engines.torch_engine:build_torch_engine",
            samples=("ours",),
            same_bits=True,
            log_prob_error=1e-4,
            top_p=True,
            plays=True,
            interrupts=True,
            queues=True,
            narrows=True,
        ),
        EngineRecord(
            name="hf",
            build="grpo_trainable.engines.hf.engine:build_hf_engine",
            samples=("hugging_face",),
            same_bits=True,
            log_prob_error=1e-4,
            top_p=True,
            plays=True,
            interrupts=True,
            libraries=("transformers",),
            install="pip install -e '.[hf]'",
        ),
        EngineRecord(
            name="vllm",
            build="grpo_trainable.engines.vllm.build:build_vllm_engine",
            compared=True,
            apart_on_cpus="on CPUs, vLLM fixes the number of threads of its process, so the "
            "learner of a colocated worker would have to train with that number of threads",
            refused_transports={"gloo": "vLLM has its own collective group in its process"},
            divides=True,
            fits_cache=True,
            lowest_temperature=0.01,
            top_p=True,
            plays=True,
            narrows=True,
            narrows_cache=True,
            libraries=("vllm", "transformers"),
            install="pip install -e '.[vllm]', or '.[vllm-gpu]' for GPUs (Python >= 3.11)",
        ),
        EngineRecord(
            name="control",
            build="grpo_trainable.control.engine:build_control_engine",
            samples=("control",),
            same_bits=True,
            log_prob_error=1e-4,
            libraries=("gymnasium",),
            install="pip install -e '.[control]'",
        ),
    )
}

# The engine that `auto` chooses for each kind of policy.
BY_POLICY: dict[PolicyKind, str] = {
    "ours": "torch",
    "hugging_face": "hf",
    "control": "control",
}


def engine_record(name: str) -> EngineRecord:
    """Return the record of an engine. The record of a user's engine promises nothing."""
    return ENGINES[name] if name in ENGINES else EngineRecord(name=name, build=name)
