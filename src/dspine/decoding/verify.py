"""Accept or refuse drafted tokens so that the output follows the target exactly. Pure functions on p and q.

    verdict = verify_sampled(p, drafted, q, generator)
    new_tokens = verdict.tokens

Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, theorem 1): a
candidate x ~ q is accepted with min(1, p(x) / q(x)); after the first refusal one token is drawn from
normalize(max(p - q, 0)) over the WHOLE vocabulary; after none, from p at the last slot. Exact for every q that the
candidates were really drawn from. Shapes: b rows, m drafted tokens, k candidates, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspine.decoding.sampling import draw, uniforms


@dataclass(frozen=True)
class Verdict:
    """A row's new `tokens`: the drafted ones that stand, then the target's correction, or its bonus if all stand."""

    tokens: list[int]

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True, eq=False)
class SparseQ:
    """The drafter's distribution at each slot: `probs` on `ids` (both [..., m, k], ids distinct in a slot), else 0."""

    ids: Tensor
    probs: Tensor

    @classmethod
    def from_dense(cls, probs: Tensor) -> SparseQ:
        """q over the whole vocabulary: probs [..., m, v]."""
        return cls(torch.arange(probs.shape[-1], device=probs.device).expand(probs.shape), probs)

    def of(self, tokens: Tensor) -> Tensor:
        """q(x) of one token per slot: [..., m] -> [..., m]."""
        return (self.probs * (self.ids == tokens[..., None])).sum(-1)


def verify_greedy(target_tokens: list[int], drafted: list[int]) -> Verdict:
    """Accept while a candidate is the target's argmax: target_tokens [m + 1] (argmax p at every slot), drafted [m]."""
    m = len(drafted)
    assert len(target_tokens) == m + 1, f"{m} drafted tokens need {m + 1} target tokens"
    accepted = 0
    while accepted < m and drafted[accepted] == target_tokens[accepted]:
        accepted += 1
    return Verdict(target_tokens[: accepted + 1])


def verify_sampled(p: Tensor, drafted: Tensor, q: SparseQ, generator: torch.Generator) -> Verdict:
    """Speculative sampling of one row: p [m + 1, v], drafted [m], q [m, k].

    Takes exactly m + 1 numbers from `generator`, whatever is accepted. m = 0 is plain sampling from p.
    """
    rows = SparseQ(q.ids[None], q.probs[None])
    num_accepted, next_token = verify_rows(p[None], drafted[None], rows, uniforms(p.shape[0], generator)[None])
    return Verdict([*drafted[: int(num_accepted)].tolist(), int(next_token)])


def verify_rows(p: Tensor, drafted: Tensor, q: SparseQ, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`verify_sampled` of b rows as a pure function: p [b, m + 1, v], drafted [b, m], q [b, m, k], uniform [b, m + 1].

    uniform[:, t] decides on candidate t, uniform[:, m] picks the next token. Returns num_accepted [b], next_token [b].
    """
    m = drafted.shape[1]
    assert p.shape[1] == m + 1, f"{m} drafted tokens need p at {m + 1} slots, not {p.shape[1]}"
    assert uniform.shape == p.shape[:2], f"one uniform per slot: {tuple(p.shape[:2])}, not {tuple(uniform.shape)}"
    if m == 0:
        return torch.zeros(p.shape[0], dtype=torch.long, device=p.device), draw(p[:, 0], uniform[:, 0])
    uniform = uniform.to(p.device)
    p_drafted = p[:, :m].gather(-1, drafted[..., None]).squeeze(-1)
    accepted = uniform[:, :m] < acceptance(p_drafted, q.of(drafted))
    num_accepted = accepted.long().cumprod(-1).sum(-1)

    row = torch.arange(p.shape[0], device=p.device)
    slot = num_accepted.clamp(max=m - 1)  # of the refusal; rows without one are set aside by `refused`
    refused = num_accepted < m
    weights = residual(p[row, num_accepted], q.ids[row, slot], q.probs[row, slot] * refused[:, None])
    return num_accepted, draw(weights, uniform[:, m])


def acceptance(p_drafted: Tensor, q_drafted: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of drafted tokens. q(x) = 0 means that x was not drawn from q: no rule can make that exact."""
    assert bool((q_drafted > 0).all()), "a drafted token lies outside its own draft distribution"
    return (p_drafted / q_drafted).clamp(max=1.0)


def residual(p: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """max(p - q, 0), not normalised: p [b, v], q as ids and probs [b, k] -> [b, v].

    Mathematically positive somewhere after any refusal; where rounding leaves nothing (p = q to the last bits), p is
    the limit and is returned instead.
    """
    left = p.scatter_add(-1, ids, -probs.to(p.dtype)).clamp_(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
