"""DSpine as its definition reads, slot by slot and token by token: what the fast one is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dspine.drafters.dspine import DSpine
from dspine.targets.model import Target


@dataclass
class SlowBlock:
    """One block, slot by slot: per layer the readouts and states, and the last layer's states before injection."""

    readouts: list[list[Tensor]] = field(default_factory=list)  # e_t of every layer, AFTER its injection
    before_last: list[Tensor] = field(default_factory=list)
    states: Tensor = field(default_factory=lambda: torch.zeros(0))  # [B, d]


def code_of(drafter: DSpine, token: int) -> Tensor:
    return drafter.space.codes[token]


def slow_code(drafter: DSpine, layer: int, u: Tensor) -> Tensor:
    r = drafter.injection.readouts[layer].get_parameter("weight") @ u
    return drafter.options.transfer_rank**0.5 * r / r.norm()


def slow_inject(drafter: DSpine, layer: int, u: Tensor, z_previous: Tensor) -> Tensor:
    injection = drafter.injection
    z = slow_code(drafter, layer, u)
    gate = torch.sigmoid(
        injection.receiver_gate.weight @ z + injection.sender_gate.weight @ z_previous + injection.receiver_gate.bias
    )
    message = injection.message.weight @ z_previous
    write = injection.writes[layer - (drafter.options.inject_from - 1)].get_parameter("weight")
    return u + u.norm() / math.sqrt(u.shape[0]) * (write @ (gate * message))


def slow_block(
    drafter: DSpine, target: Target, context: Any, tokens: Tensor, forced: bool = False, forced_layers: int = 0,
    after: Callable[[Tensor], None] = lambda states: None,
) -> SlowBlock:  # fmt: skip
    """tokens [B]; only the anchor is read, unless `forced` (true predecessors in the first layers). `after` is told every
    layer's states [B, d] after its injection."""
    block = SlowBlock()

    def after_layer(layer: int, x: Tensor) -> Tensor:
        u = list(x[0])
        if layer == drafter.config.num_layers - 1:
            block.before_last = u
        out = [u[0]]
        for t in range(1, len(u)):
            if layer + 1 < drafter.options.inject_from:
                out.append(u[t])
                continue
            if t == 1:
                z_previous = code_of(drafter, int(tokens[0]))
            elif forced and layer < forced_layers:
                z_previous = code_of(drafter, int(tokens[t - 1]))
            else:
                z_previous = slow_code(drafter, layer, u[t - 1])
            out.append(slow_inject(drafter, layer, u[t], z_previous))
        block.readouts.append([drafter.injection.readouts[layer].get_parameter("weight") @ h for h in out])
        after(torch.stack(out))
        return torch.stack(out)[None]

    block.states = drafter.backbone(drafter.block_inputs(tokens[None], target), context, after_layer)[0]
    return block


def one_block(context: Any, a: int) -> Any:
    """The context with only its a-th block."""
    return replace(context, anchors=context.anchors[a : a + 1])


def head_rows(drafter: DSpine, target: Target) -> tuple[Tensor, list[int]]:
    """(head [v', d], token ids) of what the drafter may propose."""
    ids = drafter.draft_ids.tolist() or list(range(target.vocab_size))
    return target.head_weight[ids], ids


def refined_state(drafter: DSpine, block: SlowBlock, t: int, predecessor: int) -> Tensor:
    """Slot t's final-normed state when only the last layer's injection is redone with a predecessor token."""
    last = drafter.config.num_layers - 1
    return drafter.backbone.norm(slow_inject(drafter, last, block.before_last[t], code_of(drafter, predecessor)))


def serial_draft(drafter: DSpine, target: Target, context: Any, anchor: int, width: int) -> list[int]:
    """The slow meaning of predecessor-conditioned decoding: redo the last injection for every token as it is chosen."""
    rows, ids = head_rows(drafter, target)
    slots = width if drafter.config.attention == "causal" else drafter.config.block_size
    tokens = torch.full((slots,), anchor)
    block = slow_block(drafter, target, context, tokens)
    chosen = [anchor]
    for t in range(1, width):
        logits = rows @ drafter.backbone.norm(block.states[t])
        candidates = logits.topk(drafter.options.num_candidates).indices.tolist()
        state = refined_state(drafter, block, t, chosen[-1]) if drafter.options.refine else drafter.backbone.norm(block.states[t])
        scores = rows[candidates] @ state
        chosen.append(ids[candidates[int(scores.argmax())]])
    return chosen[1:]
