"""Verification by hand-made cases, and its exactness: the joint distribution of the first two tokens, by chi-square.

A toy target (order-2 Markov, 6 tokens) is speculated on by toy drafters, 1.5 million times per case, and the
counts of the 36 pairs are held against exact enumeration through transformers' own logits processors. The same test
at the same sample size must reject verifiers that are wrong by one per cent, or in one classical way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspine.decoding import verify
from dspine.decoding.sampling import SamplingParams, draw, penalise, target_distribution, uniforms
from dspine.decoding.verify import SparseQ, Verdict, verify_greedy, verify_rows, verify_sampled

BELOW_ONE = 1 - 2**-53


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_case(b: int, m: int, k: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor, SparseQ]:
    """p [b, m + 1, v], candidates drawn from a sparse q [b, m, k], and that q."""
    g = generator(seed)
    p = (torch.randn(b, m + 1, v, generator=g) * 2).softmax(-1)
    ids = torch.rand(b, m, v, generator=g).argsort(-1)[..., :k]
    probs = torch.randn(b, m, k, generator=g).softmax(-1)
    chosen = draw(probs.reshape(-1, k), uniforms(b * m, g)).reshape(b, m, 1)
    return p, ids.gather(-1, chosen).squeeze(-1), SparseQ(ids, probs)


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafted", "verdict"),
    [
        ([7], [], Verdict([7])),
        ([7, 8], [7], Verdict([7, 8])),
        ([7, 8], [6], Verdict([7])),
        ([1, 2, 3, 4], [1, 2, 3], Verdict([1, 2, 3, 4])),
        ([1, 2, 3, 4], [1, 9, 3], Verdict([1, 2])),
        ([1, 2, 3, 4], [9, 2, 3], Verdict([1])),
    ],
)
def test_greedy_cases(target: list[int], drafted: list[int], verdict: Verdict) -> None:
    assert verify_greedy(target, drafted) == verdict


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_greedy_emits_the_targets_own_tokens(target: list[int], data: st.DataObject) -> None:
    drafted = data.draw(st.lists(st.integers(0, 2), min_size=len(target) - 1, max_size=len(target) - 1))
    verdict = verify_greedy(target, drafted)
    emitted = verdict.tokens
    assert verdict.num_accepted == len(emitted) - 1
    assert emitted == target[: len(emitted)]
    assert len(emitted) == len(target) or drafted[len(emitted) - 1] != target[len(emitted) - 1]


def test_greedy_checks_the_number_of_target_tokens() -> None:
    with pytest.raises(AssertionError, match="2 drafted tokens need 3 target tokens"):
        verify_greedy([1, 2], [1, 2])


# --- sampled, case by case --------------------------------------------------------------------------------------------


def test_acceptance_is_decided_at_p_over_q() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]).double().expand(4, 2, 3)
    q = SparseQ(torch.tensor([[[1, 0]]]).expand(4, 1, 2), torch.tensor([[[0.2, 0.8]]]).double().expand(4, 1, 2))
    drafted = torch.tensor([[0], [0], [1], [1]])
    uniform = torch.tensor([[0.2499, 0.15], [0.2501, 0.15], [BELOW_ONE, 0.0], [0.0, 0.3]], dtype=torch.float64)
    num_accepted, next_token = verify_rows(p, drafted, q, uniform)
    assert num_accepted.tolist() == [1, 0, 1, 1]  # token 0 has p / q = 0.25, token 1 has 2.5
    # Bonus from p's last slot; the refused row: max(p - q, 0) = (0, 0.3, 0.3).
    assert next_token.tolist() == [1, 1, 0, 2]


def test_the_correction_may_be_any_token_and_never_one_that_q_covers() -> None:
    p = torch.tensor([[0.1, 0.1, 0.4, 0.4], [1.0, 0, 0, 0]]).expand(101, 2, 4)
    q = SparseQ(torch.tensor([[[0, 1]]]).expand(101, 1, 2), torch.tensor([[[0.5, 0.5]]]).expand(101, 1, 2))
    uniform = torch.stack([torch.full((101,), 0.9), torch.linspace(0, 0.999, 101)], -1).double()
    num_accepted, next_token = verify_rows(p, torch.zeros(101, 1, dtype=torch.long), q, uniform)
    assert num_accepted.tolist() == [0] * 101
    assert set(next_token.tolist()) == {2, 3}


def test_a_token_the_target_excludes_is_never_accepted() -> None:
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    q = SparseQ(torch.tensor([[[0]]]), torch.tensor([[[1.0]]]))
    num_accepted, next_token = verify_rows(p, torch.tensor([[0]]), q, torch.zeros(1, 2, dtype=torch.float64))
    assert (num_accepted.item(), next_token.item()) == (0, 1)


def test_a_refusal_hides_what_was_drafted_behind_it() -> None:
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    q = SparseQ(torch.zeros(1, 2, 1, dtype=torch.long), torch.ones(1, 2, 1))
    uniform = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)
    assert verify_rows(p, torch.zeros(1, 2, dtype=torch.long), q, uniform)[0].item() == 0


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    p, _, _ = random_case(50, 4, 1, 30)
    drafted = draw(p[:, :4].reshape(-1, 30), uniforms(200, generator(1))).reshape(50, 4)
    uniform = torch.full((50, 5), BELOW_ONE, dtype=torch.float64)
    assert verify_rows(p, drafted, SparseQ.from_dense(p[:, :4]), uniform)[0].tolist() == [4] * 50


def test_without_candidates_it_is_plain_sampling() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    none = SparseQ(torch.empty(0, 4, dtype=torch.long), torch.empty(0, 4))
    no_tokens = torch.empty(0, dtype=torch.long)
    tokens = [verify_sampled(p, no_tokens, none, generator(seed)) for seed in range(40)]
    assert tokens == [Verdict([int(draw(p, uniforms(1, generator(seed))))]) for seed in range(40)]
    assert {t.tokens[0] for t in tokens} == {0, 1, 2}


@given(m=st.integers(0, 6), k=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_one_row_equals_the_same_row_in_a_batch(m: int, k: int, seed: int) -> None:
    p, drafted, q = random_case(3, m, k, 9, seed)
    uniform = torch.stack([uniforms(m + 1, generator(seed + row)) for row in range(3)])
    num_accepted, next_token = verify_rows(p, drafted, q, uniform)
    for row in range(3):
        one, after = generator(seed + row), generator(seed + row)
        verdict = verify_sampled(p[row], drafted[row], SparseQ(q.ids[row], q.probs[row]), one)
        assert verdict == Verdict([*drafted[row, : int(num_accepted[row])].tolist(), int(next_token[row])])
        uniforms(m + 1, after)
        assert torch.equal(one.get_state(), after.get_state()), "the count of draws must not depend on the outcome"


@given(m=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_sparse_q_equals_its_dense_form(m: int, seed: int) -> None:
    p, drafted, q = random_case(4, m, 3, 9, seed)
    dense = SparseQ.from_dense(torch.zeros(4, m, 9).scatter_(-1, q.ids, q.probs))
    uniform = uniforms(4 * (m + 1), generator(seed)).view(4, m + 1)
    sparse_verdict, dense_verdict = verify_rows(p, drafted, q, uniform), verify_rows(p, drafted, dense, uniform)
    assert torch.equal(q.of(drafted), dense.of(drafted))
    assert torch.equal(sparse_verdict[0], dense_verdict[0])
    assert torch.equal(sparse_verdict[1], dense_verdict[1])


def test_inputs_are_left_alone() -> None:
    p, drafted, q = random_case(5, 3, 4, 9)
    before = p.clone(), q.probs.clone()
    verify_rows(p, drafted, q, torch.full((5, 4), 0.9, dtype=torch.float64))
    assert torch.equal(p, before[0])
    assert torch.equal(q.probs, before[1])


def test_residual_falls_back_to_p_where_rounding_leaves_nothing() -> None:
    p = torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    got = verify.residual(p, torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.25 + 1e-7, 0.75], [0.5, 0.5]]))
    assert got.tolist() == [[0.25, 0.75], [0.0, 0.25]]


def test_a_candidate_outside_its_own_q_is_a_bug_of_the_caller() -> None:
    p, _, q = random_case(1, 1, 2, 9)
    outside = next(x for x in range(9) if x not in q.ids.flatten().tolist())
    with pytest.raises(AssertionError, match="outside its own draft distribution"):
        verify_rows(p, torch.tensor([[outside]]), q, torch.zeros(1, 2, dtype=torch.float64))


def test_shapes_that_do_not_fit_are_refused() -> None:
    p, drafted, q = random_case(1, 2, 2, 9)
    with pytest.raises(AssertionError, match="2 drafted tokens need p at 3 slots, not 2"):
        verify_rows(p[:, :2], drafted, q, torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="one uniform per slot"):
        verify_rows(p, drafted, q, torch.zeros(1, 2, dtype=torch.float64))


# --- exactness --------------------------------------------------------------------------------------------------------

V = 6
PROMPT = (4, 2)  # the last token is the anchor
TRIALS = 1_500_000  # per case, over both block lengths
CHUNK = 125_000
# A drafter that resembles its target but is surer of itself, as trained ones are: q > p where most of the mass lies.
SHARED = torch.randn(V, V, generator=generator(11)) * 1.2
TARGET = SHARED + torch.randn(V, V, V, generator=generator(12)) * 0.6  # logits after the last two tokens
DRAFTER = SHARED * 1.6 + torch.randn(V, V, generator=generator(13)) * 0.4  # logits after the last token


def _drafters() -> dict[str, SparseQ]:
    """q after each previous token: ids and probs [v, k]."""
    top = DRAFTER.topk(3, -1)
    return {
        "independent": SparseQ.from_dense(DRAFTER[0].softmax(-1).expand(V, V)),
        "dependent": SparseQ.from_dense(DRAFTER.softmax(-1)),
        "sparse": SparseQ(top.indices, top.values.softmax(-1)),
        "one-hot": SparseQ(top.indices[:, :1], torch.ones(V, 1)),
    }


DRAFTERS = _drafters()
Penalise = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def exact_joint(params: SamplingParams) -> np.ndarray:
    """P(first token, second token) [v * v] of plain sampling, through transformers' processors, one context at a time."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    chain.append(TopPLogitsWarper(params.top_p))
    chain.append(MinPLogitsWarper(params.min_p))

    def p(context: tuple[int, ...]) -> Tensor:
        return chain(torch.tensor([context]), TARGET[context[-2], context[-1]].double()[None]).softmax(-1)[0]

    return torch.stack([p(PROMPT)[x] * p((*PROMPT, x)) for x in range(V)]).flatten().numpy()


