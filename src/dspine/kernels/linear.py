"""Matrix products with weights laid out once for the machine that will use them.

On a CPU, oneDNN's own weight layout is worth 2-3x at the one to eight rows of a decoding step; elsewhere this is
`torch.nn.functional.linear`. Inference only: a packed weight has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PACK_ROWS = 8  # the row count the layout is chosen for: a verification of width 8


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedLinear:
    """y = x W^T + b for x of shape [..., in_features]; `add` fuses a residual of the output's shape.

    `weight` [out_features, in_features] may be freed by the caller afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach().contiguous()
        self.packed = _can_pack(weight)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS) if self.packed else weight.contiguous()
        )

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.packed:
            if add is not None:
                return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)
