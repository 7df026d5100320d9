"""The block losses against loops over rows and tokens, in values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.modules import losses
from dspine.modules.losses import (
    DraftHead,
    LossTerm,
    VocabularyTerms,
    candidate_terms,
    position_weights,
    vocabulary_terms,
    weigh,
)

N, D, V, K = 11, 6, 29, 4


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [n, d], teacher [n, d], labels [n], head weight [v, d]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, teacher = torch.randn(2, N, D, generator=generator).unbind()
    return hidden, teacher, torch.randint(V, (N,), generator=generator), torch.randn(V, D, generator=generator)


def slow_log_softmax(logits: Tensor) -> Tensor:
    return logits - torch.log(sum(torch.exp(x) for x in logits))  # type: ignore[arg-type]


def slow_terms(
    hidden: Tensor,
    teacher: Tensor,
    labels: Tensor,
    rows: Tensor,
    softcap: float | None,
    bias: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(ce, l1), each [n]; `rows` [v', d] is the restricted head, labels are its rows."""

    def logits(h: Tensor) -> Tensor:
        x = torch.stack([h @ row for row in rows])
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    ce, l1 = [], []
    for i, (h, t, y) in enumerate(zip(hidden, teacher, labels.tolist(), strict=True)):
        added = torch.zeros(rows.shape[0]) if bias is None else torch.stack([bias[0][i] @ w for w in bias[1]])
        log_q, log_p = slow_log_softmax(logits(h) + added), slow_log_softmax(logits(t))
        ce.append(-log_q[y] if y >= 0 else log_q[0] * 0)
        l1.append(sum((log_q.exp()[v] - log_p.exp()[v].detach()).abs() for v in range(rows.shape[0])))
    return torch.stack(ce), torch.stack(l1)  # type: ignore[arg-type]


def restricted(weight: Tensor, softcap: float | None, every: int) -> tuple[DraftHead, Tensor]:
    """A head over every `every`-th token (1: all, unrestricted) and those tokens' ids."""
    ids = torch.arange(0, V, every)
    return DraftHead.of(weight, None if every == 1 else ids, softcap), ids


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("every", [1, 3])
def test_vocabulary_terms_and_their_gradients(every: int, softcap: float | None) -> None:
    hidden, teacher, tokens, weight = random_case()
    head, ids = restricted(weight, softcap, every)
    labels = head.row_of(tokens)
    hidden.requires_grad_()
    got = vocabulary_terms(hidden, teacher, labels, head, K)
    ce, l1 = slow_terms(hidden, teacher, labels, weight[ids], softcap)
    assert got.l1 is not None
    assert got.teacher_lse is not None
    torch.testing.assert_close(got.ce, ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.l1, l1, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.teacher_lse, torch.stack([head.logits(t).exp().sum().log() for t in teacher]))
    pull = torch.linspace(0.5, 2.0, N)
    fast = torch.autograd.grad((pull * (got.ce + 3 * got.l1)).sum(), hidden)[0]
    slow = torch.autograd.grad((pull * (ce + 3 * l1)).sum(), hidden)[0]
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    for row in range(N):
        logits = head.logits(hidden[row].detach()).tolist()
        assert got.top[row].tolist() == sorted(range(len(logits)), key=lambda j: -logits[j])[:K]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rows", [4, N])
