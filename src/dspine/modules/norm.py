"""RMSNorm for inference, in few calls."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; weight None is 1.

    PyTorch's own has no CPU kernel: it is a dozen small calls there, which is what these few are instead. There are two
    norms a layer, and at a decoding step's few rows a call costs more than its arithmetic.
    """
    if not calls_cost_most(x):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * torch.addcmul(_constant(eps), length, length, value=1 / x.size(-1)).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


def calls_cost_most(x: Tensor) -> bool:
    """Whether a norm of tensors like x costs by its calls rather than by its arithmetic: in fp32 on a CPU."""
    return x.is_cpu and x.dtype == torch.float32


def folded_rms_norm(x: Tensor, floor: Tensor) -> Tensor:
    """What is left of RMSNorm when its weight and sqrt(d) went into the products after it: x / sqrt(|x|^2 + d * eps), where
    `floor` is sqrt(d * eps) in fp32."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # a constant outlives the mode that first asked for it
        return torch.tensor(value)
