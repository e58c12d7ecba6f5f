"""Names of settings in TRL and verl, for users who know those libraries.

A field declares such names as `also_called`. If a user sets a key by such a name, the error
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
    also: tuple[str, ...] = ()  # other keys or assignments that must be set
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
    "responses are sampled from the whole distribution, because the loss needs its log-probs"
)
_NEVER_CUT = "prompts are never cut; a prompt that does not fit the model's context is refused"

NOTHING_ALIKE = (
    *(trl(name, _WHOLE_LAW) for name in ("top_p", "top_k", "min_p", "repetition_penalty")),
    *(verl(name, _WHOLE_LAW) for name in ("rollout.top_p", "rollout.top_k")),
    trl("logging_steps", "every round is logged"),
    trl("output_dir", "files are written to STORAGE/NAME, which --storage and --name set"),
    trl("max_prompt_length", _NEVER_CUT),
    verl("data.max_prompt_length", _NEVER_CUT),
    verl(
        "actor.entropy_coeff",
        "no loss has an entropy bonus; loss.type=clip_cov and kl_cov keep entropy up",
    ),
    verl("trainer.project_name", "use --name"),
    verl("trainer.experiment_name", "use --name"),
)

Names: TypeAlias = dict[str, ForeignName]


def by_name(names: Iterable[ForeignName]) -> tuple[Names, Names]:
    """Return the names from TRL and the names from verl, keyed by their spelling there."""
    listed = [*names, *NOTHING_ALIKE]
    trl_names, verl_names = (
        {name.name: name for name in listed if name.library == library}
        for library in ("TRL", "verl")
    )
    return trl_names, verl_names
