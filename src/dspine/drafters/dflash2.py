"""DFlash2: DFlash with a two-tap dynamic convolution inside the block and a selector of paths through the top-K candidates.

Convolution. Around each sublayer f (attention, MLP) of the backbone, with n_i the normed input of slot i:

    delta = D n                                                        one linear map, zero at the start, for both convolutions
    conv(x)[i, c] = sum_{s in 0, 1} (base[s, c] + delta[i, s, g(c)]) x[i - s, c],   x[-1] = 0 across the block's start
    x <- x + conv_out(f(conv_in(n)))

g(c) is channel c's group. base starts as [1, 0], so at the first step the drafter is exactly DFlash. The context's keys
and values are made of features that no convolution has touched.

Selector. Slot t's candidates C_t are the K best of its base logits. After predecessor s candidate c scores

    S_t(s, c) = logit_t(c) + <A[s] * (W h_t), B[c]>                    h_t the final normed state, B zero at the start

A has a row for every token of the target, B one for every token to draft. All pairs of neighbours are scored in one
batched step; drafting then walks the table: s_1 = argmax_c S_1(anchor, c), s_t = argmax_c S_t(s_{t-1}, c), or, at a
temperature T, s_t ~ q_t = softmax(S_t(s_{t-1}, .) / T) on C_t.

Loss: CE (alpha < 1: with L1) of the base logits over the vocabulary plus K-way CE of S_t given the true predecessors, where a
gold token that is no candidate takes the weakest one's place. Gradients of both reach the base logits.

Shapes: a anchors, B slots, M = B - 1 candidate slots, n = a * M rows, d hidden, G channel groups, r selector rank, k
candidates, b rows, m drafted tokens, v vocabulary, v' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, Options, TrainingBatch, check_num_candidates
from dspine.drafters.config import DrafterConfig
from dspine.drafters.runner import BackboneRunner
from dspine.drafters.supervision import Supervision
from dspine.errors import UserError
from dspine.kernels.linear import PackedLinear
from dspine.modules.decoder import Around
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, candidate_terms, vocabulary_terms, weigh
from dspine.modules.selection import chosen_scores, top_probability, walk_transitions
from dspine.stages import stage
from dspine.targets.model import Target


class DFlash2Options(Options):
    """Channels per group of the convolution, the selector's rank r, and its K candidates per slot."""

    conv_groups_of: int = Field(16, ge=1)
    selector_rank: int = Field(256, ge=1)
    num_candidates: int = Field(16, ge=1)


def two_taps(taps: Tensor, x: Tensor) -> Tensor:
    """conv(x) of x [..., B, d]: slot i is taps[i, 0] x[i] + taps[i, 1] x[i - 1], of taps [..., B, 2, d]."""
    now, before = taps.to(x.dtype).unbind(-2)
    return torch.addcmul(now * x, before, F.pad(x[..., :-1, :], (0, 0, 1, 0)))


