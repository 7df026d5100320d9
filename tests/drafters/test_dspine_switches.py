"""DSpine with one idea taken out: each switch against the slow version that leaves it out too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import LossSettings
from dspine.errors import UserError
from dspine.modules.losses import position_weights
from dspine.targets.model import Target

from .slow_dspine import head_rows, one_block, serial_draft, slow_block

SWITCHES: list[dict[str, Any]] = [
    {"inject_from": 2},
    {"inject_from": 3},
    {"refine": False},
    {"refine": False, "inject_from": 2},
    {"whitened": False},
    {"attention": "bidirectional"},
]


def switched(changes: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in changes.items())


@pytest.mark.parametrize("changes", SWITCHES, ids=switched)
@torch.inference_mode()
def test_drafts_are_the_serial_ones(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, changes: dict[str, Any]
) -> None:
    lengths = (9, 14, 5, 11)
    drafter = make_drafter(tiny_target, "dspine", noise=0.4, **changes)
    whole = make_drafter(tiny_target, "dspine", noise=0.4)
    situation = make_situation(tiny_target, lengths)
    anchors, context = situation.tokens[:, 0], situation.packed()
    for m in (7, 3):
        runner = drafter.runner(tiny_target)
        draft = runner.propose(anchors, fill_cache(runner, situation), m, torch.zeros(4), None)
        expected = [
            serial_draft(drafter, tiny_target, one_block(context, row), int(anchors[row]), m + 1) for row in range(len(lengths))
        ]
        assert draft.tokens.tolist() == expected
    runner = whole.runner(tiny_target)
    assert expected != runner.propose(anchors, fill_cache(runner, situation), m, torch.zeros(4), None).tokens.tolist()


@torch.inference_mode()
def test_without_refinement_q_does_not_depend_on_the_predecessor(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    runner = make_drafter(tiny_target, "dspine", refine=False).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache, anchors, temperatures = fill_cache(runner, situation), situation.tokens[:, 0], torch.full((3,), 0.8)
    numbers = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(2))
    one, other = (runner.propose(anchors, cache, 7, temperatures, uniforms) for uniforms in numbers)
    assert not torch.equal(one.tokens, other.tokens)
    assert one.q_probs is not None
    torch.testing.assert_close(one.q_probs, other.q_probs)


def test_layers_that_nothing_is_injected_into_have_no_write(tiny_target: Target, make_drafter: Any) -> None:
    drafter = make_drafter(tiny_target, "dspine", inject_from=3)
    assert [len(drafter.injection.readouts), len(drafter.injection.writes)] == [3, 1]
    with pytest.raises(UserError, match="inject_from = 4, but the drafter has only 3 layers"):
        make_drafter(tiny_target, "dspine", inject_from=4)


def test_loss_without_refinement_is_the_ordinary_outputs(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any
) -> None:
    settings = LossSettings(alpha=0.3)
    batch = make_batch(make_situation(tiny_target), tiny_target)
    whole, without = (make_drafter(tiny_target, "dspine", refine=refine) for refine in (True, False))
    full = whole.block_losses(batch, tiny_target, whole.head(tiny_target), settings)
    plain = without.block_losses(batch, tiny_target, without.head(tiny_target), settings)
    assert [len(full.distribution), len(plain.distribution)] == [4, 2]
    for ours, theirs in zip(plain.distribution, full.distribution, strict=False):
        torch.testing.assert_close(ours.mean(), theirs.mean())


@pytest.mark.parametrize("inject_from", [1, 2])
def test_layer_supervision_by_tokens(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, inject_from: int
) -> None:
    """Every layer's state, after its injection, read by the final norm and the head; the mean over layers."""
    drafter = make_drafter(tiny_target, "dspine", inject_from=inject_from)
    batch = make_batch(make_situation(tiny_target), tiny_target)
    settings = LossSettings(alpha=1.0, layer_supervision="token_ce")
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), settings)
    assert losses.alignment is not None
    rows, _ = head_rows(drafter, tiny_target)
    weights = position_weights(7, settings.gamma)
    total: Any = 0.0
    for a in range(3):
        states: list[Tensor] = []
        slow_block(drafter, tiny_target, one_block(batch.context, a), batch.tokens[a], after=states.append)
        for layer_states in states:
            for t in range(1, 8):
                logits = rows @ drafter.backbone.norm(layer_states[t])
                total = total - weights[t - 1] * torch.log_softmax(logits, -1)[batch.tokens[a, t]] / 3
    torch.testing.assert_close(losses.alignment.mean(), total / (3 * weights.sum()), rtol=1e-4, atol=1e-5)
    # Already a cross-entropy: it is not scaled by another one.
    sums = losses.sums()
    torch.testing.assert_close(losses.loss(sums, 0.5) - losses.loss(sums, 0.0), 0.5 * losses.alignment.mean())


def test_layer_supervision_off(tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any) -> None:
    drafter = make_drafter(tiny_target, "dspine")
    batch = make_batch(make_situation(tiny_target), tiny_target)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), LossSettings(layer_supervision="none"))
    assert losses.alignment is None
    assert losses.loss(losses.sums(), 0.5) == losses.loss(losses.sums(), 0.0)
