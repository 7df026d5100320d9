"""Tiny drafters with random weights for the tiny targets, and contexts for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.backbone import ContextBatch
from dspine.drafters.base import BlockDrafter, TrainingBatch
from dspine.drafters.config import DrafterConfig, TargetFacts
from dspine.drafters.registry import DRAFTERS, drafter_class
from dspine.targets.model import Target

MakeConfig = Callable[..., DrafterConfig]
MakeDrafter = Callable[..., BlockDrafter]


@dataclass(frozen=True)
class Situation:
    """Rows of committed context, each about to draft a block: as a runner meets it, and as training packs it."""

    features: list[Tensor]  # per row [n, taps * d]
    tokens: Tensor  # [rows, B] true tokens, the anchor first
    next_tokens: list[Tensor]  # per row [n], the anchor last

    def row(self, row: int) -> Situation:
        return Situation(self.features[row : row + 1], self.tokens[row : row + 1], self.next_tokens[row : row + 1])

    def packed(self) -> ContextBatch:
        """The rows end to end, each with a few more tokens that no block may look at."""
        extra = 3
        generator = torch.Generator().manual_seed(99)
        parts, following, anchors, offset = [], [], [], 0
        for features, next_tokens in zip(self.features, self.next_tokens, strict=True):
            following.append(torch.cat((next_tokens, next_tokens.new_zeros(extra))))
            parts.append(torch.cat((features, torch.randn(extra, features.shape[1], generator=generator) * 5)))
            anchors.append(offset + features.shape[0])
            offset += parts[-1].shape[0]
        lengths = [part.shape[0] for part in parts]
        return ContextBatch(
            features=torch.cat(parts),
            positions=torch.cat([torch.arange(n) for n in lengths]),
            sequences=torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths)),
            next_tokens=torch.cat(following),
            anchors=torch.tensor(anchors),
        )


MakeSituation = Callable[..., Situation]


def _config(target: Target, kind: str = "dspine", **changes: Any) -> DrafterConfig:
    settings: dict[str, Any] = {
        "drafter": kind,
        "target": TargetFacts.of(target),
        "target_layer_ids": (0, 2),
        "block_size": 8,
        "mask_token_id": 2,
        "attention": "causal",
        "alignment": drafter_class(kind).alignments[0] if kind in DRAFTERS else "same",
        "num_layers": 1 if kind == "eagle3" else 3,
        "hidden_size": target.hidden_size,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 300.0,
        "options": {},
    }
    tiny = {
        "transfer_rank": 12,
        "message_width": 7,
        "num_candidates": 5,
        "gru_width": 9,
        "correction_rank": 6,
        "markov_rank": 6,
        "conv_groups_of": 8,
        "selector_rank": 9,
    }
    names = drafter_class(kind).Options.model_fields if kind in DRAFTERS else {}
    options = {**tiny, **changes}
    settings["options"] = {name: options[name] for name in names if name in options}
    return DrafterConfig(**{**settings, **{name: value for name, value in changes.items() if name not in names}})


def _drafter(
    target: Target, kind: str = "dspine", *, seed: int = 0, noise: float = 0.2, draft_ids: Tensor | None = None, **changes: Any
) -> BlockDrafter:
    size = 0 if draft_ids is None else draft_ids.shape[0]
    torch.manual_seed(seed)
    drafter = drafter_class(kind)(_config(target, kind, draft_vocab_size=size, **changes), draft_ids)
    drafter.initialise(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return drafter


def _fill_cache(runner: Any, situation: Situation, piece: int = 1000) -> Any:
    """A cache with each row's context committed, `piece` tokens of every row at a time."""
    features, following = situation.features, situation.next_tokens
    cache = runner.new_cache(len(features), 4)  # it grows
    lengths = torch.tensor([f.shape[0] for f in features])
    for start in range(0, int(lengths.max()), piece):
        # Rows that have ended get garbage, as refused tokens' features do in decoding: it is never committed.
        rows = torch.full((len(features), piece if piece < 1000 else int(lengths.max()), features[0].shape[1]), 77.0)
        tokens = torch.zeros(rows.shape[:2], dtype=torch.long)
        for row, (f, t) in enumerate(zip(features, following, strict=True)):
            part = f[start : start + rows.shape[1]]
            rows[row, : part.shape[0]] = part
            tokens[row, : part.shape[0]] = t[start : start + rows.shape[1]]
        runner.extend(rows, tokens, cache)
        cache.lengths += (lengths - start).clamp(min=0, max=rows.shape[1])
    assert torch.equal(cache.lengths, lengths)
    return cache


def _batch(situation: Situation, target: Target, supervised: Tensor | None = None) -> TrainingBatch:
    a, b = situation.tokens.shape
    generator = torch.Generator().manual_seed(5)
    return TrainingBatch(
        context=situation.packed(),
        tokens=situation.tokens,
        supervised=torch.ones(a, b - 1) if supervised is None else supervised,
        teacher=torch.randn(a, b - 1, target.hidden_size, generator=generator),
        draws=torch.tensor([0.1, 0.9, 0.3]),
    )


@pytest.fixture(scope="session")
def fill_cache() -> Callable[..., Any]:
    """`fill_cache(runner, situation, piece=all)`: a context cache with every row's context committed."""
    return _fill_cache


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainingBatch]:
    """`make_batch(situation, target, supervised=all)`: its blocks with random teacher states."""
    return _batch


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """`make_config(target, kind, **changes)`: a tiny drafter's config."""
    return _config


@pytest.fixture(scope="session")
def make_drafter() -> MakeDrafter:
    """`make_drafter(target, kind, noise=0.2, draft_ids=None, **config)`: initialised, then disturbed everywhere by `noise`."""
    return _drafter


@pytest.fixture(scope="session")
def make_situation() -> MakeSituation:
    """`make_situation(target, lengths, block_size=8, taps=2)`."""

    def make(
        target: Target, lengths: tuple[int, ...] = (9, 14, 5), block_size: int = 8, taps: int = 2, seed: int = 0
    ) -> Situation:
        generator = torch.Generator().manual_seed(seed)
        features = [3 * torch.randn(n, taps * target.hidden_size, generator=generator) for n in lengths]
        tokens = torch.randint(4, target.vocab_size, (len(lengths), block_size), generator=generator)
        following = [torch.randint(4, target.vocab_size, (n,), generator=generator) for n in lengths]
        for row, anchor in zip(following, tokens[:, 0], strict=True):
            row[-1] = anchor
        return Situation(features, tokens, following)

    return make
