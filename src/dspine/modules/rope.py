"""Rotary position embedding for the lean decoder: one table, one multiplication in place.

In fp32 the two halves of a head are stored interleaved (the q/k weights are permuted once, at load), so that a rotation
is one complex product; dot products of q and k do not notice the permutation. Other dtypes use the textbook formula.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_halves(head_dim: int) -> Tensor:
    """The permutation [head_dim] that puts dimension i next to dimension i + head_dim / 2."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


class Rope:
    """Rotations by `inv_freq` [head_dim / 2] (fp32), scaled by `attention_scaling` as YaRN asks."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype) -> None:
        self.inv_freq = inv_freq.float()
        self.attention_scaling = attention_scaling
        self.interleaved = dtype == torch.float32
        self.dtype = dtype
        self._table: Tensor | None = None

    def at(self, positions: Tensor, limit: int) -> Tensor:
        """Rotation factors of `positions` [b, n], all below `limit`, to be passed to `apply_`."""
        return self._up_to(limit)[positions][:, :, None]

    def between(self, start: int, end: int) -> Tensor:
        """Rotation factors of positions start to end - 1 for every row, to be passed to `apply_`."""
        return self._up_to(end)[None, start:end, None]

    def _up_to(self, limit: int) -> Tensor:
        """The factors of all positions below `limit`, and perhaps more."""
        if self._table is None or self._table.shape[0] < limit:
            size = max(limit, 2 * (0 if self._table is None else self._table.shape[0]), 1024)
            angles = torch.arange(size, device=self.inv_freq.device).float()[:, None] * self.inv_freq
            if self.interleaved:
                self._table = torch.polar(torch.full_like(angles, self.attention_scaling), angles)
            else:
                both = torch.stack((angles.cos(), angles.sin())) * self.attention_scaling
                self._table = both.permute(1, 0, 2).to(self.dtype)  # [size, 2, head_dim / 2]
        return self._table

    def apply_(self, x: Tensor, factors: Tensor) -> None:
        """Rotate x [b, n, heads, head_dim] in place (interleaved layout in fp32, halves otherwise)."""
        if self.interleaved:
            x.view(torch.complex64).mul_(factors)  # neighbours in memory are real and imaginary part
            return
        cos, sin = factors.unbind(-2)
        first, second = x.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        x.copy_(rotated)
