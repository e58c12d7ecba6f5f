"""Names of settings in TRL and verl, for users who know these libraries.

A field declares such names as `also_called`. If a user sets a key by one of these names, the error
proposes our key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

PAGE = "docs/howto/from-trl.md"


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A setting of another library."""

    library: str
    name: str  # as the library spells the name
    hint: str = ""  # how our key differs, or why there is no such key here
    value: str | None = None  # the value of our key that has the same effect
    also: tuple[str, ...] = ()  # other keys or assignments that are needed too
    ours: tuple[str, ...] = ()  # our keys or assignments that have the same effect

    def of(self, key: str) -> ForeignName:
        """Return a copy of this name that refers to our `key`."""
        own = key if self.value is None else f"{key}={self.value}"
        return replace(self, ours=(own, *self.also))

    @property
    def advice(self) -> str:
        """Advice on the key to set here instead."""
        what = f"{self.library}'s {self.name}"
        if not self.ours:
            return f"{what} has no counterpart here: {self.hint}"
        means = f"{what} is {' and '.join(self.ours)} here"
        return f"{means}: {self.hint}" if self.hint else means


def trl(name: str, hint: str = "", **more: Any) -> ForeignName:
    """Return a name from TRL's `GRPOConfig`."""
    return ForeignName("TRL", name, hint, **more)


def verl(name: str, hint: str = "", **more: Any) -> ForeignName:
    """Return a name from verl. The prefix `actor_rollout_ref.` is added if it is left out."""
    inside = name.startswith(("actor.", "rollout.", "model."))
    return ForeignName("verl", f"actor_rollout_ref.{name}" if inside else name, hint, **more)


# ---- Hints that several names share --------------------------------------------------------------

IN_ROUNDS = "counted in rounds of k gradient steps each"
LENGTH = "or give the number of responses with --samples N"
NO_PASSES = f"count rounds, not passes over the prompts; {LENGTH}"
MICROBATCH = (
    "the number of responses in one forward and backward pass; a gradient step uses "
    "rollout.prompts × rollout.group_size responses, fewer with k_mode=minibatches"
)
MINIBATCHES = ("k_mode=minibatches",)

# ---- Names without a counterpart here ------------------------------------------------------------

_WHOLE_LAW = (
    "responses are sampled from the whole distribution, because the loss needs log-probs under it"
)
_LOGS = (
    "every trial writes a log for TensorBoard, result.json and progress.csv; --tracker wandb, "
    "mlflow or trackio also sends each round to a tracker (docs/howto/trackers.md)"
)
_ORDER = "each pass over the prompts has a different order"
_DIRECTORY = "files are written to STORAGE/NAME, which --storage and --name set"
_DATA = "save the data with Dataset.save_to_disk, and name the directory in task.train_file"
_NEVER_CUT = "prompts are never cut; a prompt that does not fit the model's context is an error"
_SLEEPS = "with placement=colocated, vLLM always sleeps while the learner trains"

NOTHING_ALIKE = (
    trl("top_p", f"{_WHOLE_LAW}; eval.top_p is only for evaluations"),
    verl("rollout.top_p", f"{_WHOLE_LAW}; eval.top_p is only for evaluations"),
    *(trl(name, _WHOLE_LAW) for name in ("top_k", "min_p", "repetition_penalty")),
    trl("generation_kwargs", _WHOLE_LAW),
    verl("rollout.top_k", _WHOLE_LAW),
    trl("logging_steps", "every round is logged"),
    *(trl(name, _LOGS) for name in ("report_to", "logging_strategy")),
    *(trl(name, _DIRECTORY) for name in ("output_dir", "logging_dir")),
    trl("overwrite_output_dir", "an experiment is never overwritten; choose another --name"),
    trl("run_name", "use --name"),
    trl("resume_from_checkpoint", "use --resume --name NAME"),
    trl("push_to_hub", "launch/export.py writes a directory that transformers loads"),
    *(trl(name, _DATA) for name in ("dataset_name", "dataset_config", "dataset_train_split")),
    trl("shuffle_dataset", _ORDER),
    verl("data.shuffle", _ORDER),
    trl("fp16", "model.dtype is float32 or bfloat16"),
    trl("lora_dropout", "adapters have no dropout, so that sampler and learner agree"),
    trl("disable_dropout", "dropout is always off"),
    trl("sync_ref_model", "the reference is the policy before training, and never changes"),
    trl("deepspeed", "resources.learner_strategy=fsdp2 divides a policy among several learners"),
    trl("per_device_eval_batch_size", "an evaluation uses the same batch size as training"),
    trl("vllm_enable_sleep_mode", _SLEEPS),
    verl("rollout.free_cache_engine", _SLEEPS),
    trl(
        "load_in_4bit",
        "quantized models are not supported; to train adapters, set model.lora_rank",
    ),
    trl("top_entropy_quantile", "a loss of your own can leave tokens out"),
    trl("max_prompt_length", _NEVER_CUT),
    verl("data.max_prompt_length", _NEVER_CUT),
    verl(
        "actor.entropy_coeff",
        "no loss has an entropy bonus; loss.type=clip_cov and kl_cov keep entropy from falling",
    ),
    verl("trainer.logger", _LOGS),
    verl("trainer.project_name", "use --name"),
    verl("trainer.experiment_name", "use --name"),
)

Names: TypeAlias = dict[str, ForeignName]


def by_name(names: Iterable[ForeignName]) -> tuple[Names, Names]:
    """Return the names from TRL and those from verl, each keyed by its spelling in its library."""
    listed = [*names, *NOTHING_ALIKE]
    assert len({(own.library, own.name) for own in listed}) == len(listed), "a name is listed twice"
    trl_names, verl_names = (
        {name.name: name for name in listed if name.library == library}
        for library in ("TRL", "verl")
    )
    return trl_names, verl_names
