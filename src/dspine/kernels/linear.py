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


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed


class PackedLinear:
    """y = x W^T + b for x of shape [..., in_features]; `add` fuses a residual of the output's shape.

    `weight` [out_features, in_features] may be freed by the caller afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach().contiguous()
        self.packed = _can_pack(weight)
        self.weight = _pack(weight) if self.packed else weight.contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.packed:
            if add is not None:
                return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)


class GatedLinear:
    """y = act(x Wg^T + bg) * (x Wu^T + bu) for x of shape [..., in_features]: the first half of a gated MLP.

    `activation` is "silu" or "gelu_tanh". On a CPU both products carry their part of it: whichever core made a piece of the
    gate multiplies it, instead of one core fetching what the others made. Elsewhere it is one product of twice the width.
    """

    def __init__(self, gate: Tensor, up: Tensor, activation: str, biases: tuple[Tensor, Tensor] | None = None) -> None:
        self.activation = activation
        self.packed = _can_pack(gate)
        if self.packed:
            self._gate, self._up = _pack(gate.detach()), _pack(up.detach())
            self._biases = (None, None) if biases is None else (biases[0].detach(), biases[1].detach())
        else:
            self._both = PackedLinear(torch.cat((gate, up)), None if biases is None else torch.cat(biases))

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            unary, algorithm = ("swish", "") if self.activation == "silu" else ("gelu", "tanh")
            gate = torch.ops.mkldnn._linear_pointwise(x, self._gate, self._biases[0], unary, [], algorithm)
            return torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up, self._biases[1], "mul")
        gate, up = self._both(x).chunk(2, -1)
        return (F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
