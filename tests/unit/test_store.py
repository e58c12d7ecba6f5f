"""Directories of policies that other people made."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.models.store import SHIPPED_POLICY, load_policy

FILES = ("config.json", "tokenizer.json", "policy.safetensors")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    directory.mkdir()
    for name in FILES:
        shutil.copy(Path(SHIPPED_POLICY) / name, directory / name)
    return directory


def test_a_copy_of_the_shipped_policy_loads(policy):
    model, tokenizer = load_policy(policy)
    assert tokenizer.vocab_size <= model.config.vocab_size


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_a_link_is_refused(policy, tmp_path, name):
    (policy / name).rename(tmp_path / name)
    (policy / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: is a link"):
        load_policy(policy)


def test_pickle_in_place_of_tensors_is_refused_and_does_not_run(policy, tmp_path):
    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "exploded").touch, ()

    (policy / "policy.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_policy(policy)
    assert not (tmp_path / "exploded").exists()
