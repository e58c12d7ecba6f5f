"""The reward of `peers.py`, for both programs: a number from 0 to 1 that depends on all of the
response and means nothing, so that every group has a signal."""

from __future__ import annotations

import zlib
from typing import Any


def score(response: str, ground_truth: Any) -> float:
    return zlib.crc32(response.encode()) / 2**32
