"""EAGLE-3 (arXiv 2503.01840): one autoregressive layer that feeds its own states back, trained on what it will meet.

Entry i of the layer stands for the pair of a feature f_i and the token after it, at rotary position i:

    f_i = fc(taps_i)                                  where the target has been: the fused outputs of its tapped layers
    y_i = [norm_e(e(x_{i+1})); norm_f(f_i)]           what q, k and v of entry i are projected from, e the target's embedding
    u_i = f_i + o(attention(q_i; k_{<=i}, v_{<=i})),  s_i = u_i + mlp(norm(u_i)),   head(norm(s_i)) predicts x_{i+2}

The target has no features from the anchor x_n on, so there the draft's own states stand in for them, step by step:

    step 0: entry n - 1 with f_{n-1} and the anchor;  step j >= 1: entry n - 1 + j with f := s_{j-1} and draft token j

Step j sees the context's entries before n - 1, all of true features, and the steps 0 .. j; it predicts draft token j + 1.

Training unrolls the same M steps ("training-time test") with the true tokens and the model's own states, gradients through
the whole chain; q_j is step j's distribution:

    loss = sum_j w_j [alpha (-log q_j(x_{n+j+1})) + (1 - alpha) |q_j - p|_1] / sum_j w_j,   w_j = step_decay^j

The layer is the backbone's only one: norm_e is its input_layernorm, norm_f the backbone's hidden_norm.

Shapes: a anchors, s context tokens, M steps (block_size: as many as drafts), n = a * M rows, d hidden, h query heads, k
key/value heads, g = h / k, e head_dim, b rows, m drafted tokens, v' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from dspine.drafters.backbone import BackboneParts, ContextBatch, DraftLayer
from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, Options, TrainingBatch
from dspine.drafters.config import DrafterConfig
from dspine.drafters.runner import FullVocabularyRunner
from dspine.drafters.supervision import Supervision
from dspine.errors import UserError
from dspine.modules.decoder import DecoderSpec
from dspine.modules.kv_cache import CacheIndex, KVCache
from dspine.modules.losses import DraftHead, vocabulary_terms
from dspine.targets.model import Target


class Eagle3Options(Options):
    """What each step of the unrolled training weighs, relative to the step before it."""

    step_decay: float = Field(0.8, gt=0, le=1)


def attend_chains(q: Tensor, context_k: Tensor, context_v: Tensor, own_k: Tensor, own_v: Tensor, mask: Tensor) -> Tensor:
    """Attention [a, h * e] of one query per block, q [a, h, e], over [shared context; the block's own steps so far].

    context_k, context_v [s, k, e] under the additive mask [a, s]; own_k, own_v [a, j, k, e]. The blocks' own keys are few and
    not shared, so they get products of their own instead of a mask that hides every block's keys from all the others.
    """
    (a, h, e), (s, k, _) = q.shape, context_k.shape
    groups = h // k
    queries = (q * e**-0.5).unflatten(1, (k, groups))
    shared = queries.permute(1, 2, 0, 3).reshape(k, groups * a, e) @ context_k.permute(1, 2, 0)
    own = torch.einsum("akge,ajke->kgaj", queries, own_k)
    weights = torch.cat((shared.view(k, groups, a, s) + mask, own), -1).softmax(-1)
    of_context, of_own = weights.split((s, own_k.shape[1]), -1)
    out = (of_context.flatten(1, 2) @ context_v.transpose(0, 1)).view(k, groups, a, e)
    out = out + torch.einsum("kgaj,ajke->kgae", of_own, own_v)
    return out.permute(2, 0, 1, 3).reshape(a, h * e)


class EagleBackbone(BackboneParts):
    """fc and the one layer; called, it unrolls the steps of a packed batch's blocks."""

    input_parts = 2

    @property
    def layer(self) -> DraftLayer:
        return self.draft_layers()[0]

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """y [..., 2d] of token embeddings and features [..., d]."""
        return torch.cat((self.layer.input_layernorm(embedded), self.hidden_norm(features)), -1)

    def forward(self, tokens: Tensor, following: Tensor, context: ContextBatch) -> Tensor:
        """States s_0 .. s_{M-1} [a, M, d], before the final norm, of steps that read the embedded tokens [a, M, d], the anchor
        first; `following` [s, d] are the context's next tokens, embedded."""
        layer, attention, dtype = self.layer, self.layer.self_attn, following.dtype
        features = self.fc(context.features)  # [s, d]
        context_rope = self.rope(context.positions, dtype)
        context_k, context_v = attention.keys_values(self.inputs(following, features), *context_rope)
        # Step 0 is the entry before the anchor. Only the stand-in block of a batch without any has its anchor at index 0.
        first = (context.anchors - 1).clamp(min=0)
        parts = replace(context, anchors=first).parts(1, True, features.dtype)
        state, keys, values, states = features[first], [], [], []
        for j, embedded in enumerate(tokens.unbind(1)):
            y, rope = self.inputs(embedded, state), self.rope(context.positions[first] + j, dtype)
            q, (k, v) = attention.queries(y, *rope), attention.keys_values(y, *rope)
            keys.append(k)
            values.append(v)
            own_k, own_v = torch.stack(keys, 1), torch.stack(values, 1)
            gathered = []
            for part in parts:
                shared_k, shared_v = context_k[part.context], context_v[part.context]
                # The rest of the part's mask is for the blocks' own slots, which are handled apart.
                mask = part.mask[:, : shared_k.shape[0]]
                gathered.append(attend_chains(q[part.blocks], shared_k, shared_v, own_k[part.blocks], own_v[part.blocks], mask))
            x = state + attention.o_proj(torch.cat(gathered))
            state = x + layer.mlp(layer.post_attention_layernorm(x))
            states.append(state)
        return torch.stack(states, 1)


class Eagle3(BlockDrafter):
    """EAGLE's backbone, its final norm and the target's head."""

    Options = Eagle3Options
    alignments = ("next",)
    attentions = ("causal",)
    backbone_class = EagleBackbone
    backbone: EagleBackbone

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        if config.num_layers != 1:
            raise UserError(f"num_layers = {config.num_layers}, but an eagle3 drafter is a single layer; set num_layers to 1")
        super().__init__(config, draft_ids)
        self.options = Eagle3Options.read(config.drafter, config.options)

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        embedded, following = target.embed(batch.tokens[:, :-1]), target.embed(batch.context.next_tokens)
        hidden = self.backbone.norm(self.backbone(embedded, following, batch.context)).flatten(0, 1)  # [n, d]
        decay = self.options.step_decay ** torch.arange(batch.supervised.shape[1])
        rows = Supervision.of(batch, head, settings, decay)
        terms = vocabulary_terms(hidden, rows.teacher, rows.labels, head, 1)
        return BlockLosses(rows.distribution(terms.ce, terms.l1), rows.correct(terms.top[:, 0]))

    def runner(self, target: Target) -> Eagle3Runner:
        return Eagle3Runner(self, target)


class EagleCache(KVCache):
    """The context entries' keys and values and, in `features` [rows, capacity, d], their features: a draft starts from the
    last one's."""

    def __init__(self, rows: int, capacity: int, spec: DecoderSpec, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(1, rows, spec.num_kv_heads, spec.head_dim, capacity, device, dtype)
        self.features = torch.zeros(rows, capacity, spec.hidden_size, device=device, dtype=dtype)

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        old = self.features
        if old.shape[1] < self.capacity:
            self.features = old.new_zeros(old.shape[0], self.capacity, old.shape[2])
            self.features[:, : old.shape[1]] = old

    def _view(self, rows: slice, lengths: Tensor) -> Self:
        view = super()._view(rows, lengths)
        view.features = self.features[rows]
        return view

    def store_features(self, features: Tensor, index: CacheIndex) -> None:
        """Write features [b, n, d] at the positions of `index`."""
        self.features[index.row_ids, index.positions] = features

    def last_features(self, rows: int) -> Tensor:
        """The features [b, 1, d] of the last committed entry of the first `rows` rows."""
        last = (self.lengths[:rows] - 1).to(self.features.device)
        return self.features[torch.arange(rows, device=last.device), last][:, None]

    @torch.inference_mode()
    def move_row(self, source: int, destination: int) -> None:
        super().move_row(source, destination)
        if source != destination:
            n = int(self.lengths[source])
            self.features[destination, :n] = self.features[source, :n]

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self.features.numel() * self.features.element_size()


class Eagle3Runner(FullVocabularyRunner):
    """Drafting: M steps of one token each. Their keys and values stay behind the rows' lengths, to be overwritten."""

    def new_cache(self, rows: int, capacity: int) -> EagleCache:
        return EagleCache(rows, capacity, self.stack.spec, self.target.device, self.target.dtype)

    def extend(self, features: Tensor, next_tokens: Tensor, cache: KVCache) -> None:
        assert isinstance(cache, EagleCache), "new_cache makes it"
        fused = self._fc(features)
        cache.store_features(fused, self.store_context(self._inputs(next_tokens, fused), cache))

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        assert isinstance(cache, EagleCache), "new_cache makes it"
        lengths = cache.lengths[: anchors.shape[0]]
        cache.reserve(int(lengths.max()) + num_draft_tokens)
        state = cache.last_features(anchors.shape[0])

        def next_logits(t: int, chosen: Tensor) -> Tensor:
            nonlocal state
            state = self._step(chosen, state, cache.at(lengths - 1 + t))
            return self.base_logits(self.final_norm(state))[:, 0]

        return self.walk(next_logits, anchors, num_draft_tokens, temperatures, uniforms)

    def _step(self, tokens: Tensor, state: Tensor, cache: KVCache) -> Tensor:
        """The next state [b, 1, d] of tokens [b] and the state (at first: feature) before it, at the position cache.lengths."""
        stack, layer = self.stack, self.stack.layers[0]
        index = CacheIndex(cache, tokens.shape[0], 1, state.device)
        factors = stack.rotations(index)
        y = self._inputs(tokens[:, None], state)
        gathered = stack.attend(0, layer, y, cache, index, factors, stack.mask(index, None, y.dtype))
        return stack.mlp(layer, layer.output(gathered, add=state))

    def _inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """y [b, n, 2d] of tokens [b, n] and features [b, n, d]."""
        embedded = self.norm(self.target.embed(tokens), self.stack.layers[0].input_norm)
        return torch.cat((embedded, self.norm(features, self._hidden_norm)), -1)