def convolve(base: Tensor, delta: Tensor, normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """conv_in(normed) and conv_out, of base [2 (in, out), 2 (taps), d], delta [..., B, 4 G] and normed [..., B, d]."""
    groups = delta.shape[-1] // 4
    taps = base.unflatten(-1, (groups, -1)) + delta.unflatten(-1, (2, 2, groups, 1))
    taps_in, taps_out = taps.flatten(-2).unbind(-3)
    return two_taps(taps_in, normed), partial(two_taps, taps_out)


class TwoTapConvolution(nn.Module):
    """The parameters of the convolutions around one sublayer; called with its normed input, as a `Mix`."""

    def __init__(self, hidden_size: int, groups_of: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.empty(2, 2, hidden_size))
        self.delta = nn.Linear(hidden_size, 4 * (hidden_size // groups_of), bias=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Start as the identity."""
        self.base[:, 0], self.base[:, 1] = 1, 0
        nn.init.zeros_(self.delta.weight)

    def forward(self, normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return convolve(self.base, self.delta(normed), normed)


class PathSelector(nn.Module):
    """<A[s] * (W h), B[c]>: what a candidate's score gains after a given predecessor."""

    def __init__(self, hidden_size: int, rank: int, num_predecessors: int, num_candidates: int) -> None:
        super().__init__()
        self.predecessors = nn.Embedding(num_predecessors, rank)  # A, by token id
        self.states = nn.Linear(hidden_size, rank, bias=False)  # W
        self.candidates = nn.Embedding(num_candidates, rank)  # B, by head row

    def initialise(self) -> None:
        """Start without an opinion: B = 0. A starts small, so that a token never trained on as predecessor keeps next to none."""
        nn.init.normal_(self.predecessors.weight, std=0.02)
        nn.init.normal_(self.states.weight, std=0.02)
        nn.init.zeros_(self.candidates.weight)

    def forward(self, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """fp32 gains [n, k] of candidate head rows [n, k] at final normed states [n, d], after predecessor token ids [n]."""
        query = self.predecessors(predecessors) * self.states(hidden)
        return torch.einsum("nr,nkr->nk", query, self.candidates(candidates)).float()


class DFlash2(BlockDrafter):
    Options = DFlash2Options
    has_token_weights = True
    attentions = ("bidirectional", "causal")

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.options = options = DFlash2Options.read(config.drafter, config.options)
        d = config.hidden_size
        if d % options.conv_groups_of:
            raise UserError(f"conv_groups_of = {options.conv_groups_of} does not divide hidden_size = {d}; choose a divisor")
        check_num_candidates(options.num_candidates, config)
        self.around_attention, self.around_mlp = (
            nn.ModuleList(TwoTapConvolution(d, options.conv_groups_of) for _ in range(config.num_layers)) for _ in range(2)
        )
        self.selector = PathSelector(d, options.selector_rank, config.target.vocab_size, config.vocabulary)

    def initialise(self, target: Target) -> None:
        super().initialise(target)
        self.selector.initialise()  # the convolutions are built as the identity

    def around(self) -> list[Around]:
        """The convolutions, layer by layer."""
        return [Around(attention=a, mlp=m) for a, m in zip(self.around_attention, self.around_mlp, strict=True)]

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context, around=self.around())
        hidden = self.backbone.norm(states[:, 1:]).flatten(0, 1)  # [n, d]
        rows = Supervision.of(batch, head, settings)
        labels = rows.labels
        terms = vocabulary_terms(hidden, rows.teacher, labels, head, self.options.num_candidates)
        found = (terms.top == labels[:, None]).any(-1)
        candidates = terms.top.clone()
        candidates[:, -1] = torch.where(found | (labels < 0), terms.top[:, -1], labels)
        base = torch.einsum("nd,nkd->nk", hidden, head.weight[candidates].to(hidden.dtype))
        scores = head.cap(base.float()) + self.selector(hidden, batch.tokens[:, :-1].reshape(-1), candidates)
        selection = weigh(candidate_terms(scores, candidates, labels, None, None).ce, rows.fixed_weights * rows.known)
        best = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
        # Where the gold token was put among the candidates drafting could not have chosen it; elsewhere they are the real ones.
        correct = rows.correct(best) & found.view_as(batch.supervised)
        return BlockLosses((*rows.distribution(terms.ce, terms.l1), selection), correct)

    def runner(self, target: Target) -> DFlash2Runner:
        return DFlash2Runner(self, target)


class PackedConvolution:
    """A `TwoTapConvolution` packed for inference."""

    def __init__(self, base: Tensor, delta: Tensor) -> None:
        self._base, self._delta = base, PackedLinear(delta)

    def __call__(self, normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return convolve(self._base, self._delta(normed), normed)


class DFlash2Runner(BackboneRunner):
    """Drafting: one block forward, then every pair of neighbouring candidates in one batched step."""

    def __init__(self, drafter: DFlash2, target: Target) -> None:
        super().__init__(drafter.backbone, target)

        def cast(module: nn.Module, name: str) -> Tensor:
            return module.get_parameter(name).detach().to(target.device, target.dtype)

        def pack(convolution: nn.Module) -> PackedConvolution:
            return PackedConvolution(cast(convolution, "base"), cast(convolution, "delta.weight"))

        # The context's keys and values never pass through the layers (see `extend`), so these act on blocks alone.
        for layer, attention, mlp in zip(self.stack.layers, drafter.around_attention, drafter.around_mlp, strict=True):
            layer.around = Around(attention=pack(attention), mlp=pack(mlp))
        self._num_candidates = drafter.options.num_candidates
        self._draft_head = head = drafter.head(target)
        self._head = PackedLinear(head.weight.to(target.dtype))
        self._predecessors = cast(drafter.selector, "predecessors.weight")  # [v, r]
        self._states = PackedLinear(cast(drafter.selector, "states.weight"))
        self._candidates = cast(drafter.selector, "candidates.weight")  # [v', r]

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        ids, first, transitions = self.transition_cache(anchors, cache, num_draft_tokens)
        with stage("selection"):
            index, q = walk_transitions(first, transitions, temperatures, uniforms)
            tokens = ids.gather(2, index[..., None])[..., 0]

        def confidence() -> Tensor:
            return top_probability(chosen_scores(first, transitions, index))

        return Draft(tokens, None if q is None else ids, q, confidence)

    def transition_cache(self, anchors: Tensor, cache: KVCache, num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """One block forward and the scores of all neighbour pairs.

        Returns candidate token ids [b, m, k], the scores of slot 1's after the anchor [b, k], and T [b, m - 1, k, k]:
        T[:, t, i, j] scores candidate j of slot t + 2 after candidate i of slot t + 1 (slots counted from 1).
        """
        states = self.block_states(anchors, cache, self.block_width(num_draft_tokens))
        hidden = self.final_norm(states[:, 1 : num_draft_tokens + 1])
        with stage("head"):
            logits, rows = self._draft_head.cap(self._head(hidden)).topk(self._num_candidates, -1)  # [b, m, k]
            ids = self._draft_head.token_of(rows)
        with stage("transition_cache"):
            # Slot 1's only predecessor stands in all k places: one slot's worth of waste instead of a second set of calls.
            predecessors = torch.cat((anchors[:, None, None].expand_as(ids[:, :1]), ids[:, :-1]), 1)
            queries = self._predecessors[predecessors] * self._states(hidden)[:, :, None]  # [b, m, k, r]
            scores = logits[:, :, None] + torch.matmul(queries, self._candidates[rows].transpose(-1, -2))  # [b, m, k, k]
        return ids, scores[:, 0, 0], scores[:, 1:]
