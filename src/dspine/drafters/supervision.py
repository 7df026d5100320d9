"""What a block's candidate slots are taught: their labels, how much each position counts, and the loss made of their terms.

By default L = sum_i w_i [alpha ce_i + (1 - alpha) l1_i] / sum_i w_i with w_i a fixed decay over positions (specification,
section 7). Two options replace a part of it:

position_weights: dpace (D-PACE, arXiv 2605.18810, equations 7-9). Positions count by what they are worth to the drafter as
    it is: with q_i its probability of the true token, s_i = (1 - a) q_i + a and w_j = sum_{m >= j} prod_{i <= m} s_i, no
    gradient; sums are divided by the number of blocks, since dividing by sum w would cancel the credit that w measures.
distance: acceptance. In the L1's place stands minus the expected acceptance length itself, 1 + sum_k prod_{j <= k} A_j with
    A_j = sum_v min(p_v, q_v), the probability that the verifier keeps a candidate drawn from q.

Shapes: a blocks, M candidate slots, n = a * M rows, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspine.drafters.base import LossSettings, TrainingBatch
from dspine.modules.losses import DraftHead, LossTerm, dpace_weights, expected_acceptance, position_weights, weigh


@dataclass(frozen=True)
class Supervision:
    """`labels` [n] head rows of the true tokens, -1 outside the draft vocabulary; `supervised` [a, M] 1 where a slot has one;
    `decay` [M] the fixed position weights; `teacher` [n, d] the target's states, None where the loss needs none."""

    labels: Tensor
    supervised: Tensor
    decay: Tensor
    teacher: Tensor | None
    settings: LossSettings

    @classmethod
    def of(
        cls, batch: TrainingBatch, head: DraftHead, settings: LossSettings, decay: Tensor | None = None,
        always_teacher: bool = False,
    ) -> Supervision:  # fmt: skip
        """`decay` [M] replaces exp(-(t - 1) / gamma); `always_teacher` asks for the teacher even where the loss is plain CE."""
        if decay is None:
            decay = position_weights(batch.supervised.shape[1], settings.gamma)
        return cls(
            labels=head.row_of(batch.tokens[:, 1:].reshape(-1)),
            supervised=batch.supervised,
            decay=decay.to(batch.supervised),
            teacher=batch.teacher.flatten(0, 1) if settings.alpha < 1 or always_teacher else None,
            settings=settings,
        )

    @property
    def known(self) -> Tensor:
        """1 where the true token can be drafted [n]."""
        return (self.labels >= 0).float()

    @property
    def fixed_weights(self) -> Tensor:
        """The decay over supervised slots [n]."""
        return (self.supervised * self.decay).flatten()

    def correct(self, best: Tensor) -> Tensor:
        """Where the head rows `best` [n] are the true tokens, as [a, M]."""
        return (best == self.labels).view_as(self.supervised)

    def distribution(
        self, ce: Tensor, l1: Tensor | None, *, ce_gate: Tensor | None = None, l1_gate: Tensor | None = None,
        overlap: Tensor | None = None, over: Tensor | None = None,
    ) -> tuple[LossTerm, ...]:  # fmt: skip
        """The loss of one output's cross-entropies and L1 distances [n] (None: plain CE).

        Gates [n] say where each counts (CE always only where the true token can be drafted); `overlap` [n] is sum min(p, q)
        where it is not 1 - l1 / 2; `over` are other weights to divide both sums by (the older rule for DSpine's refined output).
        """
        settings = self.settings
        ce_gate = self.known if ce_gate is None else ce_gate * self.known
        weights, blocks = self.fixed_weights, None
        if settings.position_weights == "dpace":
            confidence = (torch.exp(-ce.detach()) * ce_gate).view_as(self.supervised)
            weights = dpace_weights(confidence, self.supervised, settings.dpace_smoothing).flatten()
            blocks = self.supervised[:, 0]
        over = blocks if blocks is not None else over
        terms = (weigh(ce, weights * ce_gate, settings.alpha, over),)
        if l1 is None or settings.alpha == 1:
            return terms
        if settings.distance == "acceptance":
            overlap = (1 - l1 / 2) if overlap is None else overlap
            length = expected_acceptance(overlap.view_as(self.supervised), self.supervised)
            return (*terms, weigh(-length, self.supervised[:, 0], 1 - settings.alpha))
        return (*terms, weigh(l1, weights if l1_gate is None else weights * l1_gate, 1 - settings.alpha, over))
