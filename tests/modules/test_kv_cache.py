from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspine.modules.kv_cache import CacheIndex, KVCache

KV_HEADS, HEAD_DIM = 2, 3


def new_cache(rows: int = 3, capacity: int = 8, layers: int = 2) -> KVCache:
    return KVCache(layers, rows, KV_HEADS, HEAD_DIM, capacity, "cpu", torch.float32)


def numbered(rows: int, width: int, start: float = 1.0) -> Tensor:
    """Distinct keys and values [rows, width, 2 * KV_HEADS, HEAD_DIM]."""
    shape = (rows, width, 2 * KV_HEADS, HEAD_DIM)
    return torch.arange(rows * width * 2 * KV_HEADS * HEAD_DIM).float().view(shape) + start


@pytest.mark.parametrize("lengths", [[4, 4, 4], [0, 5, 2]])
def test_store_writes_at_each_rows_length_and_nowhere_else(lengths: list[int]) -> None:
    cache = new_cache()
    for data in cache.data:
        data.fill_(-1.0)
    cache.lengths = torch.tensor(lengths)
    kv = numbered(3, 2)
    keys, values = cache.store(1, kv, CacheIndex(cache, 3, 2, "cpu"))
    assert keys.shape == values.shape == (3, KV_HEADS, max(lengths) + 2, HEAD_DIM)
    for row, length in enumerate(lengths):
        for i in range(2):
            torch.testing.assert_close(keys[row, :, length + i], kv[row, i, :KV_HEADS])
            torch.testing.assert_close(values[row, :, length + i], kv[row, i, KV_HEADS:])
    assert int((cache.data[1] != -1).sum()) == kv.numel()
    assert bool((cache.data[0] == -1).all())


@pytest.mark.parametrize("lengths", [[4, 4, 4], [0, 5, 2]])
def test_all_layers_at_once_are_all_layers_in_turn(lengths: list[int]) -> None:
    once, in_turn = new_cache(rows=4), new_cache(rows=4)
    kv = torch.stack([numbered(3, 2, start) for start in (1.0, 1000.0)], 2)  # [rows, width, layers, ...]
    for cache in (once, in_turn):
        cache.lengths = torch.tensor([*lengths, 0])
    once.store_all(kv, CacheIndex(once, 3, 2, "cpu"))
    index = CacheIndex(in_turn, 3, 2, "cpu")
    for layer in range(2):
        in_turn.store(layer, kv[:, :, layer], index)
    assert torch.equal(once.data, in_turn.data)


def test_an_index_keeps_its_positions_when_the_lengths_move_on() -> None:
    for lengths in ([3, 3], [3, 1]):
        cache = new_cache(rows=2)
        cache.lengths = torch.tensor(lengths)
        index = CacheIndex(cache, 2, 2, "cpu")
        cache.lengths += 2
        assert index.positions.tolist() == [[length, length + 1] for length in lengths]


def test_fewer_rows_than_the_cache_has_leave_the_others_alone() -> None:
    cache = new_cache(rows=4)
    cache.store(0, numbered(2, 3), CacheIndex(cache, 2, 3, "cpu"))
    assert bool((cache.data[0][2:] == 0).all())
    assert bool((cache.data[0][:2, :, :3] != 0).all())


def test_growth_keeps_what_was_stored_and_is_geometric() -> None:
    cache = new_cache(rows=1, capacity=10)
    kv = numbered(1, 10)
    cache.store(0, kv, CacheIndex(cache, 1, 10, "cpu"))
    cache.lengths += 10
    before = cache.memory_bytes()
    CacheIndex(cache, 1, 1, "cpu")
    assert cache.capacity == 15
    assert cache.memory_bytes() == before * 3 // 2
    torch.testing.assert_close(cache.data[0][:, :, :10], kv.transpose(1, 2))
    cache.reserve(12)
    assert cache.capacity == 15
    cache.reserve(100)
    assert cache.capacity == 100


def test_move_row_copies_the_committed_part() -> None:
    cache = new_cache()
    kv = numbered(3, 6)
    cache.store(0, kv, CacheIndex(cache, 3, 6, "cpu"))
    cache.lengths = torch.tensor([6, 5, 4])
    cache.move_row(2, 0)
    assert cache.lengths.tolist() == [4, 5, 4]
    torch.testing.assert_close(cache.data[0][0, :, :4], kv[2, :4].transpose(0, 1))
    torch.testing.assert_close(cache.data[0][1, :, :6], kv[1].transpose(0, 1))
    cache.move_row(1, 1)
    assert cache.lengths.tolist() == [4, 5, 4]


def test_move_row_works_on_storage_that_grew_inside_a_forward() -> None:
    cache = new_cache(capacity=1)
    with torch.inference_mode():
        cache.store(0, numbered(3, 4), CacheIndex(cache, 3, 4, "cpu"))
    cache.lengths += 4
    cache.move_row(1, 0)
    torch.testing.assert_close(cache.data[0][0, :, :4], cache.data[0][1, :, :4])


@pytest.mark.parametrize("window", [None, 1, 2, 4, 50])
@pytest.mark.parametrize("lengths", [[3, 3], [0, 6]])
@pytest.mark.parametrize("width", [1, 3])
def test_causal_mask_is_its_definition(lengths: list[int], width: int, window: int | None) -> None:
    cache = new_cache(rows=2, capacity=16)
    cache.lengths = torch.tensor(lengths)
    groups = 2
    index = CacheIndex(cache, 2, width, "cpu")
    mask = index.causal_mask(groups, window)
    visible = max(lengths) + width
    expected = torch.zeros(2, 1, groups * width, visible, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for group in range(groups):
            for i in range(width):
                first = 0 if window is None else max(0, length + i - window + 1)
                expected[row, 0, group * width + i, first : length + i + 1] = True
    if mask is None:
        assert bool(expected.all())
    else:
        assert torch.equal(mask, expected)


@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 3, 1), (1, 3, 2), (2, 4, 2)])
def test_causal_steps_are_the_causal_mask_of_rows_in_step(rows: int, width: int, groups: int) -> None:
    cache = new_cache(rows=rows, capacity=16)
    cache.lengths += 5
    index = CacheIndex(cache, rows, width, "cpu")
    mask, steps = index.causal_mask(groups), index.causal_steps(groups, torch.float32)
    assert mask is not None
    assert steps is not None
    expected = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    assert torch.equal(steps.expand_as(expected), expected)


def test_one_token_of_rows_in_step_needs_no_mask() -> None:
    cache = new_cache(rows=2, capacity=16)
    cache.lengths += 5
    assert CacheIndex(cache, 2, 1, "cpu").causal_mask(2) is None
    assert CacheIndex(cache, 2, 1, "cpu").causal_steps(2, torch.float32) is None


def test_block_mask_shows_the_context_and_the_whole_block() -> None:
    cache = new_cache(rows=2, capacity=16)
    cache.lengths = torch.tensor([1, 4])
    mask = CacheIndex(cache, 2, 3, "cpu").block_mask(2)
    assert mask.shape == (2, 1, 6, 7)
    assert mask[0].sum(-1).unique().tolist() == [4]
    assert bool(mask[0, 0, :, :4].all())
    assert bool(mask[1].all())
