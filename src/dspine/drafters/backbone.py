"""The trainable block backbone that the drafters share (specification, section 3), in plain PyTorch.

Queries come from the block; keys and values are the layer's own projection of [fused context; normed block]. Training
runs a anchors of a packed batch of s context tokens at once. Parameter names are those of DFlash checkpoints.

Shapes: s context tokens, a anchors (blocks), B slots, d hidden, h query heads, k key/value heads, e head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.config import DrafterConfig
from dspine.modules.decoder import Around, Mix

_ANCHORS_PER_PART = 64  # block keys of one attention call grow with its anchors; 64 keep them below a long context's


@dataclass(frozen=True)
class AttentionPart:
    """Blocks of one sequence that attend together: `blocks` of the anchors, `context` of the context tokens that any of
    them may see, and the additive `mask` [a' * B, s' + a' * B] over [context; these blocks' own slots]."""

    blocks: slice
    context: slice
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class ContextBatch:
    """Context tokens of one or more sequences, laid end to end, and the blocks to draft inside them, in their order."""

    features: Tensor  # [s, taps * d]
    positions: Tensor  # [s] position inside the own sequence
    sequences: Tensor  # [s] which sequence
    next_tokens: Tensor  # [s] the token after each of them
    anchors: Tensor  # [a] index into s; a block sees the context strictly before its anchor

    def parts(self, slots: int, causal: bool, dtype: torch.dtype) -> list[AttentionPart]:
        """The attention calls of blocks of `slots` slots: no sequence pays for another's context in its pack."""
        sequences, positions, anchors = self.sequences[self.anchors], self.positions[self.anchors], self.anchors
        starts, ends = (anchors - positions).tolist(), anchors.tolist()
        counts = sequences.unique_consecutive(return_counts=True)[1].tolist()
        inside = torch.ones(slots, slots, dtype=torch.bool, device=anchors.device)
        inside = inside.tril() if causal else inside
        parts, first = [], 0
        for count in counts:
            for i in range(first, first + count, _ANCHORS_PER_PART):
                blocks = slice(i, min(i + _ANCHORS_PER_PART, first + count))
                context = slice(starts[i], max(ends[blocks]))
                order = torch.arange(context.start, context.stop, device=anchors.device)
                visible = (order < anchors[blocks, None]).repeat_interleave(slots, 0)
                own = torch.block_diag(*[inside] * (blocks.stop - blocks.start))
                seen = torch.cat((visible, own.bool()), 1)
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
                parts.append(AttentionPart(blocks, context, mask))
            first += count
        return parts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


