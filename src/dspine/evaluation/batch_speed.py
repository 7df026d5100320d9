"""Tokens per second of plain decoding of many prompts at once, against transformers' `generate` on the same batch.

measure_batch(llm, llm.target.model, prompts, max_new_tokens=160).ratio
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

import torch

from dspine.api import LLM
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.errors import UserError
from dspine.evaluation.machine import machine_facts, peak_memory_bytes


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """Plain generation of `batch` prompts at once against transformers' `generate` on the same, left-padded."""

    target: str
    batch: int
    max_new_tokens: int
    repeats: int
    tokens: int
    ratio: float
    plain_tok_per_s: float
    transformers_tok_per_s: float
    identical_share: float
    peak_memory_bytes: int | None
    machine: dict[str, str | int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_batch(
    llm: LLM,
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> BatchReport:
    """Greedy tokens per second of all prompts together; both go on to `max_new_tokens`, whatever ends an answer.

    `model` is the target's transformers model; its generation config loses its end tokens.
    """
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    engine = Engine(llm.target, None, max_rows=len(prompts))
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    short = replace(params, max_new_tokens=min(2, max_new_tokens))
    _engine_batch(engine, prompts, short)
    _transformers_batch(model, prompts, short)
    ours: list[tuple[list[list[int]], float]] = []
    theirs: list[tuple[list[list[int]], float]] = []
    for _ in range(repeats):
        ours.append(_engine_batch(engine, prompts, params))
        theirs.append(_transformers_batch(model, prompts, params))
        on_progress(1)
    tokens = sum(map(len, ours[0][0]))
    ours_s, theirs_s = median(t for _, t in ours), median(t for _, t in theirs)
    return BatchReport(
        target=llm.target.name,
        batch=len(prompts),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        tokens=tokens,
        ratio=theirs_s / ours_s,
        plain_tok_per_s=tokens / ours_s,
        transformers_tok_per_s=tokens / theirs_s,
        identical_share=mean(float(a == b) for a, b in zip(ours[0][0], theirs[0][0], strict=True)),
        peak_memory_bytes=peak_memory_bytes(),
        machine=machine_facts(llm.target.device),
    )


def _engine_batch(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], float]:
    started = time.perf_counter()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.run()
    return [request.output_ids for request in requests], time.perf_counter() - started


def _transformers_batch(model: Any, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], float]:
    from transformers import GenerationConfig

    started = time.perf_counter()
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    # A missing end token is filled in from the model's own config, so it is that which must not have one.
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=params.max_new_tokens, pad_token_id=0)
    output = model.generate(tokens, attention_mask=mask)
    return output[:, width:].tolist(), time.perf_counter() - started
