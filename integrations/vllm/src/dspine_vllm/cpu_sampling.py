"""Sampling of drafted tokens on a CPU, put right: in vLLM 0.32 it is not exact there, whatever drafts.

Two functions of its rejection sampler are replaced where vLLM runs on a CPU without Triton:

- `expand_batch_to_tokens` repeats a request's temperature, top-k and top-p for each of its drafted tokens. vLLM's stand-in for
  the kernel converts the output to int64 first, so that anything but int64 is written into a copy: the tokens are then judged
  at whatever temperature lies in fresh memory.
- `apply_top_k_top_p` takes the largest k of a step, and a step without any drafted token (every prompt's first) has none: a
  request with top-k and no top-p ends the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler


def install() -> None:
    """Replace both where they are wrong; elsewhere nothing is touched."""
    if current_platform.is_cpu() and not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:  # fmt: skip
    """x [b] repeated for each request's tokens, as [num_tokens], `replace_from` become `replace_to` on the way; cu_num_tokens [b]
    are the running totals of the tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts.long(), output_size=num_tokens)


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """vLLM's, for logits [n, v] of at least one row; none stay none."""
    return topk_topp_sampler.apply_top_k_top_p(logits, k, p) if logits.shape[0] else logits
