"""An evaluation: the policy, the settings, and every response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_trainable.text import plural
from grpo_trainable.tools.evaluation.generation import CATEGORIES, Generation

UNSCORED = "unscored"  # the category of responses that could not be scored


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Responses of an evaluation in the order of prompts, with their origin."""

    name: str  # the directory's name
    policy: Mapping[str, Any]  # source, path, round, version, sha256, parameters
    config: Mapping[str, Any]  # every setting, nested
    generations: Sequence[Generation]
    origin: Mapping[str, Any] = field(default_factory=dict)  # command, commit, machine, packages, …

    @cached_property
    def by_prompt(self) -> dict[int, list[Generation]]:
        """Responses to each prompt, by prompt index."""
        prompts: dict[int, list[Generation]] = {}
        for generation in self.generations:
            prompts.setdefault(generation.prompt_index, []).append(generation)
        return prompts

    @cached_property
    def scored(self) -> dict[int, list[Generation]]:
        """Responses to each fully scored prompt, from which the reward figures are computed."""
        return {
            index: own
            for index, own in self.by_prompt.items()
            if all(generation.error is None for generation in own)
        }

    @property
    def errors(self) -> list[Generation]:
        """Responses that could not be scored."""
        return [generation for generation in self.generations if generation.error is not None]

    @property
    def samples(self) -> int:
        """Number of responses to each prompt."""
        return max(map(len, self.by_prompt.values()), default=0)

    @property
    def repeated(self) -> int:
        """Number of prompts that repeat an earlier prompt."""
        texts = [own[0].prompt for own in self.by_prompt.values()]
        return len(texts) - len(set(texts))

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each category, in the order of the tables."""
        judged = {own.format_reward is not None for own in self.generations if own.error is None}
        meanings = dict(CATEGORIES)
        if False in judged:
            meanings |= {"correct": "answer 1", "wrong_answer": "answer 0"}
        if judged == {False}:
            del meanings["wrong_format"]
        return {**meanings, UNSCORED: "the reward failed"}

    @property
    def categories(self) -> dict[str, list[Generation]] | None:
        """Responses by category, including those that could not be scored, if there are any.

        None if the format and answer rewards of some response fit no category.
        """
        found: dict[str, list[Generation]] = {name: [] for name in self.meanings}
        for generation in self.generations:
            name = UNSCORED if generation.error is not None else generation.category
            if name is None:
                return None
            found[name].append(generation)
        return found if found[UNSCORED] else {n: own for n, own in found.items() if n != UNSCORED}

    @property
    def problems(self) -> list[str]:
        """Reasons to doubt the figures, one line each."""
        found = []
        if errors := self.errors:
            left_out = len(self.by_prompt) - len(self.scored)
            found.append(
                f"the reward failed on {len(errors)} of "
                f"{plural(len(self.generations), 'response')}, so the reward figures exclude "
                f"{left_out} of {plural(len(self.by_prompt), 'prompt')} (prompt "
                f"{errors[0].prompt_index}: {errors[0].error})"
            )
        if self.repeated:
            found.append(
                f"{self.repeated} of {len(self.by_prompt)} prompts repeat earlier ones, so the "
                "intervals are narrower than they should be"
            )
        return found
