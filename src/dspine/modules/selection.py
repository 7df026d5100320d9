"""From a drafter's scores to a chain of candidates: pure walks over tables, no matrix products (specification, section 6).

Shapes: b rows, m candidate slots, k candidates per slot, v draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Index [b] drawn from each row of probs [b, k] (summing to 1) by inverting its cumulative sum at uniforms [b]."""
    index = torch.searchsorted(probs.cumsum(-1), uniforms[:, None].to(probs.dtype).contiguous(), right=True)[:, 0]
    # A uniform beyond the rounded total would name no entry: the last one with any mass is meant.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)


def tempered(scores: Tensor, temperatures: Tensor) -> Tensor:
    """softmax(scores / T) in fp32 for scores [b, ..., k]; a row of T = 0 gets T = 1 (its q is never used)."""
    divisor = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    return torch.softmax(scores.float() / divisor.view(-1, *[1] * (scores.dim() - 1)), -1)


def top_probability(scores: Tensor) -> Tensor:
    """max softmax(scores) in fp32 [...] for scores [..., k]: how sure a distribution is, whatever is drawn from it."""
    return scores.float().softmax(-1).amax(-1)


def chosen_scores(first: Tensor, transitions: Tensor, index: Tensor) -> Tensor:
    """The scores [b, m, k] that `walk_transitions` chose candidates index [b, m] by: each slot's after the one before it."""
    b, m = index.shape
    rows, slots = torch.arange(b, device=index.device)[:, None], torch.arange(m - 1, device=index.device)
    return torch.cat((first[:, None], transitions[rows, slots, index[:, :-1]]), 1)


def walk_transitions(
    first: Tensor, transitions: Tensor, temperatures: Tensor, uniforms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Walk the transition cache from the anchor.

    first [b, k] scores slot 1's candidates after the anchor; transitions [b, m - 1, k, k] scores slot t + 1's candidates
    (last dim) after each candidate of slot t. Greedy: s_t = argmax_j T_t[s_{t-1}, j]; sampled: s_t ~ softmax(T_t / T).
    Returns the chosen candidates' indices [b, m] and, if any row samples, the q of every slot [b, m, k].
    """
    if uniforms is None:
        return _walk_greedy(first, transitions), None
    rows = torch.arange(first.shape[0], device=first.device)
    chosen: list[Tensor] = []
    qs: list[Tensor] = []
    scores = first
    for t in range(transitions.shape[1] + 1):
        if t:
            scores = transitions[rows, t - 1, chosen[-1]]
        q = tempered(scores, temperatures)
        chosen.append(torch.where(temperatures > 0, pick(q, uniforms[:, t]), scores.argmax(-1)))
        qs.append(q)
    return torch.stack(chosen, 1), torch.stack(qs, 1)


def _walk_greedy(first: Tensor, transitions: Tensor) -> Tensor:
    """The best successor of every candidate at once; then the walk only looks up."""
    chosen = [first.argmax(-1, keepdim=True)]
    for best in transitions.argmax(-1).unbind(1):  # [b, k]
        chosen.append(best.gather(1, chosen[-1]))
    return torch.cat(chosen, 1)


def independent_slots(logits: Tensor, temperatures: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """DFlash's choice: every slot of logits [b, m, v] on its own. Returns indices [b, m] and q [b, m, v] if any row samples."""
    index = logits.argmax(-1)
    if uniforms is None:
        return index, None
    q = tempered(logits, temperatures)
    b, m, v = q.shape
    drawn = pick(q.view(b * m, v), uniforms[:, :m].reshape(-1)).view(b, m)
    return torch.where(temperatures[:, None] > 0, drawn, index), q
