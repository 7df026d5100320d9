"""DSpine: the block-causal backbone, adjacent causal injection after every layer, and predecessor-conditioned decoding.

See modules.injection and modules.transfer_space for the equations; this file wires them into training (section 7) and
drafting (section 6).

Shapes: a anchors, B slots, M = B - 1, n = a * M rows, d hidden, r transfer rank, m message width, k candidates, b rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, Options, TrainingBatch, check_num_candidates
from dspine.drafters.config import DrafterConfig
from dspine.drafters.packed_injection import PackedInjection
from dspine.drafters.runner import BackboneRunner
from dspine.drafters.supervision import Supervision
from dspine.errors import UserError
from dspine.modules.injection import AdjacentInjection
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, LossTerm, VocabularyTerms, candidate_terms, vocabulary_terms, weigh
from dspine.modules.selection import chosen_scores, top_probability, walk_transitions
from dspine.modules.transfer_space import TransferSpace, build_transfer_space
from dspine.stages import stage
from dspine.targets.model import Target

CURRICULUM_LAYERS = 3  # the true-predecessor curriculum acts on layers 1-3, never on the last: its output is what drafting reads


class DSpineOptions(Options):
    """Transfer rank r, message width m, and the K candidates per slot of the transition cache; then the switches that take
    one idea out, to see what it is worth."""

    transfer_rank: int = Field(1024, ge=1)
    message_width: int = Field(512, ge=1)
    num_candidates: int = Field(16, ge=1)
    inject_from: int = Field(1, ge=1, description="first layer, counted from 1, whose output is injected into")
    refine: bool = Field(True, description="last-write refinement; without it slots are chosen apart from each other")
    whitened: bool = Field(True, description="token codes of equal variance in every direction of the transfer space")


class DSpine(BlockDrafter):
    Options = DSpineOptions
    # Block-causal attention makes a slot independent of the later ones, so that any smaller width may be drafted; both ways is
    # for comparison, and always drafts the whole block.
    attentions = ("causal", "bidirectional")

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.options = options = DSpineOptions.read(config.drafter, config.options)
        if options.transfer_rank > config.hidden_size:
            raise UserError(f"transfer_rank = {options.transfer_rank} exceeds hidden_size = {config.hidden_size}")
        check_num_candidates(options.num_candidates, config)
        if options.inject_from > config.num_layers:
            raise UserError(f"inject_from = {options.inject_from}, but the drafter has only {config.num_layers} layers")
        self.injection = AdjacentInjection(
            config.hidden_size, config.num_layers, options.transfer_rank, options.message_width, options.inject_from - 1
        )
        self._space: TransferSpace | None = None

    def initialise(self, target: Target) -> None:
        super().initialise(target)
        self.bind(target)
        self.injection.initialise(self.space.basis)

    def bind(self, target: Target) -> None:
        if self._space is None:
            self._space = build_transfer_space(target.head_weight, self.options.transfer_rank, self.options.whitened)

    @property
    def space(self) -> TransferSpace:
        assert self._space is not None, "bind(target) builds the transfer space"
        return self._space

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        true_codes = self.space.codes[batch.tokens]  # [a, B, r]
        forced = (batch.draws < settings.forced_probability, true_codes[:, 1:-1]) if settings.forced_probability > 0 else None
        rows = Supervision.of(batch, head, settings)
        last = self.config.num_layers - 1
        supervise = LAYER_SUPERVISION[settings.layer_supervision]
        layer_losses: list[Tensor] = []  # [n] each
        before_last: list[Tensor] = []

        def after_layer(layer: int, u: Tensor) -> Tensor:
            if layer == last:
                before_last.append(u[:, 1:])
            h = self.injection(layer, u, true_codes[:, 0], forced if layer < min(CURRICULUM_LAYERS, last) else None)
            if supervise is not None:
                layer_losses.append(supervise(self, layer, h[:, 1:], true_codes[:, 1:], rows, head))
            return h

        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context, after_layer)
        hidden = self.backbone.norm(states[:, 1:]).flatten(0, 1)  # [n, d]
        terms = vocabulary_terms(hidden, rows.teacher, rows.labels, head, self.options.num_candidates)
        distribution, best = rows.distribution(terms.ce, terms.l1), terms.top[:, 0]
        if self.options.refine:
            u = before_last[0]
            refined = self.injection.write(last, u, self.injection.readout(last, u), true_codes[:, :-1].to(u.dtype))
            refined = self.backbone.norm(refined).flatten(0, 1)
            conditioned, best = self._refined_loss(refined, terms, rows, head)
            distribution = (*distribution, *conditioned)
        alignment = weigh(torch.stack(layer_losses).sum(0), rows.fixed_weights) if layer_losses else None
        return BlockLosses(distribution, rows.correct(best), alignment, settings.layer_supervision == "cosine")

    def _refined_loss(
        self, refined: Tensor, terms: VocabularyTerms, rows: Supervision, head: DraftHead
    ) -> tuple[tuple[LossTerm, ...], Tensor]:
        """The loss of refined states [n, d] over the ordinary output's candidates, and their best rows [n]."""
        candidates = terms.top
        embeddings = head.weight[candidates].to(refined.dtype)  # [n, k, d]

        def scores_of(states: Tensor) -> Tensor:
            return head.cap(torch.einsum("nd,nkd->nk", states.to(refined.dtype), embeddings).float())

        scores = scores_of(refined)
        teacher_scores = None if rows.teacher is None else scores_of(rows.teacher)
        on_candidates = candidate_terms(scores, candidates, rows.labels, teacher_scores, terms.teacher_lse)
        over = rows.fixed_weights * rows.known if rows.settings.refined_shared_normaliser else None
        loss = rows.distribution(
            on_candidates.ce, on_candidates.l1, ce_gate=on_candidates.ce_gate, l1_gate=on_candidates.l1_gate,
            overlap=on_candidates.overlap, over=over,
        )  # fmt: skip
        return loss, candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]

    def runner(self, target: Target) -> DSpineRunner:
        self.bind(target)
        return DSpineRunner(self, target)


