"""Any other decoder-only transformers model, through its own forward, on our preallocated cache.

The model's attention asks a cache layer to `update(keys, values)`; ours stores them at each row's own length and
answers with views, so rows of one batch advance by different amounts here too. Slower than the lean decoder, exact alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dspine.errors import UserError
from dspine.modules.decoder import AfterLayer
from dspine.modules.kv_cache import CacheIndex, KVCache


class _RowLayer(CacheLayerMixin):
    """One layer's window onto a `KVCache` during one forward call."""

    def __init__(self, cache: KVCache, layer: int, index: CacheIndex) -> None:
        super().__init__()
        self.cache, self.layer, self.index = cache, layer, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kv = torch.cat((key_states, value_states), 1).transpose(1, 2)  # [b, n, 2k, head_dim]
        return self.cache.store(self.layer, kv, self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.index.visible, 0

    def get_seq_length(self) -> int:
        return self.index.visible - self.index.width

    def get_max_length(self) -> int:
        return -1

    # transformers before 5.20 asks under this name
    def get_max_cache_shape(self) -> int:
        return -1


class GenericStack:
    """`DecoderStack`'s interface over a transformers model's decoder (the part below the LM head)."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        windows = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if windows is not None or kinds != {"full_attention"}:
            raise UserError(
                f"{config.model_type}: sliding-window or linear attention in this model family is not supported; use a "
                "full-attention model or one of llama, qwen2, qwen3, mistral, gemma, gemma2"
            )
        if model.training:
            raise UserError(
                f"{config.model_type}: the model is in training mode; call model.eval() before it is used as a target"
            )
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]
        # transformers 5.24 renamed the argument.
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.config = config
        self.layers = self._find_layers()
        self.kv_heads, self.head_dim = self._kv_shape()

    def _find_layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        for _, module in self.decoder.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UserError(f"{self.config.model_type}: found no list of {count} decoder layers to read features from")

    @torch.inference_mode()
    def _kv_shape(self) -> tuple[int, int]:
        """Key/value heads and head width as the attention layers really cache them; configs name these too differently."""
        cache = DynamicCache(config=self.config)
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=next(self.decoder.parameters()).device)
        self.decoder(tokens, use_cache=True, **{self._cache_argument: cache})
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers}
        (keys, values), *others = shapes
        if others or keys != values or len(cache.layers) != len(self.layers):
            raise UserError(f"{self.config.model_type}: layers with unlike or compressed key/value caches are not supported")
        return keys[1], keys[3]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        parameter = next(self.decoder.parameters())
        return KVCache(len(self.layers), rows, self.kv_heads, self.head_dim, capacity, parameter.device, parameter.dtype)

    def run(self, x: Tensor, cache: KVCache, after_layer: AfterLayer | None = None) -> Tensor:
        """x [b, n, d] (the embedding module's output) -> the final-normed hidden states [b, n, d]."""
        b, n, _ = x.shape
        index = CacheIndex(cache, b, n, x.device)
        seen = index.causal_mask(1)
        if seen is None:
            seen = torch.ones(b, 1, n, index.visible, dtype=torch.bool, device=x.device)
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
        hooks = []
        if after_layer is not None:
            hooks = [layer.register_forward_hook(_layer_hook(after_layer, i)) for i, layer in enumerate(self.layers)]
        try:
            output = self.decoder(
                inputs_embeds=x,
                attention_mask=mask,
                position_ids=index.positions,
                use_cache=True,
                **{self._cache_argument: Cache(layers=[_RowLayer(cache, i, index) for i in range(len(self.layers))])},
            )
        finally:
            for hook in hooks:
                hook.remove()
        return output.last_hidden_state


def _layer_hook(after_layer: AfterLayer, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that passes a layer's hidden states through `after_layer`."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # some families return (hidden states, attention weights)
            return (after_layer(layer, output[0]), *output[1:])
        return after_layer(layer, output)

    return hook
