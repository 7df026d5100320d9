"""A block backbone packed for inference: lean layers, a context K/V cache, one forward per block.

Shapes: b rows, n context tokens, w slots of the drafted block (anchor first), m = w - 1, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspine.drafters.backbone import BackboneParts, DraftLayer, RMSNorm, rope_frequencies
from dspine.drafters.base import BlockDrafter, Draft
from dspine.drafters.config import DrafterConfig
from dspine.kernels.linear import GatedLinear, PackedLinear
from dspine.modules.decoder import AfterLayer, DecoderSpec, DecoderStack, LayerWeights, head_norms, pack_qkv, qkv_weight
from dspine.modules.kv_cache import CacheIndex, KVCache
from dspine.modules.norm import rms_norm
from dspine.modules.rope import Rope
from dspine.modules.selection import independent_slots, top_probability
from dspine.stages import stage
from dspine.targets.model import Target

Cast = Callable[[Tensor], Tensor]


class BackboneRunner:
    """The shared half of every block drafter's runner: context in, final-normed block states out."""

    def __init__(self, backbone: BackboneParts, target: Target) -> None:
        config, dtype, device = backbone.config, target.dtype, target.device
        self.config: DrafterConfig = config
        self.target = target
        spec = DecoderSpec(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            bidirectional=config.attention == "bidirectional",
        )
        rope = Rope(rope_frequencies(config, device), 1.0, dtype)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=device, dtype=dtype)

        layers = [_pack_layer(layer, spec, rope, cast) for layer in backbone.draft_layers()]
        self.stack = DecoderStack(spec, rope, layers)
        self._fc = PackedLinear(cast(backbone.fc.weight))
        self._hidden_norm = cast(backbone.hidden_norm.weight)
        self._norm = cast(backbone.norm.weight)
        # All layers' context keys and values in one product: rows [layer][k heads, v heads][head_dim].
        split = config.num_heads * config.head_dim
        kv_weights = [qkv_weight(*_projections(layer, cast), spec, rope)[split:] for layer in backbone.draft_layers()]
        self._context_kv = PackedLinear(torch.cat(kv_weights))
        k_norms = [layer.head_norms[config.num_heads :] for layer in layers if layer.head_norms is not None]
        self._context_k_norms = torch.stack(k_norms) if k_norms else None  # [layers, k heads, head_dim]
        mask = torch.tensor([config.mask_token_id], device=device)
        self._mask_embedding = target.embed(mask)  # [1, d]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self.stack.new_cache(rows, capacity)

    def extend(self, features: Tensor, next_tokens: Tensor, cache: KVCache) -> None:
        """Write context K/V of features [b, n, taps * d] past the lengths of rows 0..b-1; committing is the caller's."""
        self.store_context(self.norm(self._fc(features), self._hidden_norm), cache)

    def store_context(self, inputs: Tensor, cache: KVCache) -> CacheIndex:
        """Write every layer's keys and values of the context's `inputs` [b, n, .]; returns where they went."""
        b, n, _ = inputs.shape
        spec = self.stack.spec
        kv_heads = spec.num_kv_heads
        kv = self._context_kv(inputs).view(b, n, self.config.num_layers, 2 * kv_heads, spec.head_dim)
        index = CacheIndex(cache, b, n, inputs.device)
        keys = kv[:, :, :, :kv_heads]
        if self._context_k_norms is not None:
            torch.mul(rms_norm(keys, None, spec.norm_eps), self._context_k_norms, out=keys)
        self.stack.rope.apply_(keys, self.stack.rotations(index)[:, :, None])
        cache.store_all(kv, index)
        return index

    def block_width(self, num_draft_tokens: int) -> int:
        """Slots of the block that drafts m tokens. Bidirectional slots see each other, so a narrower block would be another
        computation: always the trained width."""
        given = 1 if self.config.alignment == "same" else 0  # the anchor's own slot drafts nothing
        return num_draft_tokens + given if self.config.attention == "causal" else self.config.block_size

    def block_states(self, anchors: Tensor, cache: KVCache, width: int, after_layer: AfterLayer | None = None) -> Tensor:
        """Last-layer states [b, w, d] of a block of `width` slots at anchors [b], before the final norm."""
        x = self._mask_embedding.expand(anchors.shape[0], width, -1).clone()
        x[:, 0] = self.target.embed(anchors)
        return self.stack.run(x, cache, after_layer)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, self._norm)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)


