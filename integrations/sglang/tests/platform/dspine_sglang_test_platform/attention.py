"""SGLang's torch-native attention, taught to run a block of every row: the batch that drafts and the one that verifies.

Such a batch's `seq_lens` end before the block; the torch-native backend reads a prefill's, which include the new tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor


class _AsExtension:
    """A verify batch as the prefill that it is: everything else is the batch's own."""

    def __init__(self, batch: Any) -> None:
        width = batch.spec_info.draft_token_num
        self.out_cache_loc = batch.out_cache_loc
        self.req_pool_indices = batch.req_pool_indices
        self.encoder_lens = None
        self.extend_prefix_lens = batch.seq_lens
        self.extend_seq_lens = torch.full_like(batch.seq_lens, width)
        self.seq_lens = batch.seq_lens + width


class BlockTorchBackend(TorchNativeAttnBackend):
    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        batch = _AsExtension(forward_batch) if forward_batch.forward_mode.is_target_verify() else forward_batch
        out: Tensor = super().forward_extend(q, k, v, layer, batch, save_kv_cache)
        return out
