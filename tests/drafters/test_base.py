"""What all drafters share: block inputs, the draft vocabulary, and how the parts of a step's loss add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import BlockLosses, LossSettings, mean_ce
from dspine.errors import UserError
from dspine.modules.losses import LossTerm
from dspine.targets.model import Target


def term(coefficient: float, total: float, weight: float) -> LossTerm:
    return LossTerm(coefficient, torch.tensor(total, requires_grad=True), torch.tensor(weight))


def test_loss_of_a_whole_step() -> None:
    losses = BlockLosses((term(0.1, 6.0, 3.0), term(0.9, 2.0, 4.0)), torch.zeros(1, 1), term(1.0, 5.0, 2.0))
    sums = losses.sums()
    assert sums.tolist() == [3.0, 4.0, 2.0, 6.0]
    assert not sums.requires_grad
    assert float(mean_ce(sums)) == 2.0
    # 0.1 * 6/3 + 0.9 * 2/4 + beta * CE * 5/2 with CE = 6/3
    assert float(losses.loss(sums, 0.5).detach()) == pytest.approx(0.2 + 0.45 + 0.5 * 2.0 * 2.5)


def test_the_alignment_weight_has_no_gradient() -> None:
    """sg(CE_backbone): the factor on the alignment does not pull the cross-entropy."""
    ce, alignment = torch.tensor(6.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    losses = BlockLosses((LossTerm(1.0, ce, torch.tensor(3.0)),), torch.zeros(1, 1), LossTerm(1.0, alignment, torch.tensor(2.0)))
    losses.loss(losses.sums(), 0.5).backward()
    assert ce.grad is not None
    assert alignment.grad is not None
    assert float(ce.grad) == pytest.approx(1 / 3)
    assert float(alignment.grad) == pytest.approx(0.5 * 2.0 / 2)


def test_without_alignment_beta_does_nothing() -> None:
    losses = BlockLosses((term(1.0, 6.0, 3.0),), torch.zeros(1, 1))
    assert losses.sums().tolist() == [3.0, 6.0]
    assert float(losses.loss(losses.sums(), 0.5).detach()) == 2.0


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_parts_of_a_batch_add_up(tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, kind: str) -> None:
    """Blocks split over micro-batches, each divided by the whole step's sums, give the gradients of one batch."""
    drafter = make_drafter(tiny_target, kind)
    situation = make_situation(tiny_target)
    supervised = torch.ones(3, 7)
    supervised[0, 2:] = 0  # unlike weights: the mean of the parts' means would be something else
    batch, head = make_batch(situation, tiny_target, supervised), drafter.head(tiny_target)
    settings = LossSettings(alpha=0.4, forced_probability=0.5)

    def part(chosen: Tensor) -> BlockLosses:
        context = replace(batch.context, anchors=batch.context.anchors[chosen])
        piece = type(batch)(
            context=context,
            tokens=batch.tokens[chosen],
            supervised=batch.supervised[chosen],
            teacher=batch.teacher[chosen],
            draws=batch.draws[chosen],
        )
        return drafter.block_losses(piece, tiny_target, head, settings)

    parameters = list(drafter.parameters())
    whole = drafter.block_losses(batch, tiny_target, head, settings)
    loss = whole.loss(whole.sums(), 0.3)
    parts = [part(torch.tensor([0])), part(torch.tensor([1, 2]))]
    sums = parts[0].sums() + parts[1].sums()
    torch.testing.assert_close(sums, whole.sums(), rtol=1e-5, atol=1e-5)
    added = parts[0].loss(sums, 0.3) + parts[1].loss(sums, 0.3)
    torch.testing.assert_close(added, loss)
    naive = (parts[0].loss(parts[0].sums(), 0.3) + parts[1].loss(parts[1].sums(), 0.3)) / 2
    assert abs(float((naive - loss).detach())) > 1e-2
    for a, b in zip(torch.autograd.grad(added, parameters), torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_block_inputs_show_the_anchor_only(tiny_target: Target, make_drafter: Any) -> None:
    drafter = make_drafter(tiny_target, "dflash", mask_token_id=3)
    inputs = drafter.block_inputs(torch.tensor([[50, 60, 70], [51, 61, 71]]), tiny_target)
    assert inputs.shape == (2, 8, tiny_target.hidden_size)
    assert torch.equal(inputs[:, 0], tiny_target.embedding[torch.tensor([50, 51])])
    assert torch.equal(inputs[:, 1:], tiny_target.embedding[3].expand(2, 7, -1))


def test_draft_ids_are_kept_sorted_and_counted(tiny_target: Target, make_drafter: Any) -> None:
    drafter = make_drafter(tiny_target, "dflash", draft_ids=torch.tensor([9, 4, 200]))
    assert drafter.draft_ids.tolist() == [4, 9, 200]
    assert torch.equal(drafter.head(tiny_target).weight, tiny_target.head_weight[[4, 9, 200]])
    with pytest.raises(ValueError, match="0 draft token ids for a draft_vocab_size of 3"):
        type(drafter)(drafter.config)


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_alignment_to_the_next_token_is_refused(tiny_target: Target, make_drafter: Any, kind: str) -> None:
    with pytest.raises(UserError, match=f"alignment = next is not a {kind} drafter's, which has alignment = same"):
        make_drafter(tiny_target, kind, alignment="next")
