"""What a block is taught, against hand-computed cases and against what the losses claim to be the gradient of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import LossSettings
from dspine.drafters.registry import DRAFTERS
from dspine.drafters.supervision import Supervision
from dspine.targets.model import Target

SUPERVISED = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def rows_of(labels: list[int] | None = None, supervised: Tensor = SUPERVISED, **settings: Any) -> Supervision:
    n, m = supervised.numel(), supervised.shape[1]
    return Supervision(
        torch.tensor(labels or list(range(n))), supervised, torch.tensor([1.0, 0.8, 0.5, 0.2][:m]), None, LossSettings(**settings)
    )


def test_gated_rule_and_the_older_one() -> None:
    rows = rows_of(supervised=torch.ones(1, 3), alpha=0.1)
    ce, l1 = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.25, 1.0])
    gates = {"ce_gate": torch.tensor([1.0, 0.0, 1.0]), "l1_gate": torch.tensor([0.0, 0.0, 1.0])}
    gated = rows.distribution(ce, l1, **gates)
    assert [term.coefficient for term in gated] == pytest.approx([0.1, 0.9])
    assert [float(term.mean()) for term in gated] == pytest.approx([3.0 / 1.5, 0.5 / 0.5])
    shared = rows.distribution(ce, l1, over=torch.tensor([1.0, 0.8, 0.5]), **gates)
    assert [float(term.mean()) for term in shared] == pytest.approx([3.0 / 2.3, 0.5 / 2.3])
    assert [term.coefficient for term in rows.distribution(ce, None)] == [0.1]


def test_tokens_that_cannot_be_drafted_have_no_cross_entropy() -> None:
    rows = rows_of([3, -1, 5, 6, 7, -1], alpha=0.5)
    ce, l1 = rows.distribution(torch.ones(6) * 2, torch.ones(6))
    assert float(ce.weight) == pytest.approx(1 + 0.5 + 1 + 0.8)
    assert float(l1.weight) == pytest.approx(2.3 + 1.8)
    assert rows.correct(torch.tensor([3, -1, 1, 6, 0, 0])).tolist() == [[True, True, False], [True, False, False]]


def test_dpace_weights_of_a_case_worked_by_hand() -> None:
    """q = 0.5, 0.2 (and a third slot), smoothing 0.5: s = 0.75, 0.6, 0.55."""
    rows = rows_of(supervised=SUPERVISED, alpha=1.0, position_weights="dpace", dpace_smoothing=0.5)
    ce = -torch.log(torch.tensor([0.5, 0.2, 0.1, 0.5, 0.2, 0.1]))
    (term,) = rows.distribution(ce, None)
    first, second, third = 0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.55
    block = [first + second + third, second + third, third]
    shorter = [first + second, second]
    total = sum(w * float(x) for w, x in zip((*block, *shorter), ce, strict=False))
    assert float(term.total) == pytest.approx(total, rel=1e-5)
    assert float(term.weight) == 2  # blocks


def test_unsmoothed_dpace_is_the_gradient_of_the_surrogate_it_comes_from() -> None:
    """sum_m prod_{i <= m} q_i, differentiated through every q at once."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    log_q = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
    rows = rows_of(labels.tolist(), alpha=1.0, position_weights="dpace", dpace_smoothing=0.0)
    (term,) = rows.distribution(-log_q, None)
    ours = torch.autograd.grad(term.mean(), logits, retain_graph=True)[0]
    surrogate = (log_q.exp().view(2, 3).cumprod(-1) * SUPERVISED).sum() / 2
    torch.testing.assert_close(ours, -torch.autograd.grad(surrogate, logits)[0])


def test_acceptance_is_the_expected_length_of_what_the_verifier_keeps() -> None:
    rows = rows_of(alpha=0.25, distance="acceptance")
    l1 = torch.tensor([0.4, 1.0, 0.2, 0.0, 2.0, 0.6], requires_grad=True)
    ce, length = rows.distribution(torch.ones(6), l1)
    assert [ce.coefficient, length.coefficient] == [0.25, 0.75]
    expected = [1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.9, 1 + 1.0 + 1.0 * 0.0]
    assert float(length.mean().detach()) == pytest.approx(-sum(expected) / 2)
    gradient = torch.autograd.grad(length.mean(), l1)[0]
    # d/dA_2 of the first block is A_1 (1 + A_3), and A = 1 - l1 / 2.
    assert float(gradient[1]) == pytest.approx(0.8 * 1.9 / 2 / 2)
    assert gradient[5] == 0  # not supervised


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("change", [{"position_weights": "dpace"}, {"distance": "acceptance"}], ids=str)
def test_every_drafter_learns_by_every_loss(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, kind: str, change: dict[str, Any]
) -> None:
    """A small step against its gradient lowers a loss too, though the gradient is not that one's."""
    drafter = make_drafter(tiny_target, kind, noise=0.05)
    batch = make_batch(make_situation(tiny_target, block_size=drafter.config.max_width), tiny_target)
    head = drafter.head(tiny_target)
    changed, default = LossSettings(alpha=0.3, progress=0.5, **change), LossSettings(alpha=0.3, progress=0.5)

    def loss_of(settings: LossSettings = default) -> Tensor:
        losses = drafter.block_losses(batch, tiny_target, head, settings)
        return losses.loss(losses.sums(), 0.0)

    weight = drafter.backbone.fc.weight
    theirs = torch.autograd.grad(loss_of(default), weight)[0]
    ours = torch.autograd.grad(loss_of(changed), weight)[0]
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) < 0.9999
    # D-PACE's own value says nothing: its weights grow as the drafter learns.
    judge = changed if "distance" in change else LossSettings(alpha=1.0, progress=0.5)
    before = float(loss_of(judge).detach())
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_of(changed), parameters, allow_unused=True)
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= 1e-3 * gradient / norm
        assert float(loss_of(judge)) < before
