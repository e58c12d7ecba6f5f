"""How responses are sampled: one record for each engine, with what it promises.

Only the standard library is imported here, so that the config can list them and the launcher ask
them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PolicyKind = Literal["ours", "hugging_face", "control"]

# What a trial starts from, in words.
POLICY_KINDS: dict[PolicyKind, str] = {
    "ours": "a policy of this package",
    "hugging_face": "a Hugging Face model",
    "control": "a network that acts in an environment",
}
_OF_TEXT: tuple[PolicyKind, ...] = ("ours", "hugging_face")


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """What is known about an engine before it is built."""

    name: str
    build: str  # `module:name`, called with an `EngineSetup`, returns an `Engine`
    samples: tuple[PolicyKind, ...] = _OF_TEXT
    # Asked again, by any process on this machine, it samples the same tokens with the same
    # log-probs, bit for bit. Without that a resumed run is not the one that never stopped.
    same_bits: bool = False
    # How far, in nats, the log-prob of a token may be from the one that the learner computes from
    # float32 weights. None: nothing is known.
    log_prob_error: float | None = None
    compared: bool = False  # whether it compares them with the learner's when it is built
    # What its process cannot do beside sampling, as reasons by value.
    refused_placements: Mapping[str, str] = field(default_factory=dict)
    refuses_two_sided: str = ""  # why it cannot be in a transport's collective group, if so
    gpus: bool = True  # whether it may sample on a GPU
    lowest_temperature: float = 0.0  # above 0, which takes the most likely token
    plays: bool = False  # whether it can extend a response by what an environment says
    interrupts: bool = False  # whether it can feed a response a text in the middle
    queues: bool = False  # whether `rollout.slots` may make responses of a call wait for others
    narrows: bool = False  # whether it may sample in `model.sampler_dtype`
    libraries: tuple[str, ...] = ()  # extra libraries, which the package does without
    install: str = ""  # the line that installs them

    def missing(self) -> str | None:
        """The library that this process lacks, and how to get it; None when nothing is missing."""
        for library in self.libraries:
            if importlib.util.find_spec(library) is None:
                return f"the library {library} is not installed: {self.install}"
        return None

    @property
    def promise(self) -> str:
        """What can be relied on, in words."""
        bits = "the same bits when asked again" if self.same_bits else "other tokens after a resume"
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
            interrupts=True,
            libraries=("transformers",),
            install="pip install -e '.[hf]'",
        ),
        EngineRecord(
            name="vllm",
            build="grpo_trainable.engines.vllm.build:build_vllm_engine",
            compared=True,
            refused_placements={
                "colocated": "vLLM fixes the threads of its process, with which the learner of a "
                "colocated worker would have to train",
            },
            refuses_two_sided="vLLM has a collective group of its own in its process",
            gpus=False,
            lowest_temperature=0.01,
            libraries=("vllm", "transformers"),
            install="pip install -e '.[vllm]' (Python >= 3.11)",
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

# The engine that `auto` stands for.
BY_POLICY: dict[PolicyKind, str] = {
    "ours": "torch",
    "hugging_face": "hf",
    "control": "control",
}


def engine_record(name: str) -> EngineRecord:
    """The record of one of ENGINES, or of a user's engine, of which nothing is known."""
    return ENGINES[name] if name in ENGINES else EngineRecord(name=name, build=name)
