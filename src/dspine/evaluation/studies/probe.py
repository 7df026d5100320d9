"""A low-rank readout of a frozen layer's states, and how it is fitted (specification, section 9).

    q = softmax(E [n(h) + U V n(h) + b])      E the frozen LM head over the drafter's vocabulary, n an RMS norm without scale

It starts as the plain head on the normed state (U = b = 0). Every layer's probe has the same capacity and sees the same labels.

Shapes: n rows (slots of blocks), d hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.errors import UserError
from dspine.modules.losses import DraftHead, vocabulary_terms


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How probes are fitted, and to how many answers: AdamW without weight decay, one learning rate; of all epochs the one
    of the best accuracy on `selection_answers` others wins."""

    answers: int = 500
    selection_answers: int = 100
    rank: int = 64
    epochs: int = 10
    batch_rows: int = 512
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("answers", "selection_answers", "rank", "epochs", "batch_rows"):
            value = asdict(self)[name]
            if value < 1:
                raise UserError(f"{name.replace('_', ' ')} = {value}: fitting a probe needs at least 1")


class Probe(nn.Module):
    """n(h) + U V n(h) + b: what a layer's states h [n, d] say, for the head to read."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)  # V
        self.up = nn.Linear(rank, hidden_size)  # U and b
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, states: Tensor) -> Tensor:
        normed = F.rms_norm(states, (states.shape[-1],))
        return normed + self.up(self.down(normed))


@dataclass(frozen=True)
class Examples:
    """States [n, d] of one layer, and the head rows [n] of the true tokens (-1: a token that the drafter cannot propose)."""

    states: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Fitted:
    """A fitted probe, the epoch it is of (0: as it started), and its accuracy on the rows it was chosen by."""

    probe: Probe
    epoch: int
    selection_accuracy: float


def fit_probe(
    fit: Examples, selection: Examples, head: DraftHead, settings: FitSettings,
    on_epoch: Callable[[int], None] = lambda count: None,
) -> Fitted:  # fmt: skip
    """Fit on one set and choose the epoch on another. Rows whose token has no head row teach nothing, and count as wrong."""
    torch.manual_seed(settings.seed)
    device = fit.states.device
    probe = Probe(fit.states.shape[1], settings.rank).to(device)
    optimiser = torch.optim.AdamW(probe.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    known = torch.nonzero(fit.labels >= 0)[:, 0]
    best = Fitted(copy.deepcopy(probe), 0, float(hits(probe, selection, head).float().mean()))
    for epoch in range(1, settings.epochs + 1):
        order = known[torch.randperm(known.shape[0], device=device)]
        for rows in order.split(settings.batch_rows):
            terms = vocabulary_terms(probe(fit.states[rows].float()), None, fit.labels[rows], head, 1)
            optimiser.zero_grad()
            terms.ce.mean().backward()
            optimiser.step()
        accuracy = float(hits(probe, selection, head).float().mean())
        if accuracy > best.selection_accuracy:
            best = Fitted(copy.deepcopy(probe), epoch, accuracy)
        on_epoch(1)
    return best


@torch.no_grad()
def hits(probe: Probe, examples: Examples, head: DraftHead) -> Tensor:
    """Where the probe's first choice is the true token [n]."""
    terms = vocabulary_terms(probe(examples.states.float()), None, examples.labels, head, 1)
    return terms.top[:, 0] == examples.labels
