"""DFlash: independent slots in drafting, token CE and L1 in training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dspine.drafters.base import LossSettings
from dspine.targets.model import Target


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_loss_slot_by_slot(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, alpha: float, every: int
) -> None:
    ids = torch.arange(0, tiny_target.vocab_size, every)
    drafter = make_drafter(tiny_target, "dflash", attention="bidirectional", draft_ids=None if every == 1 else ids)
    situation = make_situation(tiny_target)
    supervised = torch.ones(3, 7)
    supervised[1, 4:] = 0
    batch = make_batch(situation, tiny_target, supervised)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), LossSettings(alpha=alpha, gamma=4.0))
    assert losses.alignment is None
    states = drafter.backbone.norm(drafter.backbone(drafter.block_inputs(batch.tokens, tiny_target), batch.context))
    rows = tiny_target.head_weight[ids]
    ce = l1 = total = everything = torch.zeros(())
    for a in range(3):
        for t in range(1, 8):
            token = int(batch.tokens[a, t])
            log_q = torch.log_softmax(rows @ states[a, t], -1)
            p = torch.softmax(rows @ batch.teacher[a, t - 1], -1)
            row = ids.tolist().index(token) if token in ids else -1
            assert bool(losses.correct[a, t - 1]) == (int(log_q.argmax()) == row)
            if not supervised[a, t - 1]:
                continue
            w = math.exp(-(t - 1) / 4.0)
            l1, everything = l1 + w * (log_q.exp() - p).abs().sum(), everything + w
            if row >= 0:
                ce, total = ce - w * log_q[row], total + w
    assert total > 0
    expected = alpha * ce / total + ((1 - alpha) * l1 / everything if alpha < 1 else 0)
    loss = losses.loss(losses.sums(), beta=0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    parameters = list(drafter.parameters())
    for fast, slow in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-5)


@torch.inference_mode()
def test_every_slot_drafts_its_own_best_token(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    drafter = make_drafter(tiny_target, "dflash", attention="bidirectional")
    situation = make_situation(tiny_target)
    runner = drafter.runner(tiny_target)
    states = drafter.backbone(drafter.block_inputs(situation.tokens, tiny_target), situation.packed())
    logits = drafter.backbone.norm(states[:, 1:]) @ tiny_target.head_weight.t()
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 7, torch.zeros(3), None)
    assert torch.equal(draft.tokens, logits.argmax(-1))
    assert draft.q_ids is None


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str
) -> None:
    """Causal slots do not depend on the width; a bidirectional drafter always runs its trained width."""
    runner = make_drafter(tiny_target, "dflash", attention=attention, block_size=16).runner(tiny_target)
    situation = make_situation(tiny_target, block_size=16)
    cache = fill_cache(runner, situation)
    anchors = situation.tokens[:, 0]
    wide = runner.propose(anchors, cache, 15, torch.zeros(3), None).tokens
    for m in (1, 3, 7):
        assert torch.equal(runner.propose(anchors, cache, m, torch.zeros(3), None).tokens, wide[:, :m])


@torch.inference_mode()
def test_draft_vocabulary(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    ids = torch.tensor([250, 7, 99, 31, 12, 180])  # any order
    runner = make_drafter(tiny_target, "dflash", draft_ids=ids).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    uniforms = torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    draft = runner.propose(situation.tokens[:, 0], cache, 7, torch.tensor([0.0, 1.0, 1.0]), uniforms)
    assert set(draft.tokens.flatten().tolist()) <= set(ids.tolist())
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    assert draft.q_ids[0, 0].tolist() == sorted(ids.tolist())
    torch.testing.assert_close(draft.q_probs.sum(-1), torch.ones(3, 7))
    for row in (1, 2):
        for t in range(7):
            place = draft.q_ids[row, t].tolist().index(int(draft.tokens[row, t]))
            assert draft.q_probs[row, t, place] > 0
