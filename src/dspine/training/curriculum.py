"""What changes over a run: learning rate, alignment weight, the true-predecessor curriculum, the CE/L1 mix.

Pure functions of progress; steps count from 0.
"""

from __future__ import annotations

import math


def learning_rate_scale(step: int, total_steps: int, warmup_fraction: float) -> float:
    """Linear warm-up over the first `warmup_fraction` of the steps, then cosine to 0; in (0, 1]."""
    warmup = max(1, round(warmup_fraction * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def alignment_weight(step: int, total_steps: int, warmup_fraction: float, beta: float) -> float:
    """beta(t): 0 -> beta, linear over the learning-rate warm-up."""
    return beta * min(1.0, step / max(1, round(warmup_fraction * total_steps)))


def true_predecessor_probability(
    step: int, total_steps: int, start: float = 0.5, hold: float = 1 / 6, end: float = 1 / 3
) -> float:
    """p of the true-predecessor curriculum: `start` until `hold` of training, then linear to 0 at `end`."""
    progress = step / max(1, total_steps)
    if progress < hold:
        return start
    return start * max(0.0, (end - progress) / (end - hold)) if end > hold else 0.0


def ce_fraction(step: int, total_steps: int, alpha: float, ce_only_until: float) -> float:
    """alpha of the CE/L1 mix: 1 (plain cross-entropy) until `ce_only_until` of training, then `alpha`."""
    return 1.0 if step < ce_only_until * total_steps else alpha