def test_a_low_rank_bias_and_its_gradients(rows: int, every: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the draft's logits, not the teacher's, past the soft-cap; in chunks as in one piece."""
    hidden, teacher, tokens, weight = random_case()
    head, ids = restricted(weight, softcap, every)
    labels = head.row_of(tokens)
    generator = torch.Generator().manual_seed(1)
    states, bias = torch.randn(N, 3, generator=generator), torch.randn(ids.shape[0], 3, generator=generator)
    leaves = [x.requires_grad_() for x in (hidden, states, bias)]
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * ids.shape[0] * rows)
    got = vocabulary_terms(hidden, teacher, labels, head, K, (states, bias))
    ce, l1 = slow_terms(hidden, teacher, labels, weight[ids], softcap, (states, bias))
    assert got.l1 is not None
    torch.testing.assert_close(got.ce, ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.l1, l1, rtol=1e-5, atol=1e-5)
    logits = head.logits(hidden) + states @ bias.t()
    assert torch.equal(got.top, logits.topk(K).indices)
    assert not torch.equal(got.top, head.logits(hidden).topk(K).indices)
    pull = torch.linspace(0.5, 2.0, N)
    fast = torch.autograd.grad((pull * (got.ce + 3 * got.l1)).sum(), leaves)
    slow = torch.autograd.grad((pull * (ce + 3 * l1)).sum(), leaves)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_label_outside_the_draft_vocabulary_costs_no_cross_entropy() -> None:
    hidden, teacher, _, weight = random_case()
    head, _ = restricted(weight, None, 3)
    labels = head.row_of(torch.tensor([0, 1, 3, 28] + [2] * (N - 4)))
    assert labels.tolist() == [0, -1, 1, -1] + [-1] * (N - 4)
    terms = vocabulary_terms(hidden, teacher, labels, head, K)
    assert (terms.ce > 0).tolist() == [True, False, True] + [False] * (N - 3)
    assert terms.l1 is not None
    assert (terms.l1 > 0).all()  # the teacher has an opinion there all the same


def test_l1_of_known_distributions() -> None:
    """Uniform q against p = (1/2, 1/4, 1/4, 0...): |q - p|_1 = 1/4 + 0 + 0 + 1/4 over four tokens."""
    weight = torch.eye(4)
    teacher = torch.tensor([[0.5, 0.25, 0.25, 1e-30]]).log()
    terms = vocabulary_terms(torch.zeros(1, 4), teacher, torch.tensor([2]), DraftHead.of(weight, None), 1)
    assert terms.l1 is not None
    torch.testing.assert_close(terms.l1, torch.tensor([0.5]))
    torch.testing.assert_close(terms.ce, torch.tensor([math.log(4)]))


def test_without_a_teacher_there_is_no_l1() -> None:
    hidden, _, labels, weight = random_case()
    terms = vocabulary_terms(hidden, None, labels, DraftHead.of(weight, None), K)
    assert terms.l1 is None
    assert terms.teacher_lse is None


@pytest.mark.parametrize("rows", [1, 4, 10])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_chunks_change_nothing(rows: int, with_teacher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, teacher, labels, weight = random_case()
    head = DraftHead.of(weight, None)

    def run() -> tuple[VocabularyTerms, Tensor]:
        h = hidden.clone().requires_grad_()
        terms = vocabulary_terms(h, teacher if with_teacher else None, labels, head, K)
        loss = terms.ce.square().sum() + (0 if terms.l1 is None else terms.l1.square().sum())
        return terms, torch.autograd.grad(loss, h)[0]

    whole, gradient = run()
    calls: list[int] = []
    one_chunk = losses._terms
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * V * rows)

    def spy(*arguments: Any) -> Any:
        calls.append(arguments[0].shape[0])
        return one_chunk(*arguments)

    monkeypatch.setattr(losses, "_terms", spy)
    chunked, chunked_gradient = run()
    assert max(calls) == rows
    assert len(calls) == 2 * math.ceil(N / rows)  # each chunk once more in the backward pass
    torch.testing.assert_close(chunked.ce, whole.ce)
    torch.testing.assert_close(chunked.l1, whole.l1)
    torch.testing.assert_close(chunked.teacher_lse, whole.teacher_lse)
    assert torch.equal(chunked.top, whole.top)
    torch.testing.assert_close(chunked_gradient, gradient)


def test_candidate_terms_by_hand() -> None:
    scores = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0], [0.0, 0.0]], requires_grad=True)
    candidates = torch.tensor([[7, 9], [7, 9], [1, 2]])
    labels = torch.tensor([9, 8, 1])
    teacher = torch.tensor([[0.3, 0.1], [6e-5, 3e-5], [6e-5, 6e-5]]).log()
    terms = candidate_terms(scores, candidates, labels, teacher, torch.zeros(3))
    assert terms.l1 is not None
    assert terms.l1_gate is not None
    assert terms.ce_gate.tolist() == [1, 0, 1]
    assert terms.l1_gate.tolist() == [1, 0, 1]  # masses 0.4, 0.9e-4, 1.2e-4 against the floor 1e-4
    torch.testing.assert_close(terms.ce, torch.tensor([-math.log(0.75), 0.0, math.log(2)]))
    # Row 1: q = (1/4, 3/4), p renormalised on the candidates = (3/4, 1/4).
    torch.testing.assert_close(terms.l1, torch.tensor([1.0, 2 * (2 / 3 - 1 / 2), 0.0]))
    gradient = torch.autograd.grad(terms.ce.sum(), scores)[0]
    torch.testing.assert_close(gradient, torch.tensor([[0.25, -0.25], [0.0, 0.0], [-0.5, 0.5]]))


def test_a_label_of_minus_one_is_never_a_candidate() -> None:
    terms = candidate_terms(torch.zeros(1, 2), torch.tensor([[0, 1]]), torch.tensor([-1]), None, None)
    assert terms.ce_gate.tolist() == [0]
    assert terms.ce.tolist() == [0]
    assert terms.l1 is None
    assert terms.l1_gate is None


def test_position_weights() -> None:
    expected = [math.exp(-(t - 1) / 7) for t in range(1, 16)]
    torch.testing.assert_close(position_weights(15, 7.0), torch.tensor(expected))


def test_candidates_overlap_with_the_whole_target() -> None:
    """sum min(p, q): p is the target's own probability of a candidate, not renormalised on the candidates."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    candidates = torch.tensor([[3, 1]])
    scores = torch.log(torch.tensor([[0.7, 0.3]]))
    terms = candidate_terms(scores, candidates, torch.tensor([3]), p.log()[candidates] + 2.5, torch.tensor([2.5]))
    assert terms.overlap is not None
    assert float(terms.overlap) == pytest.approx(0.4 + 0.2)


def test_terms_of_parts_add_up_to_the_whole() -> None:
    values, weights = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)).unbind()
    whole = weigh(values, weights)
    parts = [weigh(values[part], weights[part]) for part in (slice(0, 2), slice(2, 9))]
    weight = sum(term.weight for term in parts)
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(sum(term.mean(weight) for term in parts), whole.mean())


def test_nothing_supervised_costs_nothing() -> None:
    values = torch.tensor([3.0, 4.0], requires_grad=True)
    mean = weigh(values, torch.zeros(2)).mean()
    assert mean == 0
    assert torch.autograd.grad(mean, values)[0].tolist() == [0, 0]


def test_weights_carry_no_gradient() -> None:
    term = weigh(torch.ones(2), torch.ones(2, requires_grad=True))
    assert isinstance(term, LossTerm)
    assert not term.weight.requires_grad


def test_draft_head_maps_both_ways() -> None:
    weight = torch.randn(V, D)
    ids = torch.tensor([4, 9, 28])
    head = DraftHead.of(weight, ids)
    assert torch.equal(head.weight, weight[ids])
    assert head.row_of(torch.tensor([28, 4, 5])).tolist() == [2, 0, -1]
    assert head.token_of(torch.tensor([[0, 2], [1, 1]])).tolist() == [[4, 28], [9, 9]]
    whole = DraftHead.of(weight, None)
    tokens = torch.tensor([3, 7])
    assert torch.equal(whole.row_of(tokens), tokens)
    assert torch.equal(whole.token_of(tokens), tokens)
