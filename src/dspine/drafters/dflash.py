"""DFlash: the block-parallel backbone on its own. Every slot predicts its token without knowing its neighbours' choices."""

from __future__ import annotations

from torch import Tensor

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, TrainingBatch
from dspine.drafters.runner import FullVocabularyRunner
from dspine.drafters.supervision import Supervision
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, vocabulary_terms
from dspine.targets.model import Target


class DFlash(BlockDrafter):
    """The backbone, its final norm and the target's head: q_t = softmax(logits_t / T), slots independent."""

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context)
        hidden = self.backbone.norm(states[:, 1:]).flatten(0, 1)  # [n, d]
        rows = Supervision.of(batch, head, settings)
        terms = vocabulary_terms(hidden, rows.teacher, rows.labels, head, 1)
        return BlockLosses(rows.distribution(terms.ce, terms.l1), rows.correct(terms.top[:, 0]))

    def runner(self, target: Target) -> DFlashRunner:
        return DFlashRunner(self, target)


class DFlashRunner(FullVocabularyRunner):
    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        states = self.block_states(anchors, cache, self.block_width(num_draft_tokens))[:, 1 : num_draft_tokens + 1]
        return self.all_at_once(self.base_logits(self.final_norm(states)), temperatures, uniforms)