def _embedding_cosine(
    drafter: DSpine, layer: int, h: Tensor, label_codes: Tensor, rows: Supervision, head: DraftHead
) -> Tensor:  # fmt: skip
    """1 - cos(R_l h, C_y) of states h [a, M, d] as [n]: does the layer say its token in the transfer space?"""
    return 1 - F.cosine_similarity(drafter.injection.readouts[layer](h).float(), label_codes, dim=-1).flatten()


def _token_ce(drafter: DSpine, layer: int, h: Tensor, label_codes: Tensor, rows: Supervision, head: DraftHead) -> Tensor:
    """Cross-entropy of the layer's states read by the final norm and the LM head, an L-th of it as [n]."""
    hidden = drafter.backbone.norm(h).flatten(0, 1)
    return vocabulary_terms(hidden, None, rows.labels, head, 1).ce / drafter.config.num_layers


LAYER_SUPERVISION: dict[str, Callable[[DSpine, int, Tensor, Tensor, Supervision, DraftHead], Tensor] | None] = {
    "cosine": _embedding_cosine,
    "token_ce": _token_ce,
    "none": None,
}


class DSpineRunner(BackboneRunner):
    """Drafting: inject while the block runs, then all neighbour pairs of the last injection in one batched step."""

    def __init__(self, drafter: DSpine, target: Target) -> None:
        super().__init__(drafter.backbone, target)
        options = drafter.options
        self._draft_head = drafter.head(target)
        self._injection = PackedInjection(
            drafter.injection, drafter.space.codes, self._draft_head, target.dtype,
            num_candidates=options.num_candidates, refine=options.refine,
        )  # fmt: skip

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        candidates, first, transitions = self.transition_cache(anchors, cache, num_draft_tokens)
        with stage("selection"):
            index, q = walk_transitions(first, transitions, temperatures, uniforms)
            ids = self._draft_head.token_of(candidates)  # [b, M, k]
            tokens = ids.gather(2, index[..., None])[..., 0]

        def confidence() -> Tensor:
            return top_probability(chosen_scores(first, transitions, index))

        return Draft(tokens, None if q is None else ids, q, confidence)

    def transition_cache(self, anchors: Tensor, cache: KVCache, num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """One block forward and all its neighbour pairs.

        Returns candidate head rows [b, M, k], the scores of slot 1's after the anchor [b, k], and T [b, M - 1, k, k]:
        T[:, t, i, j] scores candidate j of slot t + 2 after candidate i of slot t + 1 (slots counted from 1).
        """
        parts = self._block(anchors, cache, self.block_width(num_draft_tokens))
        u, gate, states = (part[:, :num_draft_tokens] for part in parts)
        scores, rows = self._injection.candidates(states, self.final_norm)
        return rows, scores[:, 0], self._injection.transitions(u, gate, scores, rows, self.final_norm)

    def _block(self, anchors: Tensor, cache: KVCache, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """u_L and Gq z_L + b before the last injection, and the states after it, all [b, M, .]."""
        packed = self._injection
        message = packed.anchor_message(anchors)
        kept: list[Tensor] = []

        def inject(layer: int, x: Tensor) -> Tensor:
            if layer < packed.first_layer:
                return x
            u = x[:, 1:]
            h, gate = packed.inject(layer, u, message)
            if layer == packed.last_layer:
                kept.extend((u, gate))
                return h
            return torch.cat((x[:, :1], h), 1)

        states = self.block_states(anchors, cache, width, inject)
        return kept[0], kept[1], states
