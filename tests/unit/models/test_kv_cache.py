"""The key-value cache keeps its contents when it grows, and hides and zeroes everything else."""

from __future__ import annotations

import torch

from grpo_trainable.models.kv_cache import STEP, KVCache

LAYERS, ROWS, HEADS, SIZE, COLUMNS = 2, 3, 2, 4, 2 * STEP + 5


def filled(columns: int) -> KVCache:
    """Return a cache with `columns` columns written, in storage that held other numbers."""
    cache = KVCache(LAYERS, ROWS, HEADS, SIZE, COLUMNS, torch.device("cpu"))
    cache._storage.fill_(torch.nan)  # new memory can contain any values
    cache.reserve(columns)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        for held in cache.layer(layer):
            held[:, :, :columns] = torch.randn(ROWS, HEADS, columns, SIZE, generator=generator)
    cache.bias[..., :columns] = 0.0
    return cache


def test_growing_keeps_what_is_there_and_zeroes_what_is_new():
    cache = filled(STEP - 2)
    before = [[held.clone() for held in cache.layer(layer)] for layer in range(LAYERS)]
    for columns, capacity in ((STEP + 1, 2 * STEP), (2 * STEP + 1, COLUMNS)):
        cache.reserve(columns)
        assert cache.bias.shape == (ROWS, 1, 1, capacity)
        assert torch.isneginf(cache.bias[..., STEP - 2 :]).all()
        for layer in range(LAYERS):
            for held, old in zip(cache.layer(layer), before[layer], strict=True):
                assert held.shape == (ROWS, HEADS, capacity, SIZE)
                assert torch.equal(held[:, :, : STEP - 2], old[:, :, : STEP - 2])
                assert not held[:, :, STEP - 2 :].any()


def test_room_that_is_there_already_changes_nothing():
    cache = filled(STEP)
    keys, values = (held.clone() for held in cache.layer(1))
    cache.reserve(STEP - 3)
    assert all(map(torch.equal, cache.layer(1), (keys, values)))


def test_rows_that_are_kept_keep_their_columns():
    cache = filled(STEP + 3)
    keys, values = (held.clone() for held in cache.layer(1))
    cache.keep(torch.tensor([2, 0]))
    assert torch.equal(cache.layer(1)[0], keys[[2, 0]])
    assert torch.equal(cache.layer(1)[1], values[[2, 0]])
    assert cache.bias.shape == (2, 1, 1, 2 * STEP)
