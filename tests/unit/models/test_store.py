"""Policy directories made by other people."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import SHIPPED_POLICY, check_policy, policy_tokenizer
from grpo_trainable.models.model_config import PRESETS, parameter_shapes
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.store import load_policy
from grpo_trainable.models.transformer import TransformerLM

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


# ---- Checks before the weights are read --------------------------------------------------------


def checked(path: Path) -> Any:
    return check_policy(GRPOConfig.from_dict({"model": {"path": str(path)}}).model)


def refusal(read: Any, path: Path) -> str:
    with pytest.raises(ValueError, match=str(path)) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize("tied_head", [True, False])
def test_parameter_shapes_are_those_of_the_model(tied_head):
    config = replace(PRESETS["tiny"], d_model=8, d_ff=24, vocab_size=11, tied_head=tied_head)
    parameters = unique_parameters(TransformerLM(config, seed=None))
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in parameters.items()}


def test_the_check_tells_shape_and_tokenizer_of_a_policy(policy):
    shape, tokenizer = checked(policy)
    config = load_policy(policy)[0].config
    assert (shape.context_length, shape.vocab_size) == (config.context_length, config.vocab_size)
    assert tokenizer.vocab_size == load_policy(policy)[1].vocab_size


def test_the_check_of_random_weights_tells_the_presets_shape():
    model = GRPOConfig.from_dict({"model": {"preset": "small"}}).model
    shape, tokenizer = check_policy(model)
    assert shape.vocab_size == PRESETS["small"].vocab_size
    assert tokenizer.vocab_size == policy_tokenizer(model).vocab_size


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(pickle.dumps("no tensors")),
        lambda path: path.unlink(),
        lambda path: save_file({"embedding.weight": np.zeros((2, 2), np.float16)}, path),
        lambda path: save_file(with_first_cut(load_file(path)), path),
    ],
    ids=["cut short", "pickle", "missing", "other names", "another shape"],
)
def test_the_check_refuses_weights_as_reading_them_does(policy, spoil):
    spoil(policy / "policy.safetensors")
    assert refusal(checked, policy) == refusal(load_policy, policy)


def with_first_cut(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = "final_norm.weight"
    return {**tensors, name: tensors[name][1:]}
