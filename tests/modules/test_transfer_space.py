"""The transfer space against its definition, row by row in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspine.errors import UserError
from dspine.modules import transfer_space
from dspine.modules.transfer_space import build_transfer_space, whitening


def random_head(v: int = 61, d: int = 12, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.linspace(0.2, 2.0, d)  # a spectrum, as real heads have
    return torch.randn(v, d, generator=generator) * scales + 0.3


def slow_codes(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(codes before normalisation, token codes), both [v, r], by the definition."""
    rows = [row.double() / row.double().norm() for row in head]
    mu = torch.stack(rows).mean(0)
    gram = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    for e in rows:
        gram += torch.outer(e - mu, e - mu)
    values, vectors = torch.linalg.eigh(gram)
    order = values.argsort(descending=True)[:rank]
    plain = [torch.stack([(vectors[:, j] @ (e - mu)) / values[j].sqrt() for j in order]) for e in rows]
    return torch.stack(plain), torch.stack([rank**0.5 * c / c.norm() for c in plain])


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("chunk", [7, 16384])
def test_codes_follow_the_definition(rank: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_space, "_CHUNK", chunk)
    head = random_head()
    space = build_transfer_space(head, rank)
    _, expected = slow_codes(head, rank)
    # Each coordinate is fixed up to a sign, common to all tokens.
    signs = (space.codes.double() * expected).sum(0).sign()
    torch.testing.assert_close(space.codes.double(), expected * signs, rtol=0, atol=1e-4)
    assert space.rank == rank


def test_codes_have_root_mean_square_one() -> None:
    codes = build_transfer_space(random_head(), 6).codes
    torch.testing.assert_close(codes.norm(dim=-1), torch.full((61,), 6**0.5))


def test_codes_without_whitening_keep_the_heads_spectrum() -> None:
    head = random_head()
    mu, basis, _ = whitening(head, 5)
    codes = build_transfer_space(head, 5, whitened=False).codes
    for code, row in zip(codes, head, strict=True):
        plain = basis.t() @ (row / row.norm() - mu)
        torch.testing.assert_close(code, 5**0.5 * plain / plain.norm(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(codes, build_transfer_space(head, 5).codes, atol=0.05)


@pytest.mark.parametrize("rank", [3, 12])
def test_whitened_outer_products_sum_to_the_identity(rank: int) -> None:
    head = random_head()
    mu, basis, values = whitening(head, rank)
    total = torch.zeros(rank, rank)
    for row in head:
        code = (basis.t() @ (row / row.norm() - mu)) / values.sqrt()
        total += torch.outer(code, code)
    torch.testing.assert_close(total, torch.eye(rank), rtol=0, atol=1e-4)


def test_basis_is_orthonormal_and_eigenvalues_descend() -> None:
    _, basis, values = whitening(random_head(), 8)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(8), rtol=0, atol=1e-5)
    assert (values[:-1] >= values[1:]).all()
    assert (values > 0).all()


def test_row_lengths_do_not_matter() -> None:
    head = random_head()
    lengths = torch.linspace(0.1, 9.0, head.shape[0])[:, None]
    torch.testing.assert_close(
        build_transfer_space(head, 5).codes, build_transfer_space(head * lengths, 5).codes, rtol=0, atol=1e-3
    )


def test_signs_are_fixed() -> None:
    """Every eigenvector's largest entry is positive, so that a rebuilt space is the one that was trained with."""
    basis = build_transfer_space(random_head(), 9).basis
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()


def test_half_precision_head_gives_fp32_codes() -> None:
    head = random_head().to(torch.bfloat16)
    space = build_transfer_space(head, 4)
    assert space.codes.dtype == space.basis.dtype == torch.float32
    torch.testing.assert_close(space.codes, build_transfer_space(head.float(), 4).codes)


def test_an_unused_all_zero_row_stays_finite() -> None:
    head = random_head()
    head[5] = 0
    assert torch.isfinite(build_transfer_space(head, 5).codes).all()


@pytest.mark.parametrize("rank", [0, -1, 13])
def test_impossible_rank(rank: int) -> None:
    with pytest.raises(UserError, match=rf"transfer rank {rank} .*width 12; choose 1 to 12"):
        build_transfer_space(random_head(), rank)


def test_rank_beyond_the_heads_span() -> None:
    head = random_head()
    head[:, 9:] = 0
    with pytest.raises(UserError, match=r"transfer rank 10 exceeds .* choose 9 or less"):
        build_transfer_space(head, 10)
    build_transfer_space(head, 9)
