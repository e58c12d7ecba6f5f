"""Episodes as conversations with our own policies and with Hugging Face models."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_episodes import OURS, check_many_episodes

pytest.importorskip("transformers")

GROUPS = {OURS: 125, "llama": 25, "qwen2": 25, "qwen3": 25}  # kind of policy -> number of groups


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_nothing_is_tokenised_again_in_many_episodes(tmp_path: Path, kind: str) -> None:
    check_many_episodes(tmp_path, kind, GROUPS[kind])
