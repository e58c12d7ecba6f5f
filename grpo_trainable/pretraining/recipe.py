"""The settings from which a policy is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is made. With the same corpus, thread count and machine it gives the same bits."""

    steps: int = 4500
    batch_size: int = 16
    lr: float = 3e-3
    front_share: float = 0.6  # of the documents: those in front, which all hold their keywords
    keyword_share: float = 0.4  # of the documents after those, that hold their keywords
    seed: int = 0
    preset: str = "tiny"