Rotary = tuple[Tensor, Tensor]  # cos and sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, e] by cos/sin [..., 1, e / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class DraftAttention(nn.Module):
    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        d, e = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, e
        self.q_proj = nn.Linear(input_size, self.heads * e, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(self.heads * e, d, bias=False)
        self.q_norm = RMSNorm(e, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(e, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))

    def forward(self, x: Tensor, fused: Tensor, parts: list[AttentionPart], block_rope: Rotary, context_rope: Rotary) -> Tensor:
        """x [a, B, d] (normed block), fused [s, d] -> [a, B, d]."""
        q = self.queries(x, *block_rope)
        k, v = self.keys_values(x, *block_rope)
        context_k, context_v = self.keys_values(fused, *context_rope)
        out = [
            self._attend(q[p.blocks], k[p.blocks], v[p.blocks], context_k[p.context], context_v[p.context], p.mask) for p in parts
        ]
        return self.o_proj(torch.cat(out) if len(out) > 1 else out[0])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor) -> Tensor:
        """One attention call of blocks q [a', B, h, e] over [context; all these blocks' own slots]."""
        a, slots, _, e = q.shape
        groups = self.heads // self.kv_heads
        keys = torch.cat((context_k, k.flatten(0, 1))).transpose(0, 1)  # [k, s' + a' * B, e]
        values = torch.cat((context_v, v.flatten(0, 1))).transpose(0, 1)
        queries = q.unflatten(2, (self.kv_heads, groups)).permute(2, 3, 0, 1, 4).reshape(self.kv_heads, groups * a * slots, e)
        out = attend(queries, keys, values, mask.repeat(groups, 1))
        return out.view(self.kv_heads, groups, a, slots, e).permute(2, 3, 0, 1, 4).reshape(a, slots, self.heads * e)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(e) + mask) v of queries [k, n, e], keys and values [k, m, e], mask [n, m].

    On a CPU two plain products are twice as fast, gradients included, as its fused kernel at a drafter's sizes.
    """
    if queries.device.type != "cpu":
        return F.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask[None, None])[0]
    scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2)) + mask
    return torch.matmul(scores.softmax(-1), values)


class DraftMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A decoder layer whose attention reads `input_parts` vectors of width d side by side."""

    def __init__(self, config: DrafterConfig, input_parts: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, input_parts * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, x: Tensor, fused: Tensor, parts: list[AttentionPart], block_rope: Rotary, context_rope: Rotary,
        around: Around | None = None,
    ) -> Tensor:  # fmt: skip
        """x [a, B, d], fused [s, d] -> [a, B, d]. Only the block passes through `around`, the context does not."""

        def attention(normed: Tensor) -> Tensor:
            return self.self_attn(normed, fused, parts, block_rope, context_rope)

        x = x + mixed(attention, self.input_layernorm(x), None if around is None else around.attention)
        return x + mixed(self.mlp, self.post_attention_layernorm(x), None if around is None else around.mlp)


def mixed(sublayer: Callable[[Tensor], Tensor], normed: Tensor, mix: Mix | None) -> Tensor:
    """A sublayer's output for its normed input, by way of what stands around it."""
    if mix is None:
        return sublayer(normed)
    normed, after = mix(normed)
    return after(sublayer(normed))


class BackboneParts(nn.Module):
    """fc, hidden_norm, the layers, and the final norm: what any backbone is made of, and what a runner packs. The target's
    embedding and head stay the target's."""

    input_parts: ClassVar[int] = 1

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, self.input_parts) for _ in range(config.num_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)

    def initialise(self) -> None:
        """Random start as transformers initialises: normal with standard deviation 0.02."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """cos and sin [..., 1, e / 2] at `positions`."""
        angles = positions.float()[..., None] * rope_frequencies(self.config, positions.device)
        return angles.cos()[..., None, :].to(dtype), angles.sin()[..., None, :].to(dtype)


class Backbone(BackboneParts):
    """The block backbone: all slots of a block in one pass over the fused context."""

    def fuse(self, features: Tensor) -> Tensor:
        """One context feature per token [s, d] from the taps [s, taps * d]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, block: Tensor, context: ContextBatch, after_layer: Callable[[int, Tensor], Tensor] | None = None,
        around: Sequence[Around] = (),
    ) -> Tensor:  # fmt: skip
        """block [a, B, d] (input embeddings) -> the last layer's states [a, B, d], before the final norm.

        `after_layer(l, x)` may replace a layer's output, which is where DSpine injects; `around[l]`, of every layer or none,
        stands around its sublayers, which is where DFlash2 convolves.
        """
        fused = self.fuse(context.features)
        parts = context.parts(block.shape[1], self.config.attention == "causal", fused.dtype)
        slots = torch.arange(block.shape[1], device=block.device)
        block_rope = self.rope(context.positions[context.anchors][:, None] + slots, block.dtype)
        context_rope = self.rope(context.positions, block.dtype)
        x = block
        for i, layer in enumerate(self.layers):
            x = layer(x, fused, parts, block_rope, context_rope, around[i] if around else None)
            if after_layer is not None:
                x = after_layer(i, x)
        return x


def rope_frequencies(config: DrafterConfig, device: torch.device | str) -> Tensor:
    """theta^(-2i / e) as [e / 2], fp32."""
    half = torch.arange(0, config.head_dim, 2, device=device).float()
    return config.rope_theta ** (-half / config.head_dim)
