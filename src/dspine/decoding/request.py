"""One prompt on its way through the engine: what it asked for and what it has so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dspine.decoding.logprobs import TokenLogprobs
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.decoding.text import TextStream

FinishReason = Literal["stop", "stop_string", "length", "cancelled"]


@dataclass(eq=False)
class Request:
    """Ids, parameters and running state. `accepted[i]` says whether output token i was drafted (else the target's own)."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    text: TextStream
    max_new_tokens: int  # params' limit, cut to what the target's context holds
    output_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    seen: Tensor | None = None  # [v] tokens of prompt and output, only where a repetition penalty needs them

    def __post_init__(self) -> None:
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    def append(self, token: int, accepted: bool, eos: frozenset[int]) -> bool:
        """Add one output token; returns whether the request is finished by it."""
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.output_ids.append(token)
        self.accepted.append(accepted)
        self.stats.tokens += 1
        if self.seen is not None:
            self.seen[token] = True
        if token in eos and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            self.text.push(token)
            if self.text.stopped:
                self.finish_reason = "stop_string"
            elif self.remaining <= 0:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.finished_at = now
        return self.finish_reason is not None


@dataclass(frozen=True)
class Progress:
    """What one engine step gave a request.

    `pieces[i]` is the text that became certain with token i; it may lag behind (unfinished characters, stop strings).
    `logprobs` has one entry per token where the request asks for them, else none.
    """

    request: Request
    token_ids: list[int]
    accepted: list[bool]
    pieces: list[str]
    logprobs: list[TokenLogprobs]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __add__(self, later: Progress) -> Progress:
        """Both together, of one request."""
        return Progress(
            self.request, self.token_ids + later.token_ids, self.accepted + later.accepted,
            self.pieces + later.pieces, self.logprobs + later.logprobs,
        )  # fmt: skip


def new_request(
    number: int, prompt_ids: list[int], params: SamplingParams, tokenizer: Any, room: int, vocab_size: int
) -> Request:
    """A request whose prompt leaves `room` tokens in the target's context."""
    request = Request(number, prompt_ids, params, TextStream(tokenizer, params.stop), min(params.max_new_tokens, room))
    if params.repetition_penalty != 1.0:
        request.seen = torch.zeros(vocab_size, dtype=torch.bool)
        request.seen[torch.tensor(prompt_ids)] = True
    return request
