"""The settings from which a policy is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a policy. The same corpus, thread count and machine give the same bits."""

    steps: int = 4500
    batch_size: int = 16
    lr: float = 3e-3
    front_share: float = 0.6  # the share of documents that come first and hold their keywords
    keyword_share: float = 0.4  # the share of the later documents that hold their keywords
    seed: int = 0
    preset: str = "tiny"
