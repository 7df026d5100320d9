"""The trainable block backbone that the drafters share (specification, section 3), in plain PyTorch.

Queries come from the block; keys and values are the layer's own projection of [fused context; normed block]. Training
runs a anchors of a packed batch of s context tokens at once. Parameter names are those of DFlash checkpoints.

Shapes: s context tokens, a anchors (blocks), B slots, d hidden, h query heads, k key/value heads, e head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.config import DrafterConfig

_ANCHORS_PER_ATTENTION = 64  # block keys of one call grow with its anchors; 64 keep them below a long context's


@dataclass(frozen=True, kw_only=True)
class ContextBatch:
    """Context tokens of one or more sequences, laid end to end, and the blocks to draft inside them."""

    features: Tensor  # [s, taps * d]
    positions: Tensor  # [s] position inside the own sequence
    sequences: Tensor  # [s] which sequence
    anchors: Tensor  # [a] index into s; a block sees the context strictly before its anchor

    def visible(self) -> Tensor:
        """Boolean [a, s]: context that each block may attend to."""
        order = torch.arange(self.features.shape[0], device=self.features.device)
        return (self.sequences[self.anchors][:, None] == self.sequences) & (order < self.anchors[:, None])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, e] by cos/sin [..., 1, e / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class DraftAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, e = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, e
        self.causal = config.attention == "causal"
        self.q_proj = nn.Linear(d, self.heads * e, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(self.heads * e, d, bias=False)
        self.q_norm = RMSNorm(e, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(e, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))

    def forward(
        self, x: Tensor, fused: Tensor, visible: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x [a, B, d] (normed block), fused [s, d], visible [a, s] -> [a, B, d]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), *block_rope)
        k, v = self.keys_values(x, *block_rope)
        context_k, context_v = self.keys_values(fused, *context_rope)
        parts = [
            self._attend(
                q[i : i + _ANCHORS_PER_ATTENTION],
                k[i : i + _ANCHORS_PER_ATTENTION],
                v[i : i + _ANCHORS_PER_ATTENTION],
                context_k,
                context_v,
                visible[i : i + _ANCHORS_PER_ATTENTION],
            )
            for i in range(0, x.shape[0], _ANCHORS_PER_ATTENTION)
        ]
        return self.o_proj(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
        """One attention call over [context; all these blocks' own slots], other blocks' slots masked."""
        a, slots, _, e = q.shape
        groups = self.heads // self.kv_heads
        keys = torch.cat((context_k, k.flatten(0, 1))).transpose(0, 1)  # [k, s + a * B, e]
        values = torch.cat((context_v, v.flatten(0, 1))).transpose(0, 1)
        queries = q.unflatten(2, (self.kv_heads, groups)).permute(2, 3, 0, 1, 4).reshape(self.kv_heads, groups * a * slots, e)
        inside = torch.ones(slots, slots, dtype=torch.bool, device=q.device)
        inside = inside.tril() if self.causal else inside
        own = torch.block_diag(*[inside] * a) if a > 1 else inside
        mask = torch.cat((visible.repeat_interleave(slots, 0), own), 1)  # [a * B, s + a * B]
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        out = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=bias.repeat(groups, 1)[None, None]
        )[0]
        return out.view(self.kv_heads, groups, a, slots, e).permute(2, 3, 0, 1, 4).reshape(a, slots, self.heads * e)


class DraftMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, x: Tensor, fused: Tensor, visible: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), fused, visible, block_rope, context_rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """fc, hidden_norm, the layers, and the final norm. The target's embedding and head stay the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)

    def initialise(self) -> None:
        """Random start as transformers initialises: normal with standard deviation 0.02."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def fuse(self, features: Tensor) -> Tensor:
        """One context feature per token [s, d] from the taps [s, taps * d]."""
        return self.hidden_norm(self.fc(features))

    def forward(self, block: Tensor, context: ContextBatch, after_layer: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        """block [a, B, d] (input embeddings) -> the last layer's states [a, B, d], before the final norm.

        `after_layer(l, x)` may replace a layer's output, which is where DSpine injects.
        """
        fused = self.fuse(context.features)
        visible = context.visible()
        slots = torch.arange(block.shape[1], device=block.device)
        block_rope = self._rope(context.positions[context.anchors][:, None] + slots, block.dtype)
        context_rope = self._rope(context.positions, block.dtype)
        x = block
        for i, layer in enumerate(self.layers):
            x = layer(x, fused, visible, block_rope, context_rope)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * rope_frequencies(self.config, positions.device)
        return angles.cos()[..., None, :].to(dtype), angles.sin()[..., None, :].to(dtype)


def rope_frequencies(config: DrafterConfig, device: torch.device | str) -> Tensor:
    """theta^(-2i / e) as [e / 2], fp32."""
    half = torch.arange(0, config.head_dim, 2, device=device).float()
    return config.rope_theta ** (-half / config.head_dim)
