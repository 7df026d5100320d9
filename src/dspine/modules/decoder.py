"""A lean decoder forward for inference: the families Llama, Qwen2, Qwen3, Mistral, Gemma and Gemma 2 share it, and so
do the block drafters.

Few calls per layer (fused QKV and gate-up, packed weights, in-place rotary, no key/value repetition) against a
preallocated cache. It computes what transformers computes, in another order of the same fp32 sums.

Shapes: b rows, n new tokens, d hidden, h query heads, k key/value heads, g = h / k query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine.kernels.linear import GatedLinear, PackedLinear
from dspine.modules.kv_cache import CacheIndex, KVCache
from dspine.modules.norm import calls_cost_most, folded_rms_norm, rms_norm
from dspine.modules.rope import Rope, interleave_halves

AfterLayer = Callable[[int, Tensor], Tensor]
# Stands around a sublayer: its normed input -> what the sublayer reads instead, and what its output passes through.
Mix = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Around:
    """What stands around the two sublayers of a layer (DFlash2's convolutions)."""

    attention: Mix
    mlp: Mix


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The numbers and switches in which the supported families differ."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    bidirectional: bool = False  # DFlash: attention inside the block in both directions

    @property
    def groups(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer. Norm weights already include Gemma's "+ 1"; None: `fold_norm` moved it into the next products."""

    input_norm: Tensor | None
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor | None
    gate_up: GatedLinear
    down: PackedLinear
    head_norms: Tensor | None = None  # [h + k, head_dim], of queries and keys
    post_attention_norm: Tensor | None = None  # Gemma 2: norms on the sublayers' outputs
    post_mlp_norm: Tensor | None = None
    around: Around | None = None


def qkv_weight(q: Tensor, k: Tensor, v: Tensor, spec: DecoderSpec, rope: Rope) -> Tensor:
    """q, k, v weights (or biases) [heads * head_dim, ...] end to end, with the head layout that `rope` wants."""
    if rope.interleaved:
        q, k = (_permute_heads(w, spec.head_dim) for w in (q, k))
    return torch.cat((q, k, v))


def pack_qkv(
    q: Tensor, k: Tensor, v: Tensor, spec: DecoderSpec, rope: Rope, biases: tuple[Tensor, Tensor, Tensor] | None = None
) -> PackedLinear:
    """Fuse q, k, v weights [heads * head_dim, d] into one product."""
    return PackedLinear(qkv_weight(q, k, v, spec, rope), None if biases is None else qkv_weight(*biases, spec, rope))


def fold_norm(norm: Tensor, *weights: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """A norm's weight [d] moved, with sqrt(d), into the weights [out, d] that read its output: what stays to be done is
    `folded_rms_norm`, of half the calls. Elsewhere than in fp32 on a CPU the norm is returned: it is one call there, or the
    product of two 16-bit roundings would be a third one."""
    plain = tuple(weight.detach() for weight in weights)
    if not calls_cost_most(norm):
        return norm, plain
    factor = norm * norm.shape[0] ** 0.5
    return None, tuple(weight * factor for weight in plain)


def head_norms(q_norm: Tensor, k_norm: Tensor, spec: DecoderSpec, rope: Rope) -> Tensor:
    """The weights [head_dim] of the norms of queries and keys, head by head, in the layout that `rope` wants."""
    weights = torch.cat((q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)))
    return weights[:, interleave_halves(spec.head_dim)] if rope.interleaved else weights


def _permute_heads(weight: Tensor, head_dim: int) -> Tensor:
    heads = weight.unflatten(0, (-1, head_dim))
    return heads[:, interleave_halves(head_dim)].flatten(0, 1)


class DecoderStack:
    """The layers between the embedding and the final norm."""

    def __init__(self, spec: DecoderSpec, rope: Rope, layers: list[LayerWeights]) -> None:
        self.spec, self.rope, self.layers = spec, rope, layers
        self._norm_floor = torch.tensor((spec.hidden_size * spec.norm_eps) ** 0.5)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        device, dtype = self.rope.inv_freq.device, self.rope.dtype
        return KVCache(len(self.layers), rows, self.spec.num_kv_heads, self.spec.head_dim, capacity, device, dtype)

    def run(self, x: Tensor, cache: KVCache, after_layer: AfterLayer | None = None) -> Tensor:
        """x [b, n, d] -> the last layer's output [b, n, d], its keys and values stored past the rows' lengths (which
        stay as they are: committing is the caller's). `after_layer(l, x)` may replace a layer's output."""
        b, n, _ = x.shape
        index = CacheIndex(cache, b, n, x.device)
        factors = self.rotations(index)
        windows = self.spec.sliding_windows
        masks = {window: self.mask(index, window, x.dtype) for window in set(windows or (None,))}
        for i, layer in enumerate(self.layers):
            mask = masks[windows[i] if windows else None]
            x = self._attention(i, layer, x, cache, index, factors, mask)
            x = self.mlp(layer, x)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def rotations(self, index: CacheIndex) -> Tensor:
        """The rotary factors of a step's tokens, for `rope.apply_`."""
        if index.same_length:
            return self.rope.between(index.visible - index.width, index.visible)
        return self.rope.at(index.positions, index.visible)

    def mask(self, index: CacheIndex, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a step's queries; None where they may see everything."""
        groups = 1 if self._kernel_groups(index.rows, index.width) else self.spec.groups
        if index.same_length and window is None and not self.spec.bidirectional:
            return index.causal_steps(groups, dtype)
        seen = index.block_mask(groups) if self.spec.bidirectional else index.causal_mask(groups, window)
        if seen is None:
            return None
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def _attention(
        self, i: int, layer: LayerWeights, x: Tensor, cache: KVCache, index: CacheIndex, factors: Tensor, mask: Tensor | None
    ) -> Tensor:
        y, after = self._norm(x, layer.input_norm), None
        if layer.around is not None:
            y, after = layer.around.attention(y)
        out = self.attend(i, layer, y, cache, index, factors, mask)
        if layer.post_attention_norm is None and after is None:
            return layer.output(out, add=x)
        return x + self._through(layer.output(out), after, layer.post_attention_norm)

    def attend(
        self, i: int, layer: LayerWeights, y: Tensor, cache: KVCache, index: CacheIndex, factors: Tensor, mask: Tensor | None
    ) -> Tensor:
        """What the heads of layer i gather [b, n, h * head_dim] for its inputs y [b, n, .], whose keys and values are stored."""
        spec, b, n = self.spec, index.rows, index.width
        h, k = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(y).view(b, n, h + 2 * k, spec.head_dim)
        heads = qkv[:, :, : h + k]
        if layer.head_norms is not None:
            torch.mul(rms_norm(heads, None, spec.norm_eps), layer.head_norms, out=heads)
        self.rope.apply_(heads, factors)
        q, kv = qkv.split_with_sizes((h, 2 * k), 2)
        keys, values = cache.store(i, kv, index)
        if self._kernel_groups(b, n):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, scale=spec.attention_scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(b, n, h * spec.head_dim)
        # The g query heads of one key/value head become g * n queries of it: nothing is repeated.
        q = q.view(b, n, k, spec.groups, spec.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(b, k, spec.groups * n, spec.head_dim)
        out = self._weighted(q, keys, values, mask)
        return out.view(b, k, spec.groups, n, spec.head_dim).permute(0, 3, 1, 2, 4).reshape(b, n, h * spec.head_dim)

    def _kernel_groups(self, rows: int, width: int) -> bool:
        """Whether the attention kernel is to share keys between the query heads of a group. On a CPU it does so without a
        copy, which pays where there is one row or one token; several blocks are faster as more queries of fewer heads."""
        return self.spec.attention_softcap is None and (rows == 1 or width == 1)

    def _weighted(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.attention_softcap is None:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=spec.attention_scale)
        scores = q @ keys.transpose(-1, -2) * (spec.attention_scale or spec.head_dim**-0.5)
        scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
        if mask is not None:
            scores = scores + mask
        return torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values

    def mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """The second half of a layer, its residual included."""
        y, after = self._norm(x, layer.mlp_norm), None
        if layer.around is not None:
            y, after = layer.around.mlp(y)
        inner = layer.gate_up(y)
        if layer.post_mlp_norm is None and after is None:
            return layer.down(inner, add=x)
        return x + self._through(layer.down(inner), after, layer.post_mlp_norm)

    def _through(self, y: Tensor, after: Callable[[Tensor], Tensor] | None, post_norm: Tensor | None) -> Tensor:
        """A sublayer's output on its way to the residual."""
        y = y if after is None else after(y)
        return y if post_norm is None else self._norm(y, post_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return folded_rms_norm(x, self._norm_floor) if weight is None else rms_norm(x, weight, self.spec.norm_eps)
