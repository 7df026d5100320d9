"""DSpine: the block-causal backbone, adjacent causal injection after every layer, and predecessor-conditioned decoding.

See modules.injection and modules.transfer_space for the equations; this file wires them into training (section 7) and
drafting (section 6).

Shapes: a anchors, B slots, M = B - 1, n = a * M rows, d hidden, r transfer rank, m message width, k candidates, b rows.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, Options, TrainingBatch, check_num_candidates
from dspine.drafters.config import DrafterConfig
from dspine.drafters.runner import BackboneRunner
from dspine.errors import UserError
from dspine.kernels.linear import PackedLinear
from dspine.modules.injection import AdjacentInjection, rms, unit_code
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, LossTerm, candidate_terms, mix, position_weights, vocabulary_terms, weigh
from dspine.modules.selection import chosen_scores, top_probability, walk_transitions
from dspine.modules.transfer_space import TransferSpace, build_transfer_space
from dspine.targets.model import Target

CURRICULUM_LAYERS = 3  # the true-predecessor curriculum acts on layers 1-3, never on the last: its output is what drafting reads


class DSpineOptions(Options):
    """Transfer rank r, message width m, and the K candidates per slot of the transition cache."""

    transfer_rank: int = Field(1024, ge=1)
    message_width: int = Field(512, ge=1)
    num_candidates: int = Field(16, ge=1)


class DSpine(BlockDrafter):
    Options = DSpineOptions
    attentions = ("causal",)  # a slot must not depend on later ones, or the transition cache would not hold

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.options = options = DSpineOptions.read(config.drafter, config.options)
        if options.transfer_rank > config.hidden_size:
            raise UserError(f"transfer_rank = {options.transfer_rank} exceeds hidden_size = {config.hidden_size}")
        check_num_candidates(options.num_candidates, config)
        self.injection = AdjacentInjection(config.hidden_size, config.num_layers, options.transfer_rank, options.message_width)
        self._space: TransferSpace | None = None

    def initialise(self, target: Target) -> None:
        super().initialise(target)
        self.bind(target)
        self.injection.initialise(self.space.basis)

    def bind(self, target: Target) -> None:
        if self._space is None:
            self._space = build_transfer_space(target.head_weight, self.options.transfer_rank)

    @property
    def space(self) -> TransferSpace:
        assert self._space is not None, "bind(target) builds the transfer space"
        return self._space

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        true_codes = self.space.codes[batch.tokens]  # [a, B, r]
        forced = (batch.draws < settings.forced_probability, true_codes[:, 1:-1]) if settings.forced_probability > 0 else None
        labels = head.row_of(batch.tokens[:, 1:].reshape(-1))
        label_codes = true_codes[:, 1:]
        weights = batch.supervised * position_weights(batch.supervised.shape[1], settings.gamma, batch.tokens.device)
        last = self.config.num_layers - 1
        misalignment: list[Tensor] = []
        before_last: list[Tensor] = []

        def inject(layer: int, u: Tensor) -> Tensor:
            if layer == last:
                before_last.append(u[:, 1:])
            h = self.injection(layer, u, true_codes[:, 0], forced if layer < min(CURRICULUM_LAYERS, last) else None)
            cosine = F.cosine_similarity(self.injection.readouts[layer](h[:, 1:]).float(), label_codes, dim=-1)
            misalignment.append(1 - cosine)
            return h

        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context, inject)
        hidden = self.backbone.norm(states[:, 1:]).flatten(0, 1)
        u = before_last[0]
        refined = self.injection.write(last, u, self.injection.readout(last, u), true_codes[:, :-1].to(u.dtype))
        refined = self.backbone.norm(refined).flatten(0, 1)
        alignment = weigh(torch.stack(misalignment).sum(0), weights)
        return self._losses(batch, head, settings, hidden, refined, labels, weights.flatten(), alignment)

    def _losses(
        self, batch: TrainingBatch, head: DraftHead, settings: LossSettings, hidden: Tensor, refined: Tensor, labels: Tensor,
        weights: Tensor, alignment: LossTerm,
    ) -> BlockLosses:  # fmt: skip
        """Ordinary loss over the vocabulary plus refined loss over the candidates; hidden and refined are [n, d]."""
        known = weights * (labels >= 0)
        teacher = batch.teacher.flatten(0, 1) if settings.alpha < 1 else None
        terms = vocabulary_terms(hidden, teacher, labels, head, self.options.num_candidates)
        candidates = terms.top
        embeddings = head.weight[candidates].to(refined.dtype)  # [n, k, d]
        scores = head.cap(torch.einsum("nd,nkd->nk", refined, embeddings).float())
        teacher_logits = (
            None if teacher is None else head.cap(torch.einsum("nd,nkd->nk", teacher.to(refined.dtype), embeddings).float())
        )
        refined_terms = candidate_terms(scores, candidates, labels, teacher_logits, terms.teacher_lse)
        ce_weights = known * refined_terms.ce_gate
        l1_weights = None if refined_terms.l1_gate is None else weights * refined_terms.l1_gate
        ordinary = mix(terms.ce, known, terms.l1, weights, settings.alpha)
        over = known if settings.refined_shared_normaliser else None
        conditioned = mix(refined_terms.ce, ce_weights, refined_terms.l1, l1_weights, settings.alpha, over)
        best = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
        correct = (best == labels).view_as(batch.supervised)
        return BlockLosses((*ordinary, *conditioned), correct, alignment)

    def runner(self, target: Target) -> DSpineRunner:
        self.bind(target)
        return DSpineRunner(self, target)


class DSpineRunner(BackboneRunner):
    """Drafting: inject while the block runs, then all neighbour pairs of the last injection in one batched step."""

    def __init__(self, drafter: DSpine, target: Target) -> None:
        super().__init__(drafter.backbone, target)
        dtype, device = target.dtype, target.device
        injection = drafter.injection
        self._num_candidates = drafter.options.num_candidates

        def pack(linear: torch.nn.Module) -> PackedLinear:
            return PackedLinear(linear.get_parameter("weight").detach().to(device, dtype))

        self._readouts = [pack(module) for module in injection.readouts]
        self._writes = [pack(module) for module in injection.writes]
        self._receiver = PackedLinear(
            injection.receiver_gate.weight.detach().to(device, dtype), injection.receiver_gate.bias.detach().to(device, dtype)
        )
        sender = torch.cat((injection.sender_gate.weight, injection.message.weight)).detach().to(device, dtype)  # [2m, r]
        self._sender = PackedLinear(sender)
        head = drafter.head(target)
        self._draft_head = head
        self._head_rows = head.weight.to(dtype)  # [v', d]
        self._head = PackedLinear(self._head_rows)
        self._codes = drafter.space.codes.to(device, dtype)  # [v, r]
        # Gp and A of every proposable token, once: a transition cache then only looks them up.
        proposable = self._codes if head.ids is None else self._codes[head.ids]
        self._sender_table = F.linear(proposable, sender)  # [v', 2m]

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        candidates, first, transitions = self.transition_cache(anchors, cache, num_draft_tokens)
        index, q = walk_transitions(first, transitions, temperatures, uniforms)
        ids = self._draft_head.token_of(candidates)  # [b, M, k]

        def confidence() -> Tensor:
            return top_probability(chosen_scores(first, transitions, index))

        return Draft(ids.gather(2, index[..., None])[..., 0], None if q is None else ids, q, confidence)

    def transition_cache(self, anchors: Tensor, cache: KVCache, num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """One block forward and all its neighbour pairs.

        Returns candidate head rows [b, M, k], the scores of slot 1's after the anchor [b, k], and T [b, M - 1, k, k]:
        T[:, t, i, j] scores candidate j of slot t + 2 after candidate i of slot t + 1 (slots counted from 1).
        """
        u, gate, states = self._block(anchors, cache, num_draft_tokens + 1)
        hidden = self.final_norm(states)
        logits = self._draft_head.cap(self._head(hidden))
        values, candidates = logits.topk(self._num_candidates, -1)  # [b, M, k]
        first = values[:, 0]  # slot 1's predecessor was the anchor already
        # The K x K-free part: one refined state per (slot, predecessor candidate).
        sent_gate, sent = self._sender_table[candidates[:, :-1]].chunk(2, -1)  # [b, M - 1, k, m]
        write = self._writes[-1](torch.sigmoid(gate[:, 1:, None] + sent_gate) * sent)
        receivers = u[:, 1:, None]
        refined = self.final_norm(receivers + rms(receivers) * write)  # [b, M - 1, k, d]
        embeddings = self._head_rows[candidates[:, 1:]]  # [b, M - 1, k, d]
        transitions = self._draft_head.cap(torch.matmul(refined, embeddings.transpose(-1, -2)))
        return candidates, first, transitions

    def _block(self, anchors: Tensor, cache: KVCache, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """u_L and Gq z_L + b before the last injection, and the states after it, all [b, M, .]."""
        anchor_sent = self._sender(self._codes[anchors])[:, None]  # [b, 1, 2m]
        kept: list[Tensor] = []
        last = self.config.num_layers - 1

        def inject(layer: int, x: Tensor) -> Tensor:
            u = x[:, 1:]
            z = unit_code(self._readouts[layer](u))
            gate = self._receiver(z)
            sent = torch.cat((anchor_sent, self._sender(z[:, :-1])), 1)
            sent_gate, message = sent.chunk(2, -1)
            write = self._writes[layer](torch.sigmoid(gate + sent_gate) * message)
            h = torch.addcmul(u, rms(u), write)
            if layer == last:
                kept.extend((u, gate))
                return h
            return torch.cat((x[:, :1], h), 1)

        states = self.block_states(anchors, cache, width, inject)
        return kept[0], kept[1], states
