"""Timing prompts one at a time by several ways of decoding in one process, each going first equally often.

    plain, spec = interleave([engine_decode(plain_engine), engine_decode(spec_engine)], prompts, params, repeats=3)
    plain[0].tok_per_s

One answer's speed is its output tokens over its wall time, prefill included; of several repeats the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from dspine.api import GenerationResult
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError

WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Timing:
    """One answer's tokens and how long they took; engines also tell what they did."""

    token_ids: list[int]
    elapsed_s: float
    ttft_s: float | None = None
    stats: DecodeStats | None = None


Decode = Callable[[list[int], SamplingParams], Timing]


@dataclass(frozen=True, kw_only=True)
class PromptTimings:
    """All timings of one prompt by one way of decoding, a repeat each."""

    timings: tuple[Timing, ...]

    @property
    def tok_per_s(self) -> float:
        return median(len(t.token_ids) / t.elapsed_s for t in self.timings)

    @property
    def token_ids(self) -> list[int]:
        return self.timings[0].token_ids


def engine_decode(engine: Engine) -> Decode:
    """Decode one prompt alone in an engine."""

    def decode(prompt_ids: list[int], params: SamplingParams) -> Timing:
        request = engine.submit(prompt_ids, params)
        engine.run()
        result = GenerationResult.of(request)
        return Timing(result.token_ids, result.elapsed_s, result.ttft_s, result.stats)

    return decode


def warm_up(ways: Sequence[Decode], prompt_ids: list[int], params: SamplingParams) -> None:
    """A few tokens by each way: first calls allocate, choose kernels and measure the costs of widths."""
    for decode in ways:
        decode(prompt_ids, replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))


def interleave(
    ways: Sequence[Decode],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    repeats: int,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> list[list[PromptTimings]]:
    """Time every prompt by every way, one after the other: result[way][prompt].

    Which way goes first rotates, so that no way always finds the caches or the clock of another's end.
    """
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    warm_up(ways, prompts[0], params)
    timings: list[list[list[Timing]]] = [[[] for _ in prompts] for _ in ways]
    for repeat in range(repeats):
        for number, prompt_ids in enumerate(prompts):
            for turn in range(len(ways)):
                way = (turn + number + repeat) % len(ways)
                timings[way][number].append(ways[way](prompt_ids, params))
            on_progress(1)
    return [[PromptTimings(timings=tuple(repeated)) for repeated in way_timings] for way_timings in timings]


def transformers_decode(model: Any) -> Decode:
    """transformers' own `generate` on `model`, one prompt at a time."""

    def decode(prompt_ids: list[int], params: SamplingParams) -> Timing:
        tokens = torch.tensor([prompt_ids], device=model.device)
        if params.seed is not None:
            torch.manual_seed(params.seed)
        started = time.perf_counter()
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **_generate_options(params))
        new_ids = output[0, len(prompt_ids) :].tolist()
        return Timing(new_ids, time.perf_counter() - started)

    return decode


def _generate_options(params: SamplingParams) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "repetition_penalty": params.repetition_penalty,
        "do_sample": not params.is_greedy,
        "pad_token_id": 0,
    }
    if not params.is_greedy:
        options |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        if params.min_p:
            options["min_p"] = params.min_p
    return options
