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
    if not x.is_cpu or x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * torch.addcmul(_constant(eps), length, length, value=1 / x.size(-1)).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # a constant outlives the mode that first asked for it
        return torch.tensor(value)
