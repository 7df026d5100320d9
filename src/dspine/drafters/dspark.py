"""DSpark (DeepSpec): the anchor-first backbone, a Markov head that biases each slot by the token before it, and a confidence.

    l_t = E h_t + W2 s_t                       e_t = W1[x_t]; slot t predicts x_{t+1}, x_0 is the anchor
    s_t = e_t                                  vanilla
    s_t = e_t * sigmoid(G [h_t; e_t] + b)      gated
    s_t = tanh(e_t + U s_{t-1}), s_{-1} = 0    recurrent
    c_t = sigmoid(w . [h_t; e_t] + b)          the estimated chance that slot t's token is accepted if all before it are

A token drawn from q is accepted with probability sum_v min(q, p) = 1 - |q - p|_1 / 2, which is what c_t is trained to. W2
starts at zero, so that training starts at the plain backbone. In training the tokens x_t are the true ones:

    loss = alpha CE + (1 - alpha) L1 + confidence_loss BCE(c, sg(1 - L1 / 2))

Shapes: a anchors, B slots (as many as drafts: M = B), n = a * M rows, d hidden, r Markov rank, b rows, m slots to draft,
v vocabulary, v' draft vocabulary.
"""

from __future__ import annotations

import copy
from typing import Literal

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
from dspine.modules.losses import DraftHead, vocabulary_terms, weigh
from dspine.stages import stage
from dspine.targets.model import Target

Markov = Literal["vanilla", "gated", "recurrent"]


class DSparkOptions(Options):
    """Rank r and kind of the Markov head, and the weight of the confidence in the loss."""

    markov_rank: int = Field(256, ge=1)
    markov: Markov = "vanilla"
    confidence_loss: float = Field(1.0, ge=0)


class MarkovState(nn.Module):
    """The vector s_t that stands for the tokens before a prediction; W2 makes a bias of the logits of it."""

    def __init__(self, kind: Markov, vocabulary: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, rank)  # W1, over all tokens: the anchor may be any
        # G in two parts, because the states' part is known for all slots before any token is chosen.
        self.gate_hidden = nn.Linear(hidden_size, rank) if kind == "gated" else None
        self.gate_token = nn.Linear(rank, rank, bias=False) if kind == "gated" else None
        self.recurrence = nn.Linear(rank, rank, bias=False) if kind == "recurrent" else None  # U

    def gates(self, hidden: Tensor) -> Tensor | None:
        """What h [..., d] says to the gates [..., r]; None where there are none."""
        return None if self.gate_hidden is None else self.gate_hidden(hidden)

    def step(self, embedded: Tensor, gates: Tensor | None, before: Tensor | None) -> Tensor:
        """s_t [..., r] of e_t [..., r], this slot's `gates` and s_{t-1} (None at the first slot)."""
        if self.gate_token is not None:
            assert gates is not None, "gates(hidden) makes them"
            return embedded * torch.sigmoid(gates + self.gate_token(embedded))
        if self.recurrence is not None:
            return torch.tanh(embedded if before is None else embedded + self.recurrence(before))
        return embedded

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """s [a, B, r] of whole blocks, h [a, B, d] and e [a, B, r]: slot by slot only where a slot needs the one before."""
        if self.recurrence is None:
            return self.step(embedded, self.gates(hidden), None)
        states: list[Tensor] = []
        for e in embedded.unbind(1):
            states.append(self.step(e, None, states[-1] if states else None))
        return torch.stack(states, 1)


class DSpark(BlockDrafter):
    """The anchor-first backbone with its Markov and confidence heads."""

    Options = DSparkOptions
    has_token_weights = True
    alignments = ("next",)
    attentions = ("bidirectional", "causal")

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.options = options = DSparkOptions.read(config.drafter, config.options)
        rank = options.markov_rank
        self.markov = MarkovState(options.markov, config.target.vocab_size, config.hidden_size, rank)
        self.markov_bias = nn.Linear(rank, config.vocabulary, bias=False)  # W2
        self.confidence = nn.Linear(config.hidden_size + rank, 1)  # w and b

    def initialise(self, target: Target) -> None:
        """W2 = 0, and a confidence of 1/2 everywhere. W1 is small: a token never seen in training then biases next to nothing."""
        super().initialise(target)
        nn.init.normal_(self.markov.embedding.weight, std=0.02)
        for parameter in (self.markov_bias.weight, self.confidence.weight, self.confidence.bias):
            nn.init.zeros_(parameter)

    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        states = self.backbone(self.block_inputs(batch.tokens, target), batch.context)
        hidden = self.backbone.norm(states)  # [a, B, d]
        embedded = self.markov.embedding(batch.tokens[:, :-1])  # [a, B, r]
        markov = self.markov(hidden, embedded).flatten(0, 1)  # [n, r]
        confidence = self.confidence(torch.cat((hidden, embedded), -1)).flatten()  # [n] logits
        # The L1 is what the confidence learns, so it is computed even where the drafter itself learns from CE alone.
        rows = Supervision.of(batch, head, settings, always_teacher=True)
        bias = (markov, self.markov_bias.weight)
        terms = vocabulary_terms(hidden.flatten(0, 1), rows.teacher, rows.labels, head, 1, bias)
        assert terms.l1 is not None
        accepted = 1 - terms.l1.detach() / 2
        bce = F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
        confidence_loss = weigh(bce, rows.fixed_weights, self.options.confidence_loss)
        return BlockLosses((*rows.distribution(terms.ce, terms.l1), confidence_loss), rows.correct(terms.top[:, 0]))

    def runner(self, target: Target) -> DSparkRunner:
        return DSparkRunner(self, target)


class DSparkRunner(FullVocabularyRunner):
    """Drafting: one backbone pass, then left to right each slot's logits are biased by the tokens chosen before it."""

    def __init__(self, drafter: DSpark, target: Target) -> None:
        super().__init__(drafter, target)
        dtype, device = target.dtype, target.device
        self._markov = copy.deepcopy(drafter.markov).to(device, dtype).requires_grad_(False)
        self._confidence = copy.deepcopy(drafter.confidence).to(device, dtype).requires_grad_(False)
        self._bias = PackedLinear(drafter.markov_bias.weight.detach().to(device, dtype))

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        """As every runner's; the confidence is the head's, given the chosen predecessors."""
        states = self.block_states(anchors, cache, self.block_width(num_draft_tokens))[:, :num_draft_tokens]
        hidden = self.final_norm(states).transpose(0, 1).contiguous()  # [m, b, d]: the walk takes slot after slot
        base = self.base_logits(hidden)
        with stage("head"):
            gates = self._markov.gates(hidden)
        state: Tensor | None = None
        embedded: list[Tensor] = []

        def next_logits(t: int, chosen: Tensor) -> Tensor:
            nonlocal state
            with stage("head"):
                embedded.append(self._markov.embedding(chosen))
                state = self._markov.step(embedded[-1], None if gates is None else gates[t], state)
                return self._bias(state, add=base[t])

        def confidence() -> Tensor:
            logits = self._confidence(torch.cat((hidden, torch.stack(embedded)), -1))[..., 0]  # [m, b]
            return torch.sigmoid(logits.float()).t()

        return self.walk(next_logits, anchors, num_draft_tokens, temperatures, uniforms, confidence)
