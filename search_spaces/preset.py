"""Settings that belong together, by name: what `--preset` puts under the arms of a search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_trainable.config import GRPOConfig
from search_spaces.columns import DRIFT, SPEED
from search_spaces.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings that an arm may replace, and `--set` as well."""

    name: str
    meaning: str  # a noun phrase
    settings: Mapping[str, Any]  # dotted keys
    paper: str | None = None  # the number on arXiv, or an address
    differs: str = ""  # where the settings are not the paper's, in sentences
    # Keys of files: without one of them its task is not what the preset is for.
    needs: tuple[str, ...] = ()

    def lacks(self, trial: GRPOConfig) -> str | None:
        """The key that a trial should set and does not; None where it lacks none, or is of another
        task than the preset."""
        if not self.needs or trial.task.name != self.settings["task.name"]:
            return None
        return self.needs[0] if all(trial[key] is None for key in self.needs) else None

    @property
    def address(self) -> str | None:
        """Where the paper is to be read."""
        if self.paper is None or self.paper.startswith("https:"):
            return self.paper
        return f"https://arxiv.org/abs/{self.paper}"

    @property
    def space(self) -> SearchSpace:
        """One trial of these settings: what runs where no search space is named."""
        return SearchSpace(
            name=self.name,
            question=f"what comes of {self.meaning}?",
            arms={"async" if self.settings.get("lag") else "sync": {}},
            columns=(SPEED, *DRIFT),
        )

    def under(self, space: SearchSpace) -> SearchSpace:
        """The space whose arms have these settings where they have none of their own."""
        arms = {arm: {**self.settings, **keys} for arm, keys in space.arms.items()}
        return replace(space, arms=arms)
