"""Fixtures for tests of the engine vLLM, which run in the environment of `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hf_models import write_hf_model

# On CPUs, vLLM supports attention heads of this size.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def shape_of(family: str) -> dict[str, int]:
    """Return the values of a family's config.json that vLLM needs on CPUs."""
    return SHAPE | ({"head_dim": 32} if family == "qwen3" else {})


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model once for each set of arguments."""
    made: dict[str, str] = {}

    def path(family: str = "qwen2", tied: bool = True, seed: int = 0, **config: Any) -> str:
        key = repr((family, tied, seed, config))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            shape = shape_of(family) | config
            made[key] = write_hf_model(directory, family, tied=tied, seed=seed, **shape)
        return made[key]

    return path
