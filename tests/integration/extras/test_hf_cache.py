"""Our preallocated cache, compared with transformers' cache, which is copied for each token."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hf_models import write_hf_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics
hf_cache: Any = importlib.import_module("grpo_trainable.engines.hf.cache")  # needs transformers

COLUMNS = 12


def states(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values of three heads of size 4."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 3, columns, 4, generator=generator)
    return keys, values


def test_columns_are_written_where_there_is_room_already():
    layer = hf_cache.PreallocatedLayer(COLUMNS)
    first, second = states(2, 5, seed=0), states(2, 1, seed=1)
    layer.update(*first)
    where = layer.keys.data_ptr(), layer.values.data_ptr()
    keys, values = layer.update(*second)
    assert torch.equal(keys, torch.cat((first[0], second[0]), dim=2))
    assert torch.equal(values, torch.cat((first[1], second[1]), dim=2))
    assert (keys.data_ptr(), values.data_ptr()) == where
    assert layer.get_seq_length() == 6


def test_rows_that_are_taken_several_times_go_on_apart():
    layer = hf_cache.PreallocatedLayer(COLUMNS)
    prompts, tokens = states(2, 5, seed=0), states(3, 1, seed=1)
    layer.update(*prompts)
    layer.batch_select_indices(torch.tensor([1, 0, 1]))
    keys, values = layer.update(*tokens)
    assert torch.equal(keys, torch.cat((prompts[0][[1, 0, 1]], tokens[0]), dim=2))
    assert torch.equal(values, torch.cat((prompts[1][[1, 0, 1]], tokens[1]), dim=2))


def test_a_layer_without_columns_has_no_rows_to_take():
    layer = hf_cache.PreallocatedLayer(COLUMNS)
    layer.batch_select_indices(torch.tensor([0]))
    assert layer.get_seq_length() == 0


def test_more_columns_than_there_is_room_for_are_an_error():
    layer = hf_cache.PreallocatedLayer(4)
    layer.update(*states(1, 4, seed=0))
    with pytest.raises(AssertionError, match="5 tokens, but room for only 4"):
        layer.update(*states(1, 1, seed=1))


def test_layers_with_a_window_stay_as_transformers_makes_them(tmp_path):
    path = write_hf_model(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    config = transformers.AutoModelForCausalLM.from_pretrained(path).config
    first, second = hf_cache.preallocated_cache(config, COLUMNS).layers
    assert type(first) is hf_cache.PreallocatedLayer
    assert type(second) is type(transformers.DynamicCache(config=config).layers[1])


def test_each_row_of_an_episode_writes_to_its_own_column():
    places = hf_cache.Places()
    layer = hf_cache.EpisodeLayer(COLUMNS, places)
    prompts, tokens = states(2, 4, seed=0), states(3, 1, seed=1)
    assert layer.get_seq_length() == 0
    layer.update(*prompts)
    assert layer.get_seq_length() == 4
    layer.batch_select_indices(torch.tensor([1, 0, 1]))
    # Row 0 has a prompt of two tokens. Rows 1 and 2 have a prompt of four tokens, and row 2 has
    # written two more.
    places.columns, places.reach = torch.tensor([2, 4, 6]), 7
    assert layer.get_seq_length() == 6
    assert layer.get_mask_sizes(1) == (7, 0)
    for found, old, new in zip(layer.update(*tokens), prompts, tokens, strict=True):
        expected = torch.zeros(3, 3, 7, 4)
        expected[:, :, :4] = old[[1, 0, 1]]
        for row, column in enumerate((2, 4, 6)):
            expected[row, :, column] = new[row, :, 0]
        assert torch.equal(found, expected)
    assert layer.get_seq_length() == 6


def test_a_row_that_waits_writes_the_same_column_again():
    places = hf_cache.Places()
    layer = hf_cache.EpisodeLayer(COLUMNS, places)
    layer.update(*states(2, 3, seed=0))
    layer.batch_select_indices(torch.tensor([0, 1]))
    places.columns, places.reach = torch.tensor([3, 3]), 4
    layer.update(*states(2, 1, seed=1))
    again = states(2, 1, seed=2)
    places.columns, places.reach = torch.tensor([3, 4]), 5
    keys, _ = layer.update(*again)
    assert torch.equal(keys[0, :, 3], again[0][0, :, 0])
    assert not keys[0, :, 4].any()
    assert torch.equal(keys[1, :, 4], again[0][1, :, 0])


def test_rows_of_episodes_that_stay_keep_their_columns():
    places = hf_cache.Places()
    layer = hf_cache.EpisodeLayer(COLUMNS, places)
    prompts, tokens = states(3, 3, seed=0), states(2, 1, seed=1)
    layer.update(*prompts)
    layer.batch_select_indices(torch.arange(3))
    layer.batch_select_indices(torch.tensor([2, 0]))
    places.columns, places.reach = torch.tensor([3, 1]), 4
    keys, values = layer.update(*tokens)
    for found, old, new in zip((keys, values), prompts, tokens, strict=True):
        assert torch.equal(found[0], torch.cat((old[2], new[0]), dim=1))
        assert torch.equal(found[1, :, 1], new[1, :, 0])
        assert torch.equal(found[1][:, [0, 2]], old[0][:, [0, 2]])


def test_episodes_need_a_cache_that_keeps_every_token(tmp_path):
    path = write_hf_model(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    config = transformers.AutoModelForCausalLM.from_pretrained(path).config
    with pytest.raises(ValueError, match="a layer of this model has a DynamicSlidingWindowLayer"):
        hf_cache.episode_cache(config, COLUMNS, hf_cache.Places())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_a_model_computes_the_same_on_it(tmp_path, family):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(write_hf_model(tmp_path, family))
    ids = torch.arange(2 * 9).view(2, 9) + 3
    expected, found = (
        hidden_states(model, ids, cache)
        for cache in (
            transformers.DynamicCache(config=model.config),
            hf_cache.preallocated_cache(model.config, COLUMNS),
        )
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def hidden_states(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the hidden states of six tokens run at once, and of three more run one by one.

    The rows of the cache are rearranged after the first six tokens.
    """
    rows = torch.tensor([1, 0, 0])
    outputs = [model.model(ids[:, :6], past_key_values=cache).last_hidden_state[rows]]
    cache.batch_select_indices(rows)
    for column in range(6, 9):
        token = ids[rows, column : column + 1]
        outputs.append(model.model(token, past_key_values=cache).last_hidden_state)
    return torch.cat(outputs, dim=1)
