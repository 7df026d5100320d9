"""Intervals of quotients over prompts. Rounds and blocks of one answer resemble each other: answers are resampled, not they."""

from __future__ import annotations

from collections.abc import Sequence

import torch

RESAMPLES = 2000


def ratio_interval(parts: Sequence[int], totals: Sequence[int], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of sum(parts) / sum(totals), both one number per answer, answers drawn with replacement.

    A resample whose total is 0 is left out; the whole total must not be 0.
    """
    count = len(totals)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    sums = torch.tensor([parts, totals], dtype=torch.float64)[:, drawn].sum(-1)  # [2, resamples]
    quotients = (sums[0] / sums[1])[sums[1] > 0]
    low, high = torch.quantile(quotients, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
