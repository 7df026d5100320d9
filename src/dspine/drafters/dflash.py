"""DFlash: the block-parallel backbone on its own. Every slot predicts its token without knowing its neighbours' choices."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, TrainingBatch
from dspine.drafters.runner import BackboneRunner
from dspine.kernels.linear import PackedLinear
from dspine.modules.losses import DraftHead, mix, position_weights, vocabulary_terms
from dspine.modules.selection import independent_slots
from dspine.targets.model import Target


class DFlash(BlockDrafter):
    """The backbone, its final norm and the target's head: q_t = softmax(logits_t / T), slots independent."""

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context)
        hidden = self.backbone.norm(states[:, 1:]).flatten(0, 1)  # [n, d]
        labels = head.row_of(batch.tokens[:, 1:].reshape(-1))
        weights = (batch.supervised * position_weights(batch.supervised.shape[1], settings.gamma, hidden.device)).flatten()
        weights = weights * (labels >= 0)
        teacher = batch.teacher.flatten(0, 1) if settings.alpha < 1 else None
        terms = vocabulary_terms(hidden, teacher, labels, head, 1)
        correct = (terms.top[:, 0] == labels).view_as(batch.supervised)
        return BlockLosses(mix(terms.ce, weights, terms.l1, weights, settings.alpha), correct)

    def runner(self, target: Target) -> DFlashRunner:
        return DFlashRunner(self, target)


class DFlashRunner(BackboneRunner):
    def __init__(self, drafter: DFlash, target: Target) -> None:
        super().__init__(drafter.backbone, target)
        head = drafter.head(target)
        self._head, self._draft_head = PackedLinear(head.weight.to(target.dtype)), head
        self._ids = head.ids if head.ids is not None else torch.arange(target.vocab_size, device=target.device)

    def propose(self, anchors: Tensor, cache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None) -> Draft:  # type: ignore[no-untyped-def]
        # Bidirectional slots see each other, so a narrower block would be another computation: always the trained width.
        width = num_draft_tokens + 1 if self.config.attention == "causal" else self.config.block_size
        states = self.block_states(anchors, cache, width)[:, 1 : num_draft_tokens + 1]
        logits = self._draft_head.cap(self._head(self.final_norm(states)))
        index, q = independent_slots(logits, temperatures, uniforms)
        tokens = self._ids[index]
        if q is None:
            return Draft(tokens)
        return Draft(tokens, self._ids.expand_as(q), q)
