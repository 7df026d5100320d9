"""DSpine's injection and transition cache packed for inference, whatever runs the backbone's layers (sections 5 and 6).

    packed = PackedInjection(drafter.injection, drafter.space.codes, drafter.head(target), dtype, num_candidates=16)
    message = packed.anchor_message(anchors)
    ... after layer l of the block, for its slots 1..M:
    h, gate = packed.inject(l, u, message)
    ... after the last layer:
    scores, rows = packed.candidates(h, final_norm)
    transitions = packed.transitions(u, gate, scores, rows, final_norm)

dspine's own runner calls it between its lean layers, an engine's plugin between the engine's.

Shapes: b rows, M candidate slots, d hidden, r transfer rank, m message width, k candidates, v vocabulary, v' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.kernels.linear import PackedLinear
from dspine.modules.injection import AdjacentInjection, rms, unit
from dspine.modules.losses import DraftHead
from dspine.stages import stage

FinalNorm = Callable[[Tensor], Tensor]


class PackedInjection:
    """The injection's weights on the head's device in `dtype`; `codes` [v, r] are the transfer space's token codes.

    `refine` False leaves the last-write refinement out: every slot's candidates then score the same after any predecessor.
    """

    def __init__(
        self, injection: AdjacentInjection, codes: Tensor, head: DraftHead, dtype: torch.dtype, *, num_candidates: int,
        refine: bool = True,
    ) -> None:  # fmt: skip
        device = head.weight.device

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype)

        def pack(linear: nn.Module) -> PackedLinear:
            return PackedLinear(cast(linear.get_parameter("weight")))

        self.num_candidates, self.refine = num_candidates, refine
        self.last_layer = len(injection.readouts) - 1
        self.first_layer = injection.first_layer
        self._readouts = [pack(module) for module in injection.readouts]
        self._writes = [pack(module) for module in injection.writes]
        # A readout is sqrt(r) times a unit vector: the products that read it carry the factor.
        scale = injection.receiver_gate.in_features**0.5
        self._receiver = PackedLinear(cast(scale * injection.receiver_gate.weight), cast(injection.receiver_gate.bias))
        sender = torch.cat((injection.sender_gate.weight, injection.message.weight))  # [2m, r]
        self._sender = PackedLinear(cast(scale * sender))
        self.head = head
        self._head_rows = head.weight.to(dtype)  # [v', d]
        self._head = PackedLinear(self._head_rows)
        # Gp and A of every token, once: for anchors and the transition cache they are only looked up.
        self._sender_table = F.linear(cast(codes), cast(sender))  # [v, 2m]

    def anchor_message(self, anchors: Tensor) -> Tensor:
        """What the anchors [b] send to their right neighbours, [b, 1, 2m]."""
        with stage("injection"):
            return self._sender_table[anchors][:, None]

    def inject(self, layer: int, u: Tensor, anchor_message: Tensor) -> tuple[Tensor, Tensor]:
        """h [b, M, d] of the slots' states u [b, M, d] after `layer` (first_layer or later), and Gq z + b of each [b, M, m]."""
        with stage("injection"):
            z = unit(self._readouts[layer](u)).to(u.dtype)
            gate = self._receiver(z)
            sent_gate, message = torch.cat((anchor_message, self._sender(z[:, :-1])), 1).chunk(2, -1)
            write = self._writes[layer - self.first_layer](torch.sigmoid(gate + sent_gate) * message)
            return torch.addcmul(u, rms(u), write), gate

    def candidates(self, states: Tensor, final_norm: FinalNorm) -> tuple[Tensor, Tensor]:
        """Every slot's likeliest tokens, from the states [b, M, d] that `inject` of the last layer made: their scores and
        their head rows, both [b, M, k]. Slot 1's predecessor was the anchor already: its scores are final."""
        hidden = final_norm(states)
        with stage("head"):
            scores, rows = self.head.cap(self._head(hidden)).topk(self.num_candidates, -1)
        return scores, rows

    def transitions(self, u: Tensor, gate: Tensor, scores: Tensor, rows: Tensor, final_norm: FinalNorm) -> Tensor:
        """T [b, M - 1, k, k]: T[:, t, i, j] scores candidate j of slot t + 2 after candidate i of slot t + 1 (slots from 1).

        u and gate are what `inject` of the last layer took and returned, scores and rows what `candidates` returned.
        """
        if not self.refine:
            return scores[:, 1:, None].expand(-1, -1, scores.shape[-1], -1)
        with stage("transition_cache"):
            # The K x K-free part: one refined state per (slot, predecessor candidate).
            sent_gate, sent = self._sender_table[self.head.token_of(rows[:, :-1])].chunk(2, -1)  # [b, M - 1, k, m]
            write = self._writes[-1](torch.sigmoid(gate[:, 1:, None] + sent_gate) * sent)
            receivers = u[:, 1:, None]
            refined = final_norm(torch.addcmul(receivers, rms(receivers), write))  # [b, M - 1, k, d]
            embeddings = self._head_rows[rows[:, 1:]]  # [b, M - 1, k, d]
            return self.head.cap(torch.matmul(refined, embeddings.transpose(-1, -2)))
