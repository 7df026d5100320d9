"""From the target's logits to each request's next tokens, under the request's own parameters.

Shapes: n rows, w slots of a round (anchor first), m = w - 1 drafted tokens, v vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspine.decoding.request import Request
from dspine.decoding.sampling import penalise, sample, target_distribution
from dspine.decoding.verify import SparseQ, Verdict, verify_greedy, verify_sampled
from dspine.drafters.base import Draft


def first_token(request: Request, logits: Tensor) -> int:
    """The answer's first token from the logits [1, v] of the prompt's last one."""
    if request.seen is not None:
        nothing = logits.new_zeros(0, dtype=torch.long)
        logits = penalise(logits, request.seen.to(logits.device), nothing, request.params.repetition_penalty)
    if request.params.is_greedy:
        return int(logits.argmax(-1))
    return int(sample(target_distribution(logits, request.params), request.generator))


def judge(requests: Sequence[Request], logits: Tensor, draft: Draft | None) -> list[Verdict]:
    """How much of each row's draft stands and what comes after it, for logits [n, w, v]."""
    best: list[list[int]] = logits.argmax(-1).tolist()  # of all rows at once: greedy ones need nothing else
    m = logits.shape[1] - 1
    drafted: list[list[int]] = [[] for _ in requests] if draft is None else draft.tokens.tolist()
    verdicts = []
    for row, request in enumerate(requests):
        if request.params.is_greedy and request.seen is None:
            verdicts.append(verify_greedy(best[row], drafted[row]))
            continue
        own = torch.tensor(drafted[row], dtype=torch.long, device=logits.device)
        scores = logits[row]
        if request.seen is not None:
            scores = penalise(scores, request.seen.to(scores.device), own, request.params.repetition_penalty)
        if request.params.is_greedy:
            verdicts.append(verify_greedy(scores.argmax(-1).tolist(), drafted[row]))
            continue
        p = target_distribution(scores, request.params)
        verdicts.append(verify_sampled(p, own, _row_q(draft, row, m, p), request.generator))
    return verdicts


def _row_q(draft: Draft | None, row: int, m: int, p: Tensor) -> SparseQ:
    if draft is None or draft.q_ids is None or draft.q_probs is None:
        assert m == 0, "a sampled row needs its drafter's q"
        return SparseQ(p.new_zeros(0, 1, dtype=torch.long), p.new_zeros(0, 1))
    return SparseQ(draft.q_ids[row], draft.q_probs[row])


def draft_randomness(requests: Sequence[Request], num_draft_tokens: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Each request's temperature for drafting (0 = greedy) [n] and, if any of them samples, its uniforms [n, m]."""
    sampled = [not r.params.is_greedy for r in requests]
    temperatures = torch.tensor(
        [r.params.temperature if s else 0.0 for r, s in zip(requests, sampled, strict=True)], device=device
    )
    if not any(sampled):
        return temperatures, None
    draws = [
        torch.rand(num_draft_tokens, generator=r.generator) if s else torch.zeros(num_draft_tokens)
        for r, s in zip(requests, sampled, strict=True)
    ]
    return temperatures, torch.stack(draws).to(device)
