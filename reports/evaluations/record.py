"""An evaluation: what was evaluated, how, and every response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_trainable.tools.evaluation.generation import CATEGORIES, Generation


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The responses in the order of prompts, and the origin of them."""

    name: str  # the directory's name
    policy: Mapping[str, Any]  # source, path, round, version, sha256, parameters
    config: Mapping[str, Any]  # every setting, nested
    generations: Sequence[Generation]
    origin: Mapping[str, Any] = field(default_factory=dict)  # command, commit, machine, packages, …

    @cached_property
    def by_prompt(self) -> dict[int, list[Generation]]:
        """The responses to each prompt."""
        prompts: dict[int, list[Generation]] = {}
        for generation in self.generations:
            prompts.setdefault(generation.prompt_index, []).append(generation)
        return prompts

    @cached_property
    def scored(self) -> dict[int, list[Generation]]:
        """The same for the prompts whose responses could all be scored: figures rest on these."""
        return {
            index: own
            for index, own in self.by_prompt.items()
            if all(generation.error is None for generation in own)
        }

    @property
    def errors(self) -> list[Generation]:
        """The responses that could not be scored."""
        return [generation for generation in self.generations if generation.error is not None]

    @property
    def samples(self) -> int:
        """Responses to each prompt."""
        return max(map(len, self.by_prompt.values()), default=0)

    @property
    def repeated(self) -> int:
        """Prompts that are asked for a second time, or more often."""
        texts = [own[0].prompt for own in self.by_prompt.values()]
        return len(texts) - len(set(texts))

    @property
    def categories(self) -> dict[str, list[Generation]] | None:
        """The responses of each category, and under "unscored" those that could not be scored; None
        where a reward is neither 0 nor 1, so that there are no categories."""
        found: dict[str, list[Generation]] = {name: [] for name in CATEGORIES}
        for generation in self.generations:
            name = "unscored" if generation.error is not None else generation.category
            if name is None:
                return None
            found.setdefault(name, []).append(generation)
        return found

    @property
    def problems(self) -> list[str]:
        """What a reader must know before trusting the figures, in one line each."""
        found = []
        if errors := self.errors:
            left_out = len(self.by_prompt) - len(self.scored)
            found.append(
                f"the reward failed on {len(errors)} of {len(self.generations)} responses, so "
                f"{left_out} of {len(self.by_prompt)} prompts are left out of the rewards (prompt "
                f"{errors[0].prompt_index}: {errors[0].error})"
            )
        if self.repeated:
            found.append(
                f"{self.repeated} of {len(self.by_prompt)} prompts repeat others: there are not as "
                "many held-out prompts, and the intervals are narrower than they should be"
            )
        return found
