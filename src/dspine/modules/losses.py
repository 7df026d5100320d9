"""The distribution losses of a drafted block (specification, section 7), as pure functions with bounded memory.

    ce_i = -log q_i(y_i),   l1_i = |q_i - p_i|_1,   loss = sum_i w_i [alpha ce_i + (1 - alpha) l1_i] / sum_i w_i

Vocabulary-wide terms are computed in row chunks that are recomputed in the backward pass, so that the peak holds one
chunk of logits whatever the number of anchors.

Shapes: n rows (every candidate slot of every block), d hidden, r rank of a bias, v vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 1 << 28  # fp32 logits of one chunk
CANDIDATE_MASS_FLOOR = 1e-4


@dataclass(frozen=True)
class DraftHead:
    """The frozen LM head over the tokens that the drafter may propose.

    `weight` [v', d]; `ids` [v'] their token ids, or None for the whole vocabulary; `rows` [v] token id -> row, -1 absent.
    """

    weight: Tensor
    ids: Tensor | None = None
    rows: Tensor | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, weight: Tensor, ids: Tensor | None, softcap: float | None = None) -> DraftHead:
        """Restrict an LM head [v, d] to the token `ids` [v'] (None: all)."""
        if ids is None:
            return cls(weight, softcap=softcap)
        rows = torch.full((weight.shape[0],), -1, dtype=torch.long, device=weight.device)
        rows[ids] = torch.arange(ids.shape[0], device=weight.device)
        return cls(weight[ids], ids, rows, softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.cap(F.linear(hidden, self.weight.to(hidden.dtype)).float())

    def cap(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def row_of(self, tokens: Tensor) -> Tensor:
        """Head rows of token ids; -1 for a token outside the draft vocabulary."""
        return tokens if self.rows is None else self.rows[tokens]

    def token_of(self, rows: Tensor) -> Tensor:
        return rows if self.ids is None else self.ids[rows]


@dataclass(frozen=True)
class VocabularyTerms:
    """Per row: `ce` [n] (0 where the label is outside the draft vocabulary), `l1` [n] or None, the detached top-k head rows
    [n, k] in descending order, and the teacher's logsumexp [n] or None."""

    ce: Tensor
    l1: Tensor | None
    top: Tensor
    teacher_lse: Tensor | None


def vocabulary_terms(
    hidden: Tensor, teacher: Tensor | None, labels: Tensor, head: DraftHead, k: int, bias: tuple[Tensor, Tensor] | None = None
) -> VocabularyTerms:
    """CE and L1 of draft states [n, d] against label rows [n] and teacher states [n, d] (None: no L1).

    A restricted draft vocabulary renormalises the teacher on it. `bias` = (S [n, r], W [v', r]) adds the rows of S W^T to
    the draft's logits, after the soft-cap; like them it is never held for more than a chunk.
    """
    rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
    parts = []
    for i in range(0, hidden.shape[0], rows):
        piece = slice(i, i + rows)
        arguments = (hidden[piece], None if teacher is None else teacher[piece], labels[piece], head, k, _rows(bias, piece))
        one_chunk = hidden.shape[0] <= rows
        parts.append(_terms(*arguments) if one_chunk else checkpoint(_terms, *arguments, use_reentrant=False))
    ce, l1, top, lse = zip(*parts, strict=True)
    return VocabularyTerms(
        torch.cat(ce), None if teacher is None else torch.cat(l1), torch.cat(top), None if teacher is None else torch.cat(lse)
    )


def _rows(bias: tuple[Tensor, Tensor] | None, piece: slice) -> tuple[Tensor, Tensor] | None:
    return None if bias is None else (bias[0][piece], bias[1])


def _terms(
    hidden: Tensor, teacher: Tensor | None, labels: Tensor, head: DraftHead, k: int, bias: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    logits = head.logits(hidden)
    if bias is not None:
        states, weight = bias
        logits = logits + F.linear(states, weight.to(states.dtype)).float()
    log_q = F.log_softmax(logits, -1)
    known = labels >= 0
    ce = -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0] * known
    top = logits.detach().topk(k, -1).indices
    if teacher is None:
        return ce, None, top, None
    with torch.no_grad():
        teacher_logits = head.logits(teacher)
        lse = teacher_logits.logsumexp(-1)
        p = torch.exp(teacher_logits - lse[:, None])
    return ce, (log_q.exp() - p).abs().sum(-1), top, lse


@dataclass(frozen=True)
class CandidateTerms:
    """Per row, on the k candidates only: `ce` and `l1` [n] with the gates [n] (0 or 1) that say where each counts, and
    `overlap` [n] = sum min(p, q), p not renormalised: what the verifier keeps."""

    ce: Tensor
    ce_gate: Tensor
    l1: Tensor | None = None
    l1_gate: Tensor | None = None
    overlap: Tensor | None = None


def candidate_terms(
    scores: Tensor, candidates: Tensor, labels: Tensor, teacher_logits: Tensor | None, teacher_lse: Tensor | None
) -> CandidateTerms:
    """Losses of refined scores [n, k] over candidate head rows [n, k].

    CE counts only where the label is a candidate; L1 (against the teacher renormalised on the candidates) only where they
    hold more than 1e-4 of the teacher's mass. `teacher_logits` [n, k] and `teacher_lse` [n] may be None: no L1.
    """
    log_q = F.log_softmax(scores.float(), -1)
    hit = candidates == labels[:, None]
    ce = -(log_q.masked_fill(~hit, 0.0)).sum(-1)
    ce_gate = hit.any(-1).float()
    if teacher_logits is None or teacher_lse is None:
        return CandidateTerms(ce, ce_gate)
    q, p = log_q.exp(), torch.exp(teacher_logits - teacher_lse[:, None])
    l1 = (q - teacher_logits.softmax(-1)).abs().sum(-1)
    gate = (p.sum(-1) > CANDIDATE_MASS_FLOOR).float()
    return CandidateTerms(ce, ce_gate, l1, gate, torch.minimum(p, q).sum(-1))


def position_weights(num_draft_tokens: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """w_t = exp(-(t - 1) / gamma) as [M]."""
    return torch.exp(-torch.arange(num_draft_tokens, device=device).float() / gamma)


def dpace_weights(confidence: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """D-PACE's position weights [a, M] from the probabilities [a, M] of the true tokens: with s = (1 - a) q + a,
    w_j = sum_{m >= j} prod_{i <= m} s_i over the supervised prefix (arXiv 2605.18810, equations 7 and 8)."""
    reached = ((1 - smoothing) * confidence + smoothing).cumprod(-1) * supervised
    return reached.flip(-1).cumsum(-1).flip(-1) * supervised


def expected_acceptance(overlap: Tensor, supervised: Tensor) -> Tensor:
    """1 + sum_k prod_{j <= k} A_j of each block [a], A [a, M] the probabilities that a candidate is kept if all before it are."""
    return 1 + (overlap.cumprod(-1) * supervised).sum(-1)


@dataclass(frozen=True)
class LossTerm:
    """One summand `coefficient` * total / weight of a loss, not yet divided: micro-batches and processes add up their totals
    and weights, so that together they are exactly one large batch.

    `total` = sum_i w_i x_i carries gradients, `weight` = sum_i w_i does not.
    """

    coefficient: float
    total: Tensor
    weight: Tensor

    def mean(self, weight: Tensor | None = None) -> Tensor:
        """total / weight, `weight` being the whole step's where this is a part of it; 0 where nothing counts."""
        return self.total / (self.weight if weight is None else weight).clamp(min=1e-12)


def weigh(values: Tensor, weights: Tensor, coefficient: float = 1.0, over: Tensor | None = None) -> LossTerm:
    """coefficient * sum w x / sum w; `over` are other weights to divide by (the older rule for the refined output)."""
    return LossTerm(coefficient, (values * weights).sum(), (weights if over is None else over).sum().detach())