class FullVocabularyRunner(BackboneRunner):
    """A runner whose slots draw from the whole draft vocabulary."""

    def __init__(self, drafter: BlockDrafter, target: Target) -> None:
        super().__init__(drafter.backbone, target)
        head = drafter.head(target)
        self._head, self._draft_head = PackedLinear(head.weight.to(target.dtype)), head
        self._ids = head.ids if head.ids is not None else torch.arange(target.vocab_size, device=target.device)

    def base_logits(self, states: Tensor) -> Tensor:
        """The head's logits [..., v'] of final-normed states [..., d]."""
        with stage("head"):
            return self._draft_head.cap(self._head(states))

    def choose(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Token ids [b, m] for logits [b, m, v'] and, if any row samples, the q [b, m, v'] that they were drawn from."""
        with stage("selection"):
            index, q = independent_slots(logits, temperatures, uniforms)
            return self._ids[index], q

    def draft(self, tokens: Tensor, q: Tensor | None, confidence: Callable[[], Tensor]) -> Draft:
        """The proposal of tokens [b, m] drawn from q [b, m, v']."""
        return Draft(tokens, None if q is None else self._ids.expand_as(q), q, confidence)

    def all_at_once(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor | None) -> Draft:
        """Draft every slot of logits [b, m, v'] on its own."""
        return self.draft(*self.choose(logits, temperatures, uniforms), lambda: top_probability(logits))

    def walk(
        self, next_logits: Callable[[int, Tensor], Tensor], anchors: Tensor, num_draft_tokens: int, temperatures: Tensor,
        uniforms: Tensor | None, confidence: Callable[[], Tensor] | None = None,
    ) -> Draft:  # fmt: skip
        """Draft left to right: next_logits(t, chosen [b]) are slot t's [b, v'] after the token before it, the anchor first.
        `confidence` is a head's; without one a slot's own top probability tells."""
        tokens, qs = [anchors], []
        seen: list[Tensor] = []  # [b, 1, v'] each
        for t in range(num_draft_tokens):
            seen.append(next_logits(t, tokens[-1])[:, None])
            chosen, q = self.choose(seen[-1], temperatures, None if uniforms is None else uniforms[:, t : t + 1])
            tokens.append(chosen[:, 0])
            if q is not None:
                qs.append(q)
        own = confidence or (lambda: torch.cat([top_probability(logits) for logits in seen], 1))
        return self.draft(torch.stack(tokens[1:], 1), torch.cat(qs, 1) if qs else None, own)


def _projections(layer: DraftLayer, cast: Cast) -> tuple[Tensor, Tensor, Tensor]:
    attention = layer.self_attn
    return cast(attention.q_proj.weight), cast(attention.k_proj.weight), cast(attention.v_proj.weight)


def _pack_layer(layer: DraftLayer, spec: DecoderSpec, rope: Rope, cast: Cast) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [cast(norm.weight) for norm in (attention.q_norm, attention.k_norm) if isinstance(norm, RMSNorm)]
    return LayerWeights(
        input_norm=cast(layer.input_layernorm.weight),
        qkv=pack_qkv(*_projections(layer, cast), spec, rope),
        output=PackedLinear(cast(attention.o_proj.weight)),
        mlp_norm=cast(layer.post_attention_layernorm.weight),
        gate_up=GatedLinear(cast(mlp.gate_proj.weight), cast(mlp.up_proj.weight), "silu"),
        down=PackedLinear(cast(mlp.down_proj.weight)),
        head_norms=head_norms(norms[0], norms[1], spec, rope) if norms else None,
    )
