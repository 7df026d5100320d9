"""Which tokens of an answer become anchors, and which slots of their blocks are supervised. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_anchors(supervised: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` anchor positions, uniform without replacement, sorted.

    `supervised` [n] is 1 at response tokens. An anchor is any token with a supervised token right after it (the last
    prompt token included: decoding starts there); position 0 has no context and is left out.
    """
    eligible = torch.nonzero(supervised[1:].bool())[:, 0]
    eligible = eligible[eligible > 0]
    chosen = eligible[torch.randperm(eligible.shape[0], generator=generator)[:limit]]
    return chosen.sort().values


def block_tokens(tokens: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """True tokens [a, B] of the blocks at `anchors` [a] in tokens [n]; past the end the last token repeats."""
    slots = anchors[:, None] + torch.arange(block_size)
    return tokens[slots.clamp(max=tokens.shape[0] - 1)]


def supervised_prefix(supervised: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Mask [a, B - 1]: the contiguous prefix of supervised tokens after each anchor (cumulative product)."""
    slots = anchors[:, None] + torch.arange(1, block_size)
    inside = slots < supervised.shape[0]
    return (supervised[slots.clamp(max=supervised.shape[0] - 1)] * inside).cumprod(-1)
