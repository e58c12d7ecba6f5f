"""Names of settings in TRL and verl, for users who come from there.

A field declares them as `also_called`. An error for a key of theirs then names our key.
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
    name: str  # their spelling
    hint: str = ""  # how it differs, or why it has no counterpart here
    value: str | None = None  # the value of our key that has the same effect
    also: tuple[str, ...] = ()  # other keys or assignments that must be set
    ours: tuple[str, ...] = ()  # our keys or assignments that have the same effect

    def of(self, key: str) -> ForeignName:
        """Return this name as a name of our `key`."""
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
    """Return a name from verl. The prefix `actor_rollout_ref.` may be left out."""
    inside = name.startswith(("actor.", "rollout.", "model."))
    return ForeignName("verl", f"actor_rollout_ref.{name}" if inside else name, hint, **more)


# ---- Hints of several names ----------------------------------------------------------------------

IN_ROUNDS = "in rounds, each of which has k gradient steps"
LENGTH = "or --samples N for N responses, which are cut into rounds"
NO_PASSES = f"passes over the prompts are not counted; {LENGTH}"
MICROBATCH = (
    "responses in one forward and backward pass; a gradient step has rollout.prompts × "
    "rollout.group_size of them, fewer with k_mode=minibatches"
)
MINIBATCHES = ("k_mode=minibatches",)

# ---- Names of what is not here -------------------------------------------------------------------

_WHOLE_LAW = "responses are sampled from the whole distribution, whose log-probs the loss needs"
_NEVER_CUT = "prompts are never cut; one that does not fit the model's context is refused"
_NO_WARMUP = "optim.schedule has no warm-up"

NOTHING_ALIKE = (
    *(trl(name, _NO_WARMUP) for name in ("warmup_ratio", "warmup_steps")),
    *(trl(name, _WHOLE_LAW) for name in ("top_p", "top_k", "min_p", "repetition_penalty")),
    *(verl(name, _WHOLE_LAW) for name in ("rollout.top_p", "rollout.top_k")),
    trl("logging_steps", "every round is logged"),
    trl("output_dir", "it is STORAGE/NAME, from --storage and --name"),
    trl("max_prompt_length", _NEVER_CUT),
    verl("data.max_prompt_length", _NEVER_CUT),
    verl(
        "actor.entropy_coeff",
        "no loss has an entropy bonus; loss.type=clip_cov and kl_cov keep entropy up",
    ),
    verl("trainer.project_name", "an experiment has --name"),
    verl("trainer.experiment_name", "an experiment has --name"),
)

Names: TypeAlias = dict[str, ForeignName]


def by_name(names: Iterable[ForeignName]) -> tuple[Names, Names]:
    """Return the names of TRL and those of verl, each keyed by its spelling."""
    listed = [*names, *NOTHING_ALIKE]
    trl_names, verl_names = (
        {name.name: name for name in listed if name.library == library}
        for library in ("TRL", "verl")
    )
    return trl_names, verl_names
