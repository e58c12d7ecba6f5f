"""What TRL and verl call a setting, for those who come from there.

A field names them as `also_called`, so that an error can say what a key of theirs is here.
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
    hint: str = ""  # how it differs, or why there is nothing alike
    value: str | None = None  # the value that ours needs to do the same
    also: tuple[str, ...] = ()  # what else must be set: keys, or assignments
    ours: tuple[str, ...] = ()  # our keys, or assignments, that do the same

    def of(self, key: str) -> ForeignName:
        """Return it as the name of our `key`."""
        own = key if self.value is None else f"{key}={self.value}"
        return replace(self, ours=(own, *self.also))

    @property
    def advice(self) -> str:
        """Say what to set here in its place."""
        what = f"{self.library}'s {self.name}"
        if not self.ours:
            return f"{what} has no counterpart here: {self.hint}"
        means = f"{what} is {' and '.join(self.ours)} here"
        return f"{means}: {self.hint}" if self.hint else means


def trl(name: str, hint: str = "", **more: Any) -> ForeignName:
    """Return a name of TRL's `GRPOConfig`."""
    return ForeignName("TRL", name, hint, **more)


def verl(name: str, hint: str = "", **more: Any) -> ForeignName:
    """Return a name of verl's; its `actor_rollout_ref.` may be left out."""
    inside = name.startswith(("actor.", "rollout.", "model."))
    return ForeignName("verl", f"actor_rollout_ref.{name}" if inside else name, hint, **more)


# ---- Hints of several names ----------------------------------------------------------------------

IN_ROUNDS = "in rounds, each of which has k gradient steps"
LENGTH = "or --samples N for so many responses, which are cut into rounds"
NO_PASSES = f"passes over the prompts are not counted; {LENGTH}"
MICROBATCH = (
    "responses of one forward and backward pass; a gradient step has rollout.prompts × "
    "rollout.group_size of them, less with k_mode=minibatches"
)
MINIBATCHES = ("k_mode=minibatches",)

# ---- Names of what is not here -------------------------------------------------------------------

_WHOLE_LAW = "responses are sampled from the whole distribution, whose log-probs the loss needs"
_NEVER_CUT = "prompts are never cut; one that does not fit the context of the model is refused"
_NO_WARMUP = "optim.schedule has no warm-up"

NOTHING_ALIKE = (
    *(trl(name, _NO_WARMUP) for name in ("warmup_ratio", "warmup_steps")),
    *(trl(name, _WHOLE_LAW) for name in ("top_p", "top_k", "min_p", "repetition_penalty")),
    *(verl(name, _WHOLE_LAW) for name in ("rollout.top_p", "rollout.top_k")),
    trl("logging_steps", "every round is logged"),
    trl("output_dir", "it is STORAGE/NAME, of --storage and --name"),
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
    """Return the names of TRL's and of verl's, each by its spelling."""
    listed = [*names, *NOTHING_ALIKE]
    trl_names, verl_names = (
        {name.name: name for name in listed if name.library == library}
        for library in ("TRL", "verl")
    )
    return trl_names, verl_names
