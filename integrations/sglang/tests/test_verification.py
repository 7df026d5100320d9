"""p as SGLang's own sampler makes it, and blocks verified against it: counted against exact probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dspine_sglang.verification import Cuts, accept_block, target_probabilities
from scipy.stats import chisquare
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from torch import Tensor

from dspine.decoding.sampling import SamplingParams, target_distribution
from dspine.decoding.verify import SparseQ

ALL = 1 << 30  # SGLang's top_k where there is none
VOCABULARY = 12
DRAWS = 40_000
CUTS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"top_k": 5, "top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    {"top_k": 1},
]


def cuts(
    rows: int, *, renormalise: bool = False, temperature: float = 1.0, top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0
) -> Cuts:
    return Cuts(
        temperatures=torch.full((rows,), temperature),
        top_ks=torch.full((rows,), top_k, dtype=torch.int32),
        top_ps=torch.full((rows,), top_p),
        min_ps=torch.full((rows,), min_p),
        need_top_k=top_k != ALL,
        need_top_p=top_p != 1.0,
        need_min_p=min_p > 0,
        renormalise=renormalise,
    )  # fmt: skip


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5


@pytest.mark.parametrize("given", CUTS, ids=str)
def test_p_is_what_sglang_samples_from(given: dict[str, float]) -> None:
    """Its sampler draws; ours is compared with how often."""
    row = logits(1)
    torch.manual_seed(0)
    many = cuts(DRAWS, **given)  # type: ignore[arg-type]
    probs = torch.softmax(row / many.temperatures[:1, None], -1).expand(DRAWS, -1).clone()
    drawn = top_k_top_p_min_p_sampling_from_probs_torch(
        probs, many.top_ks, many.top_ps, many.min_ps, many.need_min_p, None, torch.zeros(DRAWS)
    )
    p = target_probabilities(row, cuts(1, **given))[0]  # type: ignore[arg-type]
    fits(torch.bincount(drawn.long(), minlength=VOCABULARY), p)


@pytest.mark.parametrize("given", CUTS[:-1], ids=str)
def test_cuts_in_turn_are_those_of_transformers(given: dict[str, float]) -> None:
    rows = logits(5)
    ours = target_probabilities(rows, cuts(5, renormalise=True, **given))  # type: ignore[arg-type]
    params = {"temperature": 1.0, **given}
    torch.testing.assert_close(ours, target_distribution(rows, SamplingParams(**params)))  # type: ignore[arg-type]


def test_rows_keep_their_own_parameters() -> None:
    rows = logits(1).expand(2, -1)
    both = Cuts(
        temperatures=torch.tensor([1.0, 0.5]), top_ks=torch.tensor([1, ALL]), top_ps=torch.tensor([1.0, 0.6]),
        min_ps=torch.zeros(2), need_top_k=True, need_top_p=True, need_min_p=False,
    )  # fmt: skip
    p = target_probabilities(rows, both)
    assert p[0].max() == 1.0
    torch.testing.assert_close(p[1:], target_probabilities(rows[1:], cuts(1, temperature=0.5, top_p=0.6)))


def test_many_rows_are_cut_as_few_are() -> None:
    rows = torch.randn(150, VOCABULARY, generator=torch.Generator().manual_seed(5))
    many = replace(cuts(150, top_k=5, top_p=0.8), temperatures=torch.linspace(0.5, 1.5, 150))
    alone = [target_probabilities(rows[i : i + 1], many.of(torch.tensor([i]))) for i in range(150)]
    torch.testing.assert_close(target_probabilities(rows, many), torch.cat(alone))


@pytest.mark.parametrize("given", CUTS, ids=str)
def test_a_verified_block_follows_the_target(given: dict[str, float]) -> None:
    """First and second token of blocks of three drafted from a sparse q that is far from p. The second's distribution does not
    depend on the first here, so both are p's own slots; a slot is reached only where the one before it was accepted."""
    generator = torch.Generator().manual_seed(7)
    p_logits = logits(1, 3).expand(DRAWS, -1, -1)  # two drafted tokens
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:5] for _ in range(2)])  # [m, k]
    probs = torch.softmax(torch.randn(2, 5, generator=generator), -1)
    picked = torch.stack([torch.multinomial(row, DRAWS, True, generator=generator) for row in probs], 1)  # [n, m]
    drafted = torch.stack([ids[t][picked[:, t]] for t in range(2)], 1)
    q = SparseQ(ids.expand(DRAWS, -1, -1), probs.expand(DRAWS, -1, -1))
    accepted, following = accept_block(p_logits, drafted, q, cuts(DRAWS, **given), generator)  # type: ignore[arg-type]
    p = target_probabilities(p_logits[0], cuts(3, **given))  # type: ignore[arg-type]
    first = torch.where(accepted >= 1, drafted[:, 0], following)
    second = torch.where(accepted >= 2, drafted[:, 1], following)[accepted >= 1]
    third = following[accepted == 2]
    assert int((accepted == 1).sum()) > 0 or given == {"top_k": 1}
    for tokens, expected in ((first, p[0]), (second, p[1]), (third, p[2])):
        if tokens.numel() > 100:
            fits(torch.bincount(tokens, minlength=VOCABULARY), expected)


def test_greedy_rows_accept_by_equality_whatever_q_says() -> None:
    scores = logits(4, 3)
    best = scores.argmax(-1)
    drafted = best[:, :2].clone()
    drafted[1, 0] = (drafted[1, 0] + 1) % VOCABULARY
    drafted[2, 1] = (drafted[2, 1] + 1) % VOCABULARY
    for mass in (1.0, 0.25):  # a q of one token, and one that its other candidates share
        others = (drafted[..., None] + torch.arange(4)) % VOCABULARY
        probs = torch.tensor([mass, *[(1 - mass) / 3] * 3]).expand(4, 2, 4)
        accepted, following = accept_block(scores, drafted, SparseQ(others, probs), cuts(4, top_k=1))
        assert accepted.tolist() == [2, 0, 1, 2]
        assert following.tolist() == [best[row, n].item() for row, n in enumerate((2, 0, 1, 2))]


def test_a_wrong_p_would_be_seen() -> None:
    """The counts tell a temperature of 1.05 from 1."""
    drawn = torch.multinomial(torch.softmax(logits(1) / 1.05, -1)[0], DRAWS, True, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError):
        fits(torch.bincount(drawn, minlength=VOCABULARY), target_probabilities(logits(1), cuts(1))[0])


def fits(counts: Tensor, p: Tensor) -> None:
    """Nothing where p is 0, and a chi-square test elsewhere."""
    possible = p > 0
    assert int(counts[~possible].sum()) == 0
    if int(possible.sum()) > 1:
        expected = p[possible].double()
        result = chisquare(counts[possible].numpy(), (expected / expected.sum() * counts.sum()).numpy())
        assert result.pvalue > 1e-4, result
