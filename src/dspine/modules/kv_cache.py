"""One preallocated key/value cache with a length per row.

Rolling back refused tokens is a smaller number in `lengths`; rows advance by different amounts; entries past a row's
length are garbage that the attention mask never shows.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from typing_extensions import Self


class KVCache:
    """Keys and values of `layers` layers for `rows` sequences of at most `capacity` tokens.

    `data[l]` is [rows, 2 * kv_heads, capacity, head_dim]: the first half of the heads are keys, the second values, so
    that one indexed store writes both. `lengths` [rows] (int64, on the CPU) counts the committed tokens of each row.
    """

    def __init__(
        self, layers: int, rows: int, kv_heads: int, head_dim: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.kv_heads = kv_heads
        self.rows = rows
        self.capacity = capacity
        shape = (rows, 2 * kv_heads, capacity, head_dim)
        self.data = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def reserve(self, capacity: int) -> None:
        """Grow to hold at least `capacity` tokens per row, in steps of half the present size."""
        if capacity <= self.capacity:
            return
        grown = max(capacity, self.capacity + self.capacity // 2)
        for i, old in enumerate(self.data):
            new = old.new_zeros(old.shape[0], old.shape[1], grown, old.shape[3])
            new[:, :, : self.capacity] = old[:, :, : self.capacity]  # a growth that ran out of memory leaves some larger
            self.data[i] = new
        self.capacity = grown

    def row(self, row: int) -> Self:
        """One row as a cache of its own that shares this one's memory. Reserve first: growing a view would detach it."""
        return self._view(slice(row, row + 1), self.lengths[row : row + 1])

    def at(self, lengths: Tensor) -> Self:
        """The first rows' memory under other lengths [b], which are the view's own. Reserve first, as for `row`."""
        return self._view(slice(lengths.shape[0]), lengths)

    def _view(self, rows: slice, lengths: Tensor) -> Self:
        view = copy.copy(self)
        view.rows, view.lengths = lengths.shape[0], lengths
        view.data = [data[rows] for data in self.data]
        return view

    def store(self, layer: int, kv: Tensor, index: CacheIndex) -> tuple[Tensor, Tensor]:
        """Write `kv` [b, n, 2 * kv_heads, head_dim] at the positions of `index`; return the keys and values
        [b, kv_heads, index.visible, head_dim] that the step may attend to."""
        data = self.data[layer]
        if data.shape[0] != index.rows:
            data = data[: index.rows]
        if index.contiguous_at is not None:
            data.narrow(2, index.contiguous_at, index.width).copy_(kv.transpose(1, 2))
        else:
            data[index.row_ids, :, index.positions] = kv
        keys, values = data.narrow(2, 0, index.visible).chunk(2, 1)
        return keys, values

    @torch.inference_mode()  # `reserve` may have run inside a forward, which leaves inference tensors here
    def move_row(self, source: int, destination: int) -> None:
        """Copy row `source` onto `destination` (used to keep the live rows at the front)."""
        if source == destination:
            return
        n = int(self.lengths[source])
        for data in self.data:
            data[destination, :, :n] = data[source, :, :n]
        self.lengths[destination] = self.lengths[source]

    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.data)


class CacheIndex:
    """Where one step's tokens go and what they may see: computed once per step, shared by all layers.

    Rows 0..b-1 of `cache` take n new tokens each, at positions lengths[row] + 0..n-1. `device` holds the masks.
    """

    def __init__(self, cache: KVCache, rows: int, width: int, device: torch.device | str) -> None:
        lengths = cache.lengths[:rows]
        longest = int(lengths.max())
        cache.reserve(longest + width)
        self.rows, self.width = rows, width
        self.visible = longest + width
        same = rows == 1 or bool((lengths == longest).all())
        self.contiguous_at = longest if same else None
        # No mask is needed where every cached entry is visible to the only new token.
        self.needs_mask = width > 1 or not same
        self.positions = (lengths[:, None] + torch.arange(width)).to(device)  # [b, n]
        self.row_ids = torch.arange(rows, device=device)[:, None]

    def causal_mask(self, groups: int, window: int | None = None) -> Tensor | None:
        """Boolean [b, 1, groups * n, visible]: token i of a row sees positions 0..lengths+i, at most `window` back."""
        if not self.needs_mask and window is None:
            return None
        keys = torch.arange(self.visible, device=self.positions.device)
        seen = keys <= self.positions[..., None]  # [b, n, s]
        if window is not None:
            seen &= keys > self.positions[..., None] - window
        return seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(self.rows, 1, groups * self.width, self.visible)

    def block_mask(self, groups: int) -> Tensor:
        """Boolean [b, 1, groups * n, visible]: every new token sees the whole context and all n new tokens."""
        keys = torch.arange(self.visible, device=self.positions.device)
        seen = keys <= self.positions[:, -1:, None].expand(-1, self.width, -1)
        return seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(self.rows, 1, groups * self.width, self.visible)