def target_tables(context: tuple[int, ...], m: int, params: SamplingParams, penalty: Penalise) -> Tensor:
    """p at every slot for every possible block of m candidates: [v ** m, m + 1, v], as the engine would compute it."""
    seen = torch.zeros(V, dtype=torch.bool)
    seen[list(context)] = True
    tables = []
    for path in itertools.product(range(V), repeat=m):
        text = (*context, *path)
        logits = torch.stack([TARGET[text[i - 2], text[i - 1]] for i in range(len(context), len(text) + 1)])
        logits = penalty(logits, seen, torch.tensor(path, dtype=torch.long), params.repetition_penalty)
        tables.append(target_distribution(logits, params))
    return torch.stack(tables)


def speculate(tables: Tensor, anchor: Tensor, m: int, q: SparseQ, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One round of many independent rows: tables [contexts, v ** m, m + 1, v], anchor [b] -> drafted, accepted, next.

    The context of a row is its anchor's, or the only one.
    """
    previous, drafted, rows = anchor, [], []
    for _ in range(m):
        chosen = draw(q.probs[previous], uniforms(anchor.numel(), g))
        rows.append(SparseQ(q.ids[previous], q.probs[previous]))
        previous = q.ids[previous, chosen]
        drafted.append(previous)
    tokens = torch.stack(drafted, -1)
    path = (tokens * V ** torch.arange(m - 1, -1, -1)).sum(-1)
    block_q = SparseQ(torch.stack([r.ids for r in rows], 1), torch.stack([r.probs for r in rows], 1))
    p = tables[anchor if len(tables) > 1 else torch.zeros_like(anchor), path]
    num_accepted, next_token = verify.verify_rows(p, tokens, block_q, uniforms(p.shape[0] * (m + 1), g).view(-1, m + 1))
    return tokens, num_accepted, next_token


def first_two(params: SamplingParams, q: SparseQ, m: int, trials: int, g: torch.Generator, penalty: Penalise) -> Tensor:
    """Counts [v * v] of the first two tokens; a second round runs where the first one gave a single token."""
    first_round = target_tables(PROMPT, m, params, penalty)[None]
    second_round = torch.stack([target_tables((*PROMPT, x), 1, params, penalty) for x in range(V)])
    counts = torch.zeros(V * V, dtype=torch.long)
    for start in range(0, trials, CHUNK):
        anchor = torch.full((min(CHUNK, trials - start),), PROMPT[-1])
        tokens, accepted, correction = speculate(first_round, anchor, m, q, g)
        emitted = torch.cat([tokens, correction[:, None]], -1)
        emitted = emitted.scatter(-1, accepted[:, None], correction[:, None])[:, :2]
        single = accepted == 0
        tokens, accepted, correction = speculate(second_round, emitted[single, 0], 1, q, g)
        emitted[single, 1] = torch.where(accepted > 0, tokens[:, 0], correction)
        counts += torch.bincount(emitted[:, 0] * V + emitted[:, 1], minlength=V * V)
    return counts


def p_value(seed: int, drafter: str, penalty: Penalise = penalise, **kwargs: Any) -> float:
    """Of the chi-square test of speculation against enumeration; 0 where something impossible was emitted.

    Half the trials draft one token (the second one emitted may then be a bonus), half draft two.
    """
    params = SamplingParams(**{"temperature": 1.0, **kwargs})
    g = generator(seed)
    counts = sum(first_two(params, DRAFTERS[drafter], m, TRIALS // 2, g, penalty) for m in (1, 2))
    observed, expected = np.asarray(counts), exact_joint(params)
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    expected = expected[possible] / expected[possible].sum() * observed.sum()
    assert expected.min() > 5, "too few trials for a chi-square test of the rarest pair"
    return float(chisquare(observed[possible], expected).pvalue)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dependent", {"temperature": 0.7}),
    ("independent", {"temperature": 1.3}),
    ("sparse", {"temperature": 1.3}),
    ("one-hot", {"temperature": 1.0}),
    ("sparse", {"top_k": 4}),
    ("dependent", {"top_p": 0.85}),
    ("sparse", {"min_p": 0.12}),
    ("dependent", {"repetition_penalty": 1.8}),
    ("sparse", {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "min_p": 0.03, "repetition_penalty": 1.3}),
]
each_case = pytest.mark.parametrize(("drafter", "kwargs"), CASES, ids=str)
BROKEN = 1e-6  # a wrong verifier must fall below this ...
SOUND = 1e-3  # ... and a right one stay above this (seeds are fixed: neither depends on luck)


@each_case
def test_first_two_tokens_follow_the_target(drafter: str, kwargs: dict[str, Any]) -> None:
    assert p_value(1, drafter, **kwargs) > SOUND


@each_case
def test_one_per_cent_too_many_acceptances_would_be_caught(
    monkeypatch: pytest.MonkeyPatch, drafter: str, kwargs: dict[str, Any]
) -> None:
    sound = verify.acceptance
    monkeypatch.setattr(verify, "acceptance", lambda p, q: (sound(p, q) * 1.01).clamp(max=1.0))
    assert p_value(1, drafter, **kwargs) < BROKEN


def _one_per_cent_too_few(p: Tensor, q: Tensor) -> Tensor:
    return (p / q).clamp(max=1.0) * 0.99


def _residual_is_p(p: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return p


def _residual_among_the_candidates_only(p: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    left = p.scatter_add(-1, ids, -probs).clamp(min=0.0)
    among = left * torch.zeros_like(p).scatter(-1, ids, 1.0)
    refused = probs.sum(-1, keepdim=True) > 0
    return torch.where(refused & (among.sum(-1, keepdim=True) > 0), among, left)


def _residual_without_the_clamp(p: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return p.scatter_add(-1, ids, -probs).abs()


def _one_number_for_two_decisions(p: Tensor, drafted: Tensor, q: SparseQ, uniform: Tensor) -> tuple[Tensor, Tensor]:
    return verify_rows(p, drafted, q, torch.cat([uniform[:, :-1], uniform[:, :1]], -1))


def _bonus_from_the_last_candidates_slot(p: Tensor, drafted: Tensor, q: SparseQ, uniform: Tensor) -> tuple[Tensor, Tensor]:
    return verify_rows(torch.cat([p[:, :-1], p[:, -2:-1]], 1), drafted, q, uniform)


def _q_of_another_temperature(p: Tensor, drafted: Tensor, q: SparseQ, uniform: Tensor) -> tuple[Tensor, Tensor]:
    probs = q.probs**0.98
    return verify_rows(p, drafted, SparseQ(q.ids, probs / probs.sum(-1, keepdim=True)), uniform)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("acceptance", _one_per_cent_too_few),
        ("residual", _residual_is_p),
        ("residual", _residual_among_the_candidates_only),
        ("residual", _residual_without_the_clamp),
        ("verify_rows", _one_number_for_two_decisions),
        ("verify_rows", _bonus_from_the_last_candidates_slot),
        ("verify_rows", _q_of_another_temperature),
    ],
)
def test_classical_mistakes_would_be_caught(monkeypatch: pytest.MonkeyPatch, name: str, replacement: Callable[..., Any]) -> None:
    monkeypatch.setattr(verify, name, replacement)
    assert p_value(1, "sparse", temperature=1.3) < BROKEN


def _penalty_without_the_drafted_prefix(logits: Tensor, seen: Tensor, drafted: Tensor, penalty: float) -> Tensor:
    return torch.cat([penalise(row[None], seen, drafted[:0], penalty) for row in logits])


def _penalty_with_the_whole_block(logits: Tensor, seen: Tensor, drafted: Tensor, penalty: float) -> Tensor:
    return _penalty_without_the_drafted_prefix(logits, seen.scatter(0, drafted, True), drafted, penalty)


@pytest.mark.parametrize("penalty", [_penalty_without_the_drafted_prefix, _penalty_with_the_whole_block])
def test_a_penalty_that_looks_at_the_wrong_prefix_would_be_caught(penalty: Penalise) -> None:
    assert p_value(1, "dependent", penalty, repetition_penalty=1.1) < BROKEN
    assert p_value(1, "dependent", penalise, repetition_penalty=1.1) > SOUND
