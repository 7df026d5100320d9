"""Adjacent causal injection (specification, section 5): after each layer, every slot hears what its left neighbour predicts.

    z_t = sqrt(r) normalize(R_l u_t)                          readout, norm in fp32
    g   = sigmoid(Gq z_t + Gp z_{t-1} + b);   m = A z_{t-1}
    h_t = u_t + RMS(u_t) W_l (g * m),   t = 1..M;   h_0 = u_0

z_0 is the anchor's token code. Gq, Gp, b, A are shared by the layers; R_l, W_l are a layer's own. All messages are made
from u, before any injection of that layer, so a layer stays parallel over slots.

Shapes: ... leading dims, B slots (anchor first), M = B - 1, d hidden, r transfer rank, m message width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms(u: Tensor) -> Tensor:
    """|u|_2 / sqrt(d) as [..., 1] in u's dtype: fp32 inside, no weight, no epsilon."""
    return (torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=torch.float32) * u.shape[-1] ** -0.5).to(u.dtype)


def unit_code(x: Tensor) -> Tensor:
    """x [..., r] scaled to root mean square 1 in fp32, in x's dtype."""
    return (unit(x) * x.shape[-1] ** 0.5).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """x [..., r] scaled to length 1, in fp32."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(1e-12)


class AdjacentInjection(nn.Module):
    """The injection's parameters for all layers: 33.0 M at Qwen3-8B's d 4096, r 1024, m 512, 5 layers.

    Layers before `first_layer` (counted from 0) have a readout but no write: they pass unchanged.
    """

    def __init__(self, hidden_size: int, num_layers: int, rank: int, message_width: int, first_layer: int = 0) -> None:
        super().__init__()
        self.first_layer = first_layer
        self.readouts = nn.ModuleList(nn.Linear(hidden_size, rank, bias=False) for _ in range(num_layers))
        self.writes = nn.ModuleList(nn.Linear(message_width, hidden_size, bias=False) for _ in range(first_layer, num_layers))
        self.receiver_gate = nn.Linear(rank, message_width)  # Gq and b
        self.sender_gate = nn.Linear(rank, message_width, bias=False)  # Gp
        self.message = nn.Linear(rank, message_width, bias=False)  # A

    @torch.no_grad()
    def initialise(self, basis: Tensor) -> None:
        """Start as the identity: W_l = Gp = 0, b = 0, and every R_l = P^T; `basis` is P [d, r]."""
        for readout in self.readouts:
            readout.get_parameter("weight").copy_(basis.t())
        for write in self.writes:
            nn.init.zeros_(write.get_parameter("weight"))
        nn.init.zeros_(self.sender_gate.weight)
        nn.init.zeros_(self.receiver_gate.bias)

    def readout(self, layer: int, u: Tensor) -> Tensor:
        """z [..., r] of states u [..., d]."""
        return unit_code(self.readouts[layer](u))

    def write(self, layer: int, u: Tensor, z: Tensor, z_previous: Tensor) -> Tensor:
        """h_t from u_t [..., d], its own readout z_t and its predecessor's code z_{t-1} [..., r] (broadcastable)."""
        gate = torch.sigmoid(self.receiver_gate(z) + self.sender_gate(z_previous))
        return u + rms(u) * self.writes[layer - self.first_layer](gate * self.message(z_previous))

    def forward(self, layer: int, u: Tensor, anchor_code: Tensor, forced: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Inject after `layer`: u [..., B, d], anchor_code [..., r] -> h [..., B, d].

        `forced` = (blocks, codes) is the true-predecessor curriculum: where `blocks` [...] is true, the predecessors of
        slots 2..M are the true tokens' `codes` [..., M - 1, r] instead of the neighbours' readouts.
        """
        if layer < self.first_layer:
            return u
        anchor, slots = u[..., :1, :], u[..., 1:, :]
        z = self.readout(layer, slots)
        neighbours = z[..., :-1, :]
        if forced is not None:
            blocks, codes = forced
            neighbours = torch.where(blocks[..., None, None], codes.to(z.dtype), neighbours)
        z_previous = torch.cat((anchor_code[..., None, :].to(z.dtype), neighbours), -2)
        return torch.cat((anchor, self.write(layer, slots, z, z_previous)), -2)
