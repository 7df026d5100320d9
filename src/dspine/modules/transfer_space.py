"""The space in which draft slots tell their neighbours what they predict (specification, section 4), built from the LM head.

With e_v = E_v / |E_v|, mu their mean and G = sum_v (e_v - mu)(e_v - mu)^T = P Lambda P^T + (discarded directions):

    C_v = normalize(Lambda^{-1/2} P^T (e_v - mu)),   token code of v = sqrt(r) C_v   (root mean square 1)

Everything here is fixed by the head, so a checkpoint need not carry it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine.errors import UserError

_CHUNK = 16384  # vocabulary rows in fp32 at once


@dataclass(frozen=True)
class TransferSpace:
    """`basis` [d, r]: the eigenvectors P. `codes` [v, r]: token codes sqrt(r) C_v, fp32."""

    basis: Tensor
    codes: Tensor

    @property
    def rank(self) -> int:
        return self.codes.shape[1]


def whitening(head: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """mu [d], P [d, r] and Lambda [r] (descending) of the head's normalised rows; head is [v, d].

    Raises UserError when `rank` asks for directions that the head does not span.
    """
    v, d = head.shape
    if not 0 < rank <= d:
        raise UserError(f"transfer rank {rank} is impossible for a head of width {d}; choose 1 to {d}")
    chunks = range(0, v, _CHUNK)
    mu = torch.stack([F.normalize(head[i : i + _CHUNK].float(), dim=-1).sum(0) for i in chunks]).sum(0) / v
    gram = torch.zeros(d, d, device=head.device)
    for i in chunks:
        centred = F.normalize(head[i : i + _CHUNK].float(), dim=-1) - mu
        gram.addmm_(centred.t(), centred)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    # The sign of an eigenvector is arbitrary: fix it, so that every build gives the same codes.
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    floor = values[0] * d * torch.finfo(torch.float32).eps
    if values[-1] <= floor:
        raise UserError(
            f"transfer rank {rank} exceeds the directions this LM head spans; choose {int((values > floor).sum())} or less"
        )
    return mu, vectors, values


def build_transfer_space(head: Tensor, rank: int, whitened: bool = True) -> TransferSpace:
    """The transfer space of rank r of an LM head [v, d]; without whitening Lambda^{-1/2} is left out."""
    mu, basis, values = whitening(head, rank)
    projection = basis * values.rsqrt() if whitened else basis
    codes = torch.cat(
        [
            F.normalize((F.normalize(head[i : i + _CHUNK].float(), dim=-1) - mu) @ projection, dim=-1)
            for i in range(0, head.shape[0], _CHUNK)
        ]
    )
    return TransferSpace(basis, codes * rank**0.5)
