"""DSpine in vLLM: the block-causal DFlash backbone with adjacent causal injection between vLLM's layers.

The injection and the transition cache are dspine's own (`dspine.drafters.packed_injection`); `proposer` walks them.

Shapes: n rows of a step (requests' blocks end to end, B = M + 1 slots each, the anchor first), b requests, d hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import VllmConfig

from dspine.drafters.dspine import DSpineOptions
from dspine.drafters.packed_injection import PackedInjection
from dspine.modules.injection import AdjacentInjection
from dspine.modules.losses import DraftHead
from dspine.modules.norm import rms_norm
from dspine.modules.transfer_space import build_transfer_space
from dspine_vllm.dflash import CheckedDFlash, DFlashModel
from dspine_vllm.target import VllmTarget

_INJECTION = "injection."


class DSpineModel(DFlashModel):
    """The layers, with something injected into the slots' states after each but the last: that one's injection is selection's."""

    injection: PackedInjection | None = None
    slots: int  # B

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None = None) -> Tensor:
        """The last layer's states u_L [n, d], before its injection and the final norm."""
        packed = self.injection
        assert packed is not None, "the proposer binds the drafter to its target before the first step"
        x = self.embed_input_ids(input_ids) if input_embeds is None else input_embeds
        blocks = input_ids.shape[0] // self.slots  # rows beyond whole blocks are padding
        rows = blocks * self.slots
        message = packed.anchor_message(input_ids[:rows].view(blocks, self.slots)[:, 0]) if blocks else x
        for i, layer in enumerate(self.layers):
            # Without a residual to add, vLLM's layer takes its input itself for one.
            out, residual = layer(positions=positions, hidden_states=x, residual=None)
            x = out + residual
            if blocks and packed.first_layer <= i < packed.last_layer:
                states = x[:rows].view(blocks, self.slots, -1)
                states[:, 1:], _ = packed.inject(i, states[:, 1:], message)
        return x


class DSpineForCausalLM(CheckedDFlash):
    model_cls = DSpineModel
    drafter = "dspine"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Injection makes a layer's input depend on the step's layout, which a compiled graph would freeze.
        self.model.do_not_compile = True
        self.model.slots = self.num_draft_tokens + 1
        config = self.drafter_config
        self.options = options = DSpineOptions.read(config.drafter, config.options)
        self.injection = AdjacentInjection(
            config.hidden_size, config.num_layers, options.transfer_rank, options.message_width, options.inject_from - 1
        )
        self._draft_ids: Tensor | None = None  # [v'], None: the whole vocabulary

    def take_own_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name.removeprefix(_INJECTION): tensor for name, tensor in tensors.items() if name.startswith(_INJECTION)}
        self.injection.load_state_dict(own)
        self._draft_ids = tensors.get("draft_ids")
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(_INJECTION) and name != "draft_ids"}

    @torch.inference_mode()
    def bind(self, target: VllmTarget) -> None:
        super().bind(target)
        head, options = target.head_weight, self.options
        ids = None if self._draft_ids is None else self._draft_ids.to(head.device)
        space = build_transfer_space(head, options.transfer_rank, options.whitened)
        self.model.injection = PackedInjection(
            self.injection, space.codes, DraftHead.of(head, ids), self.model.norm.weight.dtype,
            num_candidates=options.num_candidates, refine=options.refine,
        )  # fmt: skip
        del self.injection  # packed

    def transition_cache(self, u: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All neighbour pairs of the slots' u_L [b, M, d] after anchors [b]: the candidates' token ids [b, M, k], the scores of
        slot 1's [b, k] and the transitions [b, M - 1, k, k] (see `PackedInjection.transitions`)."""
        packed, norm = self.model.injection, self.model.norm

        def final_norm(x: Tensor) -> Tensor:
            return rms_norm(x, norm.weight, norm.variance_epsilon)

        states, gate = packed.inject(packed.last_layer, u, packed.anchor_message(anchors))
        scores, rows = packed.candidates(states, final_norm)
        return packed.head.token_of(rows), scores[:, 0], packed.transitions(u, gate, scores, rows, final_norm)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise RuntimeError("a DSpine drafter's slots have no logits of their own; its proposer walks the transition cache")
