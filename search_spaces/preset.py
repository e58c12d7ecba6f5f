"""Settings that belong together, by name: what `--preset` puts under the arms of a search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from search_spaces.base import SearchSpace
from search_spaces.columns import DRIFT, SPEED


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings that an arm may replace, and `--set` as well."""

    name: str
    meaning: str  # a noun phrase
    settings: Mapping[str, Any]  # dotted keys
    paper: str | None = None  # the number on arXiv, or an address
    # Keys that are left to the user, and what the preset means by them.
    wants: Mapping[str, str] = field(default_factory=dict)
    differs: str = ""  # sentences on what is not the paper's

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
