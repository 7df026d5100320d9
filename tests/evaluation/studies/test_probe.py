"""A probe learns what is linearly there at its rank, starts as the plain head, and is chosen by rows it is not fitted to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspine.errors import UserError
from dspine.evaluation.studies.probe import Examples, FitSettings, Probe, fit_probe, hits
from dspine.modules.losses import DraftHead

D, V, RANK = 24, 30, 4
SETTINGS = FitSettings(rank=RANK, epochs=60, batch_rows=64, learning_rate=1e-2)


def planted(count: int, seed: int, head: DraftHead) -> Examples:
    """States whose token the head reads after a fixed low-rank map and shift: what a probe of that rank can learn exactly."""
    fixed = torch.Generator().manual_seed(99)
    u, v = torch.randn(D, RANK, generator=fixed), torch.randn(RANK, D, generator=fixed)
    shift = torch.randn(D, generator=fixed)
    states = 5 * torch.randn(count, D, generator=torch.Generator().manual_seed(seed))
    normed = F.rms_norm(states, (D,))
    return Examples(states, head.logits(normed + normed @ v.t() @ u.t() + shift).argmax(-1))


@pytest.fixture(scope="module")
def head() -> DraftHead:
    return DraftHead(torch.randn(V, D, generator=torch.Generator().manual_seed(1)))


def accuracy(probe: Probe, examples: Examples, head: DraftHead) -> float:
    return float(hits(probe, examples, head).float().mean())


def test_a_planted_linear_readout_is_found(head: DraftHead) -> None:
    fit, selection, test = (planted(count, seed, head) for count, seed in ((2000, 2), (300, 3), (500, 4)))
    fitted = fit_probe(fit, selection, head, SETTINGS)
    assert accuracy(Probe(D, RANK), test, head) < 0.4
    assert accuracy(fitted.probe, test, head) > 0.9
    assert fitted.epoch > 1
    assert fitted.selection_accuracy == pytest.approx(accuracy(fitted.probe, selection, head))


def test_labels_that_are_not_in_the_states_are_not_learned(head: DraftHead) -> None:
    fit, selection = planted(2000, 2, head), planted(300, 3, head)
    shuffled = Examples(fit.states, fit.labels[torch.randperm(2000, generator=torch.Generator().manual_seed(5))])
    fitted = fit_probe(shuffled, selection, head, FitSettings(rank=RANK, epochs=3, batch_rows=64))
    assert fitted.selection_accuracy < 0.5


def test_a_probe_starts_as_the_head_on_the_normed_state(head: DraftHead) -> None:
    states = 7 * torch.randn(50, D)
    labels = (F.normalize(states, dim=-1) @ head.weight.t()).argmax(-1)
    assert hits(Probe(D, RANK), Examples(states, labels), head).all()


def test_the_best_epoch_wins_even_the_start(head: DraftHead) -> None:
    states = torch.randn(100, D)
    right = head.logits(F.rms_norm(states, (D,))).argmax(-1)
    wrong = Examples(states, (right + 1) % V)
    fitted = fit_probe(wrong, Examples(states, right), head, FitSettings(rank=RANK, epochs=3, batch_rows=10, learning_rate=0.1))
    assert (fitted.epoch, fitted.selection_accuracy) == (0, 1.0)
    assert accuracy(fitted.probe, Examples(states, right), head) == 1.0


def test_tokens_that_cannot_be_drafted_teach_nothing_and_count_as_wrong(head: DraftHead) -> None:
    fit, selection = planted(300, 2, head), planted(100, 3, head)

    def without(examples: Examples, every: int) -> Examples:
        labels = examples.labels.clone()
        labels[::every] = -1
        return Examples(examples.states, labels)

    few = FitSettings(rank=RANK, epochs=2, batch_rows=1000)
    kept = torch.arange(300) % 3 != 0
    ours = fit_probe(without(fit, 3), selection, head, few).probe
    theirs = fit_probe(Examples(fit.states[kept], fit.labels[kept]), selection, head, few).probe
    torch.testing.assert_close(ours.up.weight, theirs.up.weight)
    assert not hits(ours, without(selection, 2), head)[::2].any()


def test_the_same_seed_fits_the_same_probe(head: DraftHead) -> None:
    fit, selection = planted(200, 2, head), planted(100, 3, head)

    def weights(seed: int) -> Tensor:
        return fit_probe(fit, selection, head, FitSettings(rank=RANK, epochs=1, batch_rows=32, seed=seed)).probe.down.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_impossible_settings() -> None:
    with pytest.raises(UserError, match="rank = 0: fitting a probe needs at least 1"):
        FitSettings(rank=0)
    with pytest.raises(UserError, match="selection answers = 0"):
        FitSettings(selection_answers=0)
