"""Log-probabilities of output tokens, from the logits that verification has computed anyway.

They are the target's own: log softmax of its logits, before penalty, temperature and truncation, so that they say the
same about a token whether it was drafted, corrected or decoded plainly. Rows that do not ask cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_ALTERNATIVES = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """ln p of one output token, and the likeliest tokens at its place as (token, ln p), most likely first."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: list[int], num_alternatives: int) -> list[TokenLogprobs]:
    """One entry per token: logits [n, v] of the n slots whose next tokens are `tokens` [n]."""
    scores = logits[: len(tokens)].float().log_softmax(-1)
    chosen = scores.gather(-1, scores.new_tensor(tokens).long()[:, None]).squeeze(-1).tolist()
    values, ids = scores.topk(min(num_alternatives, scores.shape[-1]), dim=-1)
    alternatives = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, (row_ids, row_values) in zip(chosen, alternatives, strict=True)
    ]
