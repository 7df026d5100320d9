"""Anchors and supervision, as properties of any mask of response tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.training.anchors import block_tokens, sample_anchors, supervised_prefix

masks = st.lists(st.integers(0, 1), min_size=1, max_size=40)
any_masks = settings(max_examples=100, deadline=None)


@any_masks
@given(masks, st.integers(1, 50), st.integers(0, 1000))
def test_anchors_stand_before_supervised_tokens(mask: list[int], limit: int, seed: int) -> None:
    anchors = sample_anchors(torch.tensor(mask), limit, torch.Generator().manual_seed(seed)).tolist()
    eligible = [i for i in range(1, len(mask) - 1) if mask[i + 1]]
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(eligible)
    assert len(anchors) == min(limit, len(eligible))


def test_anchors_are_uniform_without_replacement() -> None:
    mask = torch.tensor([0, 0, 0] + [1] * 8)
    counts = torch.zeros(11)
    for seed in range(2000):
        counts[sample_anchors(mask, 3, torch.Generator().manual_seed(seed))] += 1
    assert counts[:2].sum() == 0
    assert counts[10] == 0
    # 8 eligible tokens, 3 chosen: 750 each with a standard deviation of 22.
    assert counts[2:10].min() > 750 - 5 * 22
    assert counts[2:10].max() < 750 + 5 * 22


def test_same_generator_same_anchors() -> None:
    mask = torch.ones(50)
    first, second = (sample_anchors(mask, 9, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, sample_anchors(mask, 9, torch.Generator().manual_seed(4)))


@any_masks
@given(masks, st.integers(2, 9), st.data())
def test_supervision_is_the_contiguous_prefix(mask: list[int], block_size: int, data: st.DataObject) -> None:
    anchor = data.draw(st.integers(0, len(mask) - 1))
    got = supervised_prefix(torch.tensor(mask), torch.tensor([anchor]), block_size)[0].tolist()
    expected, alive = [], True
    for slot in range(anchor + 1, anchor + block_size):
        alive = alive and slot < len(mask) and mask[slot] == 1
        expected.append(int(alive))
    assert got == expected


@any_masks
@given(st.integers(1, 30), st.integers(2, 9), st.data())
def test_block_tokens_are_the_next_ones(n: int, block_size: int, data: st.DataObject) -> None:
    anchors = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
    got = block_tokens(torch.arange(100, 100 + n), torch.tensor(anchors), block_size).tolist()
    assert got == [[100 + min(a + t, n - 1) for t in range(block_size)] for a in anchors]


@pytest.mark.parametrize("mask", [[0, 0, 0], [1], [0, 1], [1, 1]])
def test_nothing_to_draft(mask: list[int]) -> None:
    """No response, or none after a token that has a context."""
    assert sample_anchors(torch.tensor(mask), 5, torch.Generator()).shape == (0,)
