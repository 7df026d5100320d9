"""DSpine's draft model in SGLang: DFlash's layers and cache, with dspine's injection between them and its transition cache
in the place of DFlash2's selector.

`forward` returns what the choice of tokens needs of every slot, side by side: the state after the last injection, the state
before it, and the receiver's half of its gate (`_Slots`). SGLang's worker hands that to `compute_candidates` and
`candidate_selector`, eagerly or inside the draft's CUDA graph.

Shapes: b rows, w slots of a block (anchor first), M = w - 1, d hidden, m message width, k candidates, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.models.dflash import DFlashAttention, DFlashDecoderLayer, DFlashDraftModel
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.config import DrafterConfig
from dspine.drafters.dspine import DSpineOptions
from dspine.drafters.packed_injection import PackedInjection
from dspine.errors import UserError
from dspine.modules.injection import AdjacentInjection
from dspine.modules.losses import DraftHead
from dspine.modules.norm import rms_norm
from dspine.modules.selection import walk_transitions
from dspine.modules.transfer_space import build_transfer_space
from dspine_sglang import ALGORITHM
from dspine_sglang.loading import check_loaded, check_tensors, poison


class DSpineAttention(DFlashAttention):
    """DFlash's attention; without its norms of queries and keys where the drafter was trained without."""

    def __init__(self, config: Any, layer_id: int, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, layer_id, quant_config, prefix)
        self.qk_norm: bool = config.dspine["qk_norm"]
        if not self.qk_norm:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        if self.qk_norm:
            return super().forward(positions, hidden_states, forward_batch)
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


class DSpineDecoderLayer(DFlashDecoderLayer):
    attention_cls = DSpineAttention


class TransitionSelector(nn.Module):
    """What SGLang's worker asks of a selector: scores of all neighbour pairs, and a walk over them."""

    def __init__(self, model: DSpineDraftModel, num_candidates: int) -> None:
        super().__init__()
        self._slots_of = model.slots
        self._transitions = model.transitions
        self.top_k = num_candidates

    def build_lattice(
        self, *, candidate_ids: Tensor, unary_logits: Tensor, hidden_states: Tensor, anchor_token_ids: Tensor
    ) -> Tensor:  # fmt: skip
        """Scores [b, M, k, k]: slot t's candidate (last) after slot t - 1's; slot 1 has the anchor before it, k times."""
        first = unary_logits[:, :1, None].expand(-1, -1, self.top_k, -1)
        return torch.cat((first, self._transitions(hidden_states, unary_logits, candidate_ids)), 1)

    def sample_path(
        self, *, candidate_ids: Tensor, scores: Tensor, uniforms: Tensor, temperatures: Tensor, greedy_mask: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Drafted tokens [b, M] and the q that they were drawn from [b, M, k]."""
        own = torch.where(greedy_mask, 0.0, temperatures)
        index, q = walk_transitions(scores[:, 0, 0], scores[:, 1:], own, uniforms)
        assert q is not None, "uniforms were given"
        return candidate_ids.gather(2, index[..., None])[..., 0], q


class DSpineDraftModel(DFlashDraftModel):
    decoder_layer_cls = DSpineDecoderLayer

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        self.drafter_config = DrafterConfig.model_validate(config.dspine)
        self.options = DSpineOptions.read(self.drafter_config.drafter, self.drafter_config.options)
        config.max_position_embeddings = config.context_len + self.drafter_config.block_size  # rotations are tabulated
        super().__init__(config, quant_config, prefix)
        self.supports_fused_context_kv = self.drafter_config.qk_norm  # the fused kernel always norms the keys
        self._packed: PackedInjection | None = None
        self._embedding = torch.zeros(0)
        self.injection = AdjacentInjection(
            self.drafter_config.hidden_size, self.drafter_config.num_layers, self.options.transfer_rank,
            self.options.message_width, self.options.inject_from - 1,
        )  # fmt: skip
        self.register_buffer("draft_ids", torch.zeros(self.drafter_config.draft_vocab_size, dtype=torch.int64))
        self.candidate_selector = TransitionSelector(self, self.options.num_candidates)
        self.lm_head: Any = None  # SGLang's worker leaves the target's here; `bind` has taken what is needed of it

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint's tensors. Raises UserError where one is missing, unknown or of another shape, and once the model
        runs: graphs have been captured with what was packed of them."""
        if self._packed is not None:
            raise UserError(f"{ALGORITHM}: a running server's drafter cannot be given other weights; start the server again")
        tensors = dict(weights)
        check_tensors(self.drafter_config, tensors)
        poison(self)
        super().load_weights((name.removeprefix("backbone."), t) for name, t in tensors.items() if name.startswith("backbone."))
        self.load_state_dict({name: t for name, t in tensors.items() if not name.startswith("backbone.")}, strict=False)
        check_loaded(self)

    def bind(self, embedding: Tensor, head_weight: Tensor) -> None:
        """Draft with the target's embedding and LM head [v, d]: build the head's transfer space, pack the injection for it."""
        self._embedding = embedding
        space = build_transfer_space(head_weight, self.options.transfer_rank, self.options.whitened)
        head = DraftHead.of(head_weight, self.draft_ids if self.draft_ids.numel() else None)
        self._packed = PackedInjection(
            self.injection, space.codes, head, self.fc.weight.dtype, num_candidates=self.options.num_candidates,
            refine=self.options.refine,
        )  # fmt: skip

    @property
    def packed(self) -> PackedInjection:
        assert self._packed is not None, "bind(embedding, head_weight) packs the injection"
        return self._packed

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None,
        get_embedding: bool = False, pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:  # fmt: skip
        """input_ids and positions [b * w] -> `hidden_states` [b * w, 2d + m], see `slots`.

        `input_embeds` are passed over: SGLang's eager runner rounds them to bfloat16, whatever the model's dtype.
        """
        packed, width = self.packed, self.block_size
        x = F.embedding(input_ids.view(-1, width), self._embedding)  # [b, w, d]
        message = packed.anchor_message(input_ids.view(-1, width)[:, 0])
        u = gate = h = x[:, 1:]
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, x.flatten(0, 1), forward_batch, None)
            x = (hidden + residual).view_as(x)
            if index >= packed.first_layer:
                u = x[:, 1:]
                h, gate = packed.inject(index, u, message)
                x = torch.cat((x[:, :1], h), 1)
        slots = F.pad(torch.cat((h, u, gate), -1), (0, 0, 1, 0))  # the anchor drafts nothing
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=slots.flatten(0, 1))

    def slots(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h, u [..., d] and the gate [..., m] of `forward`'s hidden states [..., 2d + m]."""
        d, m = self.drafter_config.hidden_size, self.options.message_width
        h, u, gate = packed.split((d, d, m), -1)
        return h, u, gate

    def final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm.weight, self.drafter_config.rms_norm_eps)

    def compute_candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and scores [n, k] of the likeliest tokens of hidden states [n, 2d + m]."""
        scores, rows = self.packed.candidates(self.slots(hidden)[0], self.final_norm)
        return self.packed.head.token_of(rows), scores

    def transitions(self, hidden: Tensor, scores: Tensor, candidate_ids: Tensor) -> Tensor:
        """Scores [b, M - 1, k, k] of slots 2..M after their predecessors, for hidden states [b, M, 2d + m]."""
        _, u, gate = self.slots(hidden)
        return self.packed.transitions(u, gate, scores, self.packed.head.row_of(candidate_ids), self.final_norm)


EntryClass = DSpineDraftModel
