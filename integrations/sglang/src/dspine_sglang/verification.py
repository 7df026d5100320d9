"""The engine's own target distribution at every slot of a block, and dspine's exact verification against it.

SGLang samples a token from softmax(logits / T), cut by top-k, top-p and min-p. Which cut comes first is its sampling
backend's business: jointly on the one distribution, or, by flashinfer's kernels where a request of the batch has min-p, one
after the other, each on what the last one left. The same p is rebuilt here, for all slots at once.

Shapes: b rows, w slots of a block (anchor first), m = w - 1 drafted tokens, v vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspine.decoding.verify import SparseQ, verify_rows

GREEDY_TOP_K = 1  # SGLang turns temperature 0 into top-k 1
_ROWS_AT_ONCE = 64  # cutting takes eight times the memory of p, which is large already: slots of all rows by the vocabulary


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """A batch's sampling parameters, a row each: temperatures, top_ps, min_ps fp32 [b], top_ks int [b]; flags say what any row
    needs. `renormalise`: every cut divides what the last one left, else all cuts are made on the same distribution."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    need_top_k: bool
    need_top_p: bool
    need_min_p: bool
    renormalise: bool = False

    def of(self, rows: Tensor) -> Cuts:
        """The cuts of rows [n] of the batch, each as often as it is named."""
        return replace(
            self,
            temperatures=self.temperatures[rows],
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=self.min_ps[rows],
        )


def target_probabilities(logits: Tensor, cuts: Cuts) -> Tensor:
    """p of logits [n, v] under a row's own parameters, normalised, fp32; the argmax alone for a greedy row."""
    p = torch.empty_like(logits, dtype=torch.float32)
    for part in torch.arange(logits.shape[0], device=logits.device).split(_ROWS_AT_ONCE):
        p[part] = _probabilities(logits[part], cuts.of(part))
    return p


def _probabilities(logits: Tensor, cuts: Cuts) -> Tensor:
    probs = torch.softmax(logits.float() / cuts.temperatures[:, None], -1)
    if cuts.need_top_k or cuts.need_top_p:
        probs = _without_tail(probs, cuts)
    if cuts.need_min_p:
        probs = probs * (probs >= cuts.min_ps[:, None] * probs.amax(-1, keepdim=True))
    probs = probs / probs.sum(-1, keepdim=True)
    best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((cuts.top_ks <= GREEDY_TOP_K)[:, None], best, probs)


def _without_tail(probs: Tensor, cuts: Cuts) -> Tensor:
    """probs [n, v] with 0 outside top-k and top-p."""
    ordered, ids = probs.sort(-1, descending=True)
    kept = torch.arange(ordered.shape[-1], device=probs.device) < cuts.top_ks[:, None]
    before = ordered.cumsum(-1) - ordered  # what is more likely than this token
    total = (ordered * kept).sum(-1, keepdim=True) if cuts.renormalise else torch.ones_like(ordered[:, :1])
    kept &= before <= cuts.top_ps[:, None] * total
    return torch.zeros_like(probs).scatter_(-1, ids, ordered * kept)


def accept_block(
    logits: Tensor, drafted: Tensor, q: SparseQ, cuts: Cuts, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """num_accepted [b] and the token after them [b] for logits [b, w, v], drafted [b, m] and the q that they were drawn from.

    A greedy row's p is its argmax alone: verification then accepts by equality, whatever q says.
    """
    b, w, v = logits.shape
    rows = torch.arange(b, device=logits.device).repeat_interleave(w)
    p = target_probabilities(logits.flatten(0, 1), cuts.of(rows)).view(b, w, v)
    uniform = torch.rand(b, w, dtype=torch.float64, device=logits.device, generator=generator)
    return verify_rows(p, drafted, q, uniform)
