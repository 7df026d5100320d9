"""One preallocated key/value cache with a length per row.

Rolling back refused tokens is a smaller number in `lengths`; rows advance by different amounts; entries past a row's
length are garbage that the attention mask never shows.
"""

from __future__ import annotations

import copy
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import Self


class KVCache:
    """Keys and values of `layers` layers for `rows` sequences of at most `capacity` tokens.

    `data` is [layers, rows, 2 * kv_heads, capacity, head_dim]: the first half of the heads are keys, the second values, so
    that one indexed store writes both, and one tensor, so that a step makes its views of all layers at once. `lengths`
    [rows] (int64, on the CPU) counts the committed tokens of each row.
    """

    def __init__(
        self, layers: int, rows: int, kv_heads: int, head_dim: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.kv_heads = kv_heads
        self.rows = rows
        self.capacity = capacity
        self.data = torch.zeros(layers, rows, 2 * kv_heads, capacity, head_dim, device=device, dtype=dtype)
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def reserve(self, capacity: int) -> None:
        """Grow to hold at least `capacity` tokens per row, in steps of half the present size."""
        if capacity <= self.capacity:
            return
        grown = max(capacity, self.capacity + self.capacity // 2)
        layers, rows, heads, _, head_dim = self.data.shape
        data = self.data.new_zeros(layers, rows, heads, grown, head_dim)  # where memory runs out here, nothing has changed
        data[:, :, :, : self.capacity] = self.data
        self.data, self.capacity = data, grown

    def row(self, row: int) -> Self:
        """One row as a cache of its own that shares this one's memory. Reserve first: growing a view would detach it."""
        return self._view(slice(row, row + 1), self.lengths[row : row + 1])

    def at(self, lengths: Tensor) -> Self:
        """The first rows' memory under other lengths [b], which are the view's own. Reserve first, as for `row`."""
        return self._view(slice(lengths.shape[0]), lengths)

    def _view(self, rows: slice, lengths: Tensor) -> Self:
        view = copy.copy(self)
        view.rows, view.lengths = lengths.shape[0], lengths
        view.data = self.data[:, rows]
        return view

    def store(self, layer: int, kv: Tensor, index: CacheIndex) -> tuple[Tensor, Tensor]:
        """Write `kv` [b, n, 2 * kv_heads, head_dim] at the positions of `index`; return the keys and values
        [b, kv_heads, index.visible, head_dim] that the step may attend to."""
        if index.destinations is not None:
            index.destinations[layer].copy_(kv)
        else:
            self.data[layer][index.row_ids, :, index.positions] = kv
        return index.seen[layer]

    def store_all(self, kv: Tensor, index: CacheIndex) -> None:
        """Write the `kv` of all layers at once, [b, n, layers, 2 * kv_heads, head_dim]."""
        if index.destination is not None:
            index.destination.copy_(kv.permute(2, 0, 1, 3, 4))
        else:
            self.data[:, index.row_ids, :, index.positions] = kv

    @torch.inference_mode()  # `reserve` may have run inside a forward, which leaves inference tensors here
    def move_row(self, source: int, destination: int) -> None:
        """Copy row `source` onto `destination` (used to keep the live rows at the front)."""
        if source == destination:
            return
        n = int(self.lengths[source])
        self.data[:, destination, :, :n] = self.data[:, source, :, :n]
        self.lengths[destination] = self.lengths[source]

    def memory_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class CacheIndex:
    """Where one step's tokens go and what they may see: computed once per step, shared by all layers.

    Rows 0..b-1 of `cache` take n new tokens each, at positions lengths[row] + 0..n-1. `device` holds the masks. What not
    every step needs is made when it is first asked for.
    """

    def __init__(self, cache: KVCache, rows: int, width: int, device: torch.device | str) -> None:
        lengths = cache.lengths[:rows]
        longest = int(lengths.max())
        cache.reserve(longest + width)
        self.rows, self.width = rows, width
        self.visible = longest + width
        self.same_length = same = rows == 1 or bool((lengths == longest).all())
        # No mask is needed where every cached entry is visible to the only new token.
        self.needs_mask = width > 1 or not same
        self._device, self._used, self._kv_heads = device, cache.data[:, :rows], cache.kv_heads
        if not same:  # now: the lengths are about to change
            self.positions = (lengths[:, None] + torch.arange(width)).to(device)

    @cached_property
    def positions(self) -> Tensor:
        """[b, n]"""
        return torch.arange(self.visible - self.width, self.visible, device=self._device).expand(self.rows, self.width)

    @cached_property
    def row_ids(self) -> Tensor:
        """[b, 1]"""
        return torch.arange(self.rows, device=self._device)[:, None]

    @cached_property
    def seen(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Each layer's keys and values [b, kv_heads, visible, head_dim]."""
        keys, values = self._used[:, :, :, : self.visible].split(self._kv_heads, 2)
        return tuple(zip(keys.unbind(), values.unbind(), strict=True))

    @cached_property
    def destination(self) -> Tensor | None:
        """The memory [layers, b, n, 2 * kv_heads, head_dim] that the tokens go to, where all rows' positions are the same."""
        return self._used[:, :, :, self.visible - self.width : self.visible].transpose(2, 3) if self.same_length else None

    @cached_property
    def destinations(self) -> tuple[Tensor, ...] | None:
        """`destination` by layer."""
        return None if self.destination is None else self.destination.unbind()

    def causal_steps(self, groups: int, dtype: torch.dtype) -> Tensor | None:
        """`causal_mask` of rows of the same length in two calls, as what is added to the scores: 0, or -inf where nothing is
        seen; one row for all. None where everything is."""
        if not self.needs_mask:
            return None
        shape = (self.width, self.visible)
        steps = torch.full(shape, float("-inf"), dtype=dtype, device=self._device).triu_(self.visible - self.width + 1)
        return (steps if groups == 1 else steps.repeat(groups, 1))[None, None]

    def causal_mask(self, groups: int, window: int | None = None) -> Tensor | None:
        """Boolean [b, 1, groups * n, visible]: token i of a row sees positions 0..lengths+i, at most `window` back."""
        if not self.needs_mask and window is None:
            return None
        keys = torch.arange(self.visible, device=self._device)
        seen = keys <= self.positions[..., None]  # [b, n, s]
        if window is not None:
            seen &= keys > self.positions[..., None] - window
        return seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(self.rows, 1, groups * self.width, self.visible)

    def block_mask(self, groups: int) -> Tensor:
        """Boolean [b, 1, groups * n, visible]: every new token sees the whole context and all n new tokens."""
        keys = torch.arange(self.visible, device=self._device)
        seen = keys <= self.positions[:, -1:, None].expand(-1, self.width, -1)
        return seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(self.rows, 1, groups * self.width, self.visible)
