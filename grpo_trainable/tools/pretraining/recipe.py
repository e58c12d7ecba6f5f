"""The settings from which a policy is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of any policy. The same corpus, thread count and machine give the same bits."""

    steps: int = 4500
    batch_size: int = 16
    lr: float = 3e-3
    seed: int = 0
    preset: str = "tiny"


@dataclass(frozen=True, kw_only=True)
class StoryRecipe(Recipe):
    """Settings of a policy that writes stories."""

    front_share: float = 0.6  # the share of documents that come first and hold their keywords
    keyword_share: float = 0.4  # the share of the later documents that hold their keywords


@dataclass(frozen=True, kw_only=True)
class ArithmeticRecipe(Recipe):
    """Settings of a policy that solves word problems."""

    preset: str = "arithmetic"
    largest: int = 30  # the largest number in a problem, results included
    operations: int = 2  # the most operations of a problem
    front_share: float = 0.75  # the share of documents that come first and are right in every way
    careful_share: float = 0.5  # the share of the later documents that are calculated right
    format_share: float = 0.7  # the share of the later documents that mark their answer right


@dataclass(frozen=True, kw_only=True)
class GamesRecipe(Recipe):
    """Settings of a policy that plays at random."""

    preset: str = "games"
    steps: int = 1200
    batch_size: int = 64
    listening_share: float = 0.33  # the share of guessing players who listen to the hints
    calling_share: float = 0.2  # the share of players who call the calculator first
    copying_share: float = 0.7  # the share of these who answer what it says


# Corpora that are generated, by name; a JSONL file has the settings of any policy.
RECIPES: dict[str, type[Recipe]] = {
    "stories": StoryRecipe,
    "arithmetic": ArithmeticRecipe,
    "games": GamesRecipe,
}
