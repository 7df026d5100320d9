"""The platform: CPU operations of SGLang's own, an attention backend that can verify blocks, and DSPINE allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch import Tensor

ATTENTION_BACKEND = "dspine_torch"
ALGORITHMS = ("DSPINE", "DFLASH")


class CpuTestPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=True)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        _allow_backend()
        server_args.attention_backend = ATTENTION_BACKEND
        server_args.disable_cuda_graph = True

    def init_backend(self) -> None:
        """What every worker process calls: the lists that the main process has extended are its own."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from dspine_sglang_test_platform.attention import BlockTorchBackend

        _allow_backend()
        register_attention_backend(ATTENTION_BACKEND)(BlockTorchBackend)
        # DFlash's worker marks the stream that uses a tensor; a CPU has one, which PyTorch refuses to be told.
        torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # where no --device is given; the mixin's is no text

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        return block_cache_locs

    def get_dispatch_key_name(self) -> str:
        return "native"


def _allow_backend() -> None:
    from sglang.srt.arg_groups import choices

    for known in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in known:
            known.append(ATTENTION_BACKEND)


def block_cache_locs(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, draft_token_num: int, **_: Any
) -> Tensor:  # fmt: skip
    """Cache slots int64 [b * w] of the w tokens after each row's start."""
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()
