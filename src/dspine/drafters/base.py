"""What every block drafter is: a module with a backbone that can be trained, saved, loaded and run.

A drafter file adds: its extra parameters, `block_losses` (train on a block) and `runner` (propose a block and its q).

Shapes: a anchors (blocks), B slots, M = B - 1 candidates, d hidden, v vocabulary, k candidates, b rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from typing_extensions import Self

from dspine.drafters.backbone import Backbone, BackboneParts, ContextBatch
from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError
from dspine.modules.kv_cache import KVCache
from dspine.modules.losses import DraftHead, LossTerm
from dspine.targets.model import Target


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Blocks to learn from. `teacher` holds the target's final-normed states that predict each candidate."""

    context: ContextBatch
    tokens: Tensor  # [a, B] true tokens, the anchor first
    supervised: Tensor  # [a, M] 1 on the contiguous supervised prefix
    teacher: Tensor  # [a, M, d]
    draws: Tensor  # [a] uniform random numbers: a block is under the true-predecessor curriculum where its own is below p


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss's weights at one step (see training.curriculum for how they move)."""

    alpha: float = 0.1
    gamma: float = 7.0
    distance: Literal["l1", "acceptance"] = "l1"  # what 1 - alpha weighs
    position_weights: Literal["fixed", "dpace"] = "fixed"
    dpace_smoothing: float = 0.5
    layer_supervision: Literal["cosine", "token_ce", "none"] = "cosine"
    forced_probability: float = 0.0  # true-predecessor curriculum
    refined_shared_normaliser: bool = False
    progress: float = 0.0  # share of the training done


@dataclass(frozen=True)
class BlockLosses:
    """The terms of the loss; the first of `distribution` is the ordinary output's cross-entropy (CE_backbone).

    `correct` [a, M] says where the draft's top choice, given true predecessors, is the true token. `alignment` is what the
    layers are supervised by; as an angle (L_emb) it is scaled by CE_backbone, a cross-entropy has that scale already.
    """

    distribution: tuple[LossTerm, ...]
    correct: Tensor
    alignment: LossTerm | None = None
    alignment_is_angle: bool = True

    def sums(self) -> Tensor:
        """What `loss` divides by, to be added up over the parts of a step: every term's weight, then CE_backbone's total."""
        terms = self.distribution if self.alignment is None else (*self.distribution, self.alignment)
        return torch.stack([*(term.weight for term in terms), self.distribution[0].total.detach()])

    def loss(self, sums: Tensor, beta: float) -> Tensor:
        """This part's share of L = L_dist + beta sg(CE_backbone) L_emb, `sums` being the whole step's."""
        parts = [term.coefficient * term.mean(weight) for term, weight in zip(self.distribution, sums, strict=False)]
        if self.alignment is not None:
            scale = mean_ce(sums) if self.alignment_is_angle else 1.0
            parts.append(beta * scale * self.alignment.mean(sums[len(self.distribution)]))
        return torch.stack(parts).sum()


def mean_ce(sums: Tensor) -> Tensor:
    """CE_backbone of a step's added-up `BlockLosses.sums`."""
    return sums[-1] / sums[0].clamp(min=1e-12)


@dataclass(frozen=True)
class Draft:
    """A proposal for b rows: `tokens` [b, m]; for sampled rows also the sparse q, `q_ids` and `q_probs` [b, m, k].

    `confidence()` [b, m], worked out only if somebody asks, says how sure the drafter is that candidate t is accepted if all
    before it are: fp32 in 0..1, raw (decoding.calibration makes probabilities of it). It must not depend on candidate t itself,
    only on what t is drawn from; decoding.confidence says why.
    """

    tokens: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None
    confidence: Callable[[], Tensor] | None = None

    def first(self, num_tokens: int) -> Draft:
        """The draft without what comes after its first `num_tokens` tokens."""
        ids, probs = (None if q is None else q[:, :num_tokens] for q in (self.q_ids, self.q_probs))
        return Draft(self.tokens[:, :num_tokens], ids, probs)


