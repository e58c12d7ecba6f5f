"""Fixtures for tests of the engine vLLM, which run in the environment of `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hf_models import write_hf_model

# On CPUs, vLLM supports attention heads of this size.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model once for each set of arguments."""
    made: dict[str, str] = {}

    def path(family: str = "qwen2", tied: bool = True, seed: int = 0, **config: Any) -> str:
        key = repr((family, tied, seed, config))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            shape = SHAPE | ({"head_dim": 32} if family == "qwen3" else {}) | config
            made[key] = write_hf_model(directory, family, tied=tied, seed=seed, **shape)
        return made[key]

    return path
