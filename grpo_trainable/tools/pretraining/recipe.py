"""Settings for pretraining a policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings for any policy. The same corpus, thread count and machine give the same bits."""

    steps: int = 4500
    batch_size: int = 16
    lr: float = 3e-3
    seed: int = 0
    preset: str = "tiny"


@dataclass(frozen=True, kw_only=True)
class StoryRecipe(Recipe):
    """Settings for a policy that writes stories."""

    front_share: float = 0.6  # share of documents that form the first part, each with its keywords
    keyword_share: float = 0.4  # among the later documents, the share that contain their keywords


@dataclass(frozen=True, kw_only=True)
class ArithmeticRecipe(Recipe):
    """Settings for a policy that solves word problems."""

    preset: str = "arithmetic"
    largest: int = 30  # largest number in a problem, results included
    operations: int = 2  # maximum number of operations in a problem
    front_share: float = 0.75  # share of documents that form the first part, all entirely correct
    careful_share: float = 0.5  # among the later documents, the share with a right calculation
    format_share: float = 0.7  # among the later documents, the share with a correctly marked answer


@dataclass(frozen=True, kw_only=True)
class GamesRecipe(Recipe):
    """Settings for a policy that plays at random."""

    preset: str = "games"
    steps: int = 1200
    batch_size: int = 64
    listening_share: float = 0.33  # share of guessing players who follow the hints
    calling_share: float = 0.2  # share of calculating players who call the calculator first
    copying_share: float = 0.7  # among the callers, share who answer with the calculator's result


# Recipes of generated corpora, by name. A corpus from a JSONL file uses a plain `Recipe`.
RECIPES: dict[str, type[Recipe]] = {
    "stories": StoryRecipe,
    "arithmetic": ArithmeticRecipe,
    "games": GamesRecipe,
}