class DraftRunner(Protocol):
    """A drafter ready to run beside its target (inference)."""

    config: DrafterConfig

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """The drafter's own context cache; the engine commits its lengths."""
        ...

    def extend(self, features: Tensor, next_tokens: Tensor, cache: KVCache) -> None:
        """Write context K/V of features [b, n, taps * d] past the rows' lengths; next_tokens [b, n] follow each of them."""
        ...

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        """Draft m tokens after anchors [b]. temperatures [b], 0 = greedy; uniforms [b, m] are needed if any is not."""
        ...


class Options(BaseModel):
    """What only one kind of drafter has: its numbers and switches. A drafter without any uses this one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls, drafter: str, values: dict[str, Any]) -> Self:
        """Validated and with every default filled in; raises UserError naming the first one that is wrong."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "options"
            known = ", ".join(cls.model_fields) or "none"
            raise UserError(f"{drafter} drafter, option {name}: {first['msg']} (its options: {known})") from error


def check_num_candidates(num_candidates: int, config: DrafterConfig) -> None:
    """Raise UserError where more candidates per slot are asked for than there are tokens to draft from."""
    if num_candidates > config.vocabulary:
        raise UserError(f"num_candidates = {num_candidates}, but there are only {config.vocabulary} tokens to draft from")


class BlockDrafter(nn.Module, ABC):
    """A trainable block drafter. `draft_ids` [v'] are the tokens it may propose (empty: all)."""

    Options: ClassVar[type[Options]] = Options
    alignments: ClassVar[tuple[str, ...]] = ("same",)
    attentions: ClassVar[tuple[str, ...]] = ("causal", "bidirectional")
    has_token_weights: ClassVar[bool] = False  # weights of its own for each token to draft: they fit one draft vocabulary only
    backbone_class: ClassVar[type[BackboneParts]] = Backbone
    backbone: BackboneParts
    draft_ids: Tensor
    folder: Path | None = None  # the checkpoint it was loaded from

    def __init__(self, config: DrafterConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        for field, value, known in (
            ("alignment", config.alignment, self.alignments),
            ("attention", config.attention, self.attentions),
        ):
            if value not in known:
                raise UserError(
                    f"{field} = {value} is not a {config.drafter} drafter's, which has {field} = {' or '.join(known)}"
                )
        self.config = config
        self.backbone = self.backbone_class(config)
        ids = torch.zeros(0, dtype=torch.int64) if draft_ids is None else draft_ids.long().sort().values
        if ids.shape[0] != config.draft_vocab_size:
            raise ValueError(f"{ids.shape[0]} draft token ids for a draft_vocab_size of {config.draft_vocab_size}")
        self.register_buffer("draft_ids", ids)

    def initialise(self, target: Target) -> None:
        """Random start (a subclass adds its own parameters)."""
        self.backbone.initialise()

    def bind(self, target: Target) -> None:
        """Build what is computed from the target's head instead of stored."""

    def head(self, target: Target) -> DraftHead:
        """The target's head over this drafter's vocabulary."""
        ids = self.draft_ids.to(target.device) if self.draft_ids.numel() else None
        return DraftHead.of(target.head_weight, ids, target.softcap)

    def block_inputs(self, tokens: Tensor, target: Target) -> Tensor:
        """Input embeddings [a, B, d] of a block: the anchor, then mask tokens; tokens [a, B] or [a, 1 + anything]."""
        inputs = torch.full((tokens.shape[0], self.config.block_size), self.config.mask_token_id, device=tokens.device)
        inputs[:, 0] = tokens[:, 0]
        return target.embed(inputs)

    @abstractmethod
    def block_losses(self, batch: TrainingBatch, target: Target, head: DraftHead, settings: LossSettings) -> BlockLosses:
        """The training losses of one batch of blocks."""

    def forward(self, *arguments: Any) -> BlockLosses:
        """`block_losses`, under the name that distributed wrappers call."""
        return self.block_losses(*arguments)

    @abstractmethod
    def runner(self, target: Target) -> DraftRunner:
        """Pack the parameters for inference beside `target`."""

    def extra_state(self) -> dict[str, Any]:
        """Numbers worth printing about this drafter (parameters by part)."""
        return {"parameters": sum(p.numel() for p in self.parameters())}
