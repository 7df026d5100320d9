"""Domino (arXiv 2605.29707): the backbone drafts all slots at once, then a light causal correction walks over the choices.

    l_t = E h_t                                                 base logits of every slot from one backbone pass
    g_t = GRU(g_{t-1}, e(x_t)),  g_{-1} = 0                     e(x) the target's input embedding, x_0 the anchor
    l'_t = l_t + W silu(F [h_t; g_t]),  t >= 1;   l'_0 = l_0    slot t predicts x_{t+1}: it sees the tokens chosen up to x_t

The GRU has no biases: with i = W_i e(x_t) and u = U g_{t-1}, each cut into the parts r, z, n,

    r = sigmoid(i_r + u_r),   z = sigmoid(i_z + u_z),   n = tanh(i_n + r * u_n),   g_t = (1 - z) n + z g_{t-1}

W starts at zero, so that training starts at the plain backbone. In training the tokens are the true ones. With
L(q) = alpha CE + (1 - alpha) L1 (alpha = 1 is the paper's cross-entropy) the loss moves from the base to the final output:

    loss = (1 - lam) L(q') + lam L(q),   lam = 1 - share of the training done

Shapes: a anchors, B slots (as many as drafts: M = B), n = a * M rows, d hidden, g GRU width, r correction rank, b rows,
m slots to draft, v' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dspine.drafters.base import BlockDrafter, BlockLosses, Draft, LossSettings, Options, TrainingBatch
from dspine.drafters.config import DrafterConfig
from dspine.drafters.runner import FullVocabularyRunner
from dspine.drafters.supervision import Supervision
from dspine.kernels.linear import PackedLinear
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, LossTerm, VocabularyTerms, vocabulary_terms
from dspine.stages import stage
from dspine.targets.model import Target


class DominoOptions(Options):
    """Width g of the GRU and rank r of the correction."""

    gru_width: int = Field(1024, ge=1)
    correction_rank: int = Field(256, ge=1)


def gru_step(inputs: Tensor, gates: Tensor, state: Tensor) -> Tensor:
    """g_t [..., g] from i = W_i e(x_t) and u = U g_{t-1}, both [..., 3g], and g_{t-1}."""
    i_r, i_z, i_n = inputs.chunk(3, -1)
    u_r, u_z, u_n = gates.chunk(3, -1)
    new = torch.tanh(i_n + torch.sigmoid(i_r + u_r) * u_n)
    return torch.lerp(new, state, torch.sigmoid(i_z + u_z))


class Correction(nn.Module):
    """The correction's parameters; called, it makes the states silu(F [h_t; g_t]) that `out` (W) turns into logits."""

    def __init__(self, hidden_size: int, gru_width: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.input_gates = nn.Linear(hidden_size, 3 * gru_width, bias=False)  # W_i
        self.state_gates = nn.Linear(gru_width, 3 * gru_width, bias=False)  # U
        self.bottleneck = nn.Linear(hidden_size + gru_width, rank, bias=False)  # F
        self.out = nn.Linear(rank, vocabulary, bias=False)  # W

    def initialise(self) -> None:
        """Start as no correction at all: W = 0."""
        nn.init.zeros_(self.out.weight)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """States [a, B, r] of h [a, B, d] and the embeddings e(x_0) .. e(x_{B-1}) [a, B, d]."""
        inputs = self.input_gates(embedded)
        state = inputs.new_zeros(inputs.shape[0], self.state_gates.in_features)
        states = []
        for t in range(inputs.shape[1]):
            state = gru_step(inputs[:, t], self.state_gates(state), state)
            states.append(state)
        corrections = F.silu(self.bottleneck(torch.cat((hidden, torch.stack(states, 1)), -1)))
        return F.pad(corrections[:, 1:], (0, 0, 1, 0))  # zeros at slot 0: W has no bias, so they correct nothing


class Domino(BlockDrafter):
    """The anchor-first backbone and its causal correction."""

    Options = DominoOptions
    has_token_weights = True
    alignments = ("next",)
    attentions = ("bidirectional", "causal")

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        options = DominoOptions.read(config.drafter, config.options)
        self.correction = Correction(config.hidden_size, options.gru_width, options.correction_rank, config.vocabulary)

    def initialise(self, target: Target) -> None:
        super().initialise(target)
        self.correction.initialise()

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context)
        hidden = self.backbone.norm(states)  # [a, B, d]
        corrections = self.correction(hidden, target.embed(batch.tokens[:, :-1])).flatten(0, 1)  # [n, r]
        hidden = hidden.flatten(0, 1)
        rows = Supervision.of(batch, head, settings)
        base = vocabulary_terms(hidden, rows.teacher, rows.labels, head, 1)
        final = vocabulary_terms(hidden, rows.teacher, rows.labels, head, 1, (corrections, self.correction.out.weight))

        def share(of: float, terms: VocabularyTerms) -> tuple[LossTerm, ...]:
            return tuple(replace(term, coefficient=of * term.coefficient) for term in rows.distribution(terms.ce, terms.l1))

        distribution = (*share(1 - settings.progress, base), *share(settings.progress, final))
        return BlockLosses(distribution, rows.correct(final.top[:, 0]))

    def runner(self, target: Target) -> DominoRunner:
        return DominoRunner(self, target)


class DominoRunner(FullVocabularyRunner):
    """Drafting: one backbone pass, then slot by slot the GRU reads the chosen token and corrects the next slot's logits."""

    def __init__(self, drafter: Domino, target: Target) -> None:
        super().__init__(drafter, target)
        correction = drafter.correction

        def cast(linear: nn.Linear) -> Tensor:
            return linear.weight.detach().to(target.device, target.dtype)

        self._gru_width = correction.state_gates.in_features
        from_hidden, from_state = cast(correction.bottleneck).split((self.config.hidden_size, self._gru_width), 1)
        self._input_gates = PackedLinear(cast(correction.input_gates))
        self._from_hidden = PackedLinear(from_hidden)
        # What g_t says to its own slot's correction and to the next step's gates is one product.
        self._from_state = PackedLinear(torch.cat((cast(correction.state_gates), from_state)))
        self._out = PackedLinear(cast(correction.out))

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        states = self.block_states(anchors, cache, self.block_width(num_draft_tokens))[:, :num_draft_tokens]
        hidden = self.final_norm(states).transpose(0, 1).contiguous()  # [m, b, d]: the walk takes slot after slot
        base = self.base_logits(hidden)
        with stage("head"):
            from_hidden = self._from_hidden(hidden)
        state = hidden.new_zeros(anchors.shape[0], self._gru_width)
        gates = hidden.new_zeros(anchors.shape[0], 3 * self._gru_width)

        def next_logits(t: int, chosen: Tensor) -> Tensor:
            nonlocal state, gates
            with stage("head"):
                state = gru_step(self._input_gates(self.target.embed(chosen)), gates, state)
                said = self._from_state(state)
                gates, from_state = said[:, : 3 * self._gru_width], said[:, 3 * self._gru_width :]
                return self._out(F.silu(from_hidden[t] + from_state), add=base[t]) if t else base[t]

        return self.walk(next_logits, anchors, num_draft_tokens, temperatures, uniforms)
