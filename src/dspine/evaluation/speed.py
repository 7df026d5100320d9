"""Tokens per second of plain and speculative decoding (and of transformers), interleaved in one process.

    report = measure_speed(llm, prompts, SamplingParams(max_new_tokens=160), repeats=3)
    report.speedup

One answer's speed is its output tokens over its wall time, prefill included; of several repeats the median
counts. `speedup` is the median over prompts of the ratio of the two speeds of one prompt; the speeds reported beside it
are medians over prompts too, so their quotient is near it, not equal to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

import torch
from torch.nn import functional as F

from dspine.api import LLM, GenerationResult
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.machine import machine_facts, peak_memory_bytes
from dspine.kernels.linear import GatedLinear, PackedLinear

WARM_UP_TOKENS = 12
PROFILED_PROMPTS = 3  # decoded once more, to see what of a round is matrix products


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


@dataclass(frozen=True, kw_only=True)
class SpeedReport:
    """Medians over prompts and repeats. `identical` is None where sampling makes no identity to be expected."""

    target: str
    drafter: str
    width: str
    temperature: float
    max_new_tokens: int
    prompts: int
    repeats: int
    tokens: int
    rounds: int
    speedup: float
    acceptance_length: float
    identical: bool | None
    plain_tok_per_s: float
    spec_tok_per_s: float
    plain_ttft_s: float
    spec_ttft_s: float
    acceptance_by_position: tuple[float, ...]
    draft_share: float
    verify_share: float
    other_share: float
    matrix_product_share: float | None
    round_ms: float
    peak_memory_bytes: int | None
    machine: dict[str, str | int]
    transformers_tok_per_s: float | None = None
    speedup_over_transformers: float | None = None
    plain_over_transformers: float | None = None
    transformers_identical_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; without the transformers keys where it was not timed."""
        optional = ("transformers", "speedup_over", "plain_over")
        return {k: v for k, v in asdict(self).items() if v is not None or not k.startswith(optional)}


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


def measure_speed(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    repeats: int = 1,
    reference: Decode | None = None,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> SpeedReport:
    """Plain against speculative decoding by the same engine, and `reference` (see `transformers_decode`) if given."""
    if llm.drafter is None:
        raise UserError(f"{llm.target.name} has no drafter here; name a draft checkpoint to measure")
    ways = [engine_decode(llm.engine(speculative=False)), engine_decode(llm.engine())]
    measured = interleave([*ways, reference] if reference else ways, prompts, params, repeats, on_progress)
    plain, spec = measured[:2]
    report = _speed_report(llm, prompts[:PROFILED_PROMPTS], params, repeats, plain, spec)
    return report if reference is None else _add_reference(report, plain, spec, measured[2])


def _speed_report(
    llm: LLM,
    profiled: Sequence[list[int]],
    params: SamplingParams,
    repeats: int,
    plain: list[PromptTimings],
    spec: list[PromptTimings],
) -> SpeedReport:
    assert llm.drafter is not None
    total = DecodeStats()
    for prompt in spec:
        for timing in prompt.timings:
            assert timing.stats is not None
            total.merge(timing.stats)
    seconds = total.decode_s or 1.0
    return SpeedReport(
        target=llm.target.name,
        drafter=llm.drafter.config.drafter,
        width=str(llm.width),
        temperature=params.temperature,
        max_new_tokens=params.max_new_tokens,
        prompts=len(spec),
        repeats=repeats,
        tokens=sum(len(prompt.token_ids) for prompt in spec),
        rounds=total.rounds // repeats,
        speedup=_median_ratio(spec, plain),
        acceptance_length=total.acceptance_length,
        identical=_identical_share(plain, spec) == 1.0 if params.is_greedy else None,
        plain_tok_per_s=median(prompt.tok_per_s for prompt in plain),
        spec_tok_per_s=median(prompt.tok_per_s for prompt in spec),
        plain_ttft_s=_median_ttft(plain),
        spec_ttft_s=_median_ttft(spec),
        acceptance_by_position=tuple(total.acceptance_by_position),
        draft_share=total.draft_s / seconds,
        verify_share=total.verify_s / seconds,
        other_share=total.other_s / seconds,
        matrix_product_share=product_share(llm.engine(), profiled, params),
        round_ms=1000 * total.decode_s / max(total.rounds, 1),
        peak_memory_bytes=peak_memory_bytes(),
        machine=machine_facts(llm.target.device),
    )


def product_share(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> float | None:
    """Share of the rounds' wall time spent in matrix products of target and drafter, heads and attention included.

    None where it cannot be told: on a GPU products run behind the clock's back, and an answer may end in the prefill.
    """
    if engine.target.device.type != "cpu":
        return None
    products_s = rounds_s = 0.0
    for prompt_ids in prompts:
        engine.submit(prompt_ids, params)
        engine.step()  # the prefill, and the first round with it
        with _timed_products() as seconds:
            started = time.perf_counter()
            engine.run()
            rounds_s += time.perf_counter() - started
        products_s += sum(seconds)
    return products_s / rounds_s if products_s else None


@contextmanager
def _timed_products() -> Iterator[list[float]]:
    """Collect the seconds of every product with weights (`PackedLinear`), attention and transition cache (`matmul`)."""
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **options)
            seconds.append(time.perf_counter() - started)
            return result

        return wrapped

    calls = [(PackedLinear, "__call__"), (GatedLinear, "__call__")]
    places: list[tuple[Any, str]] = [*calls, (F, "scaled_dot_product_attention"), (torch, "matmul")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, timed(original))
    try:
        yield seconds
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _add_reference(
    report: SpeedReport, plain: list[PromptTimings], spec: list[PromptTimings], reference: list[PromptTimings]
) -> SpeedReport:
    return replace(
        report,
        transformers_tok_per_s=median(prompt.tok_per_s for prompt in reference),
        speedup_over_transformers=_median_ratio(spec, reference),
        plain_over_transformers=_median_ratio(plain, reference),
        transformers_identical_share=_identical_share(plain, reference),
    )


def _median_ratio(faster: list[PromptTimings], slower: list[PromptTimings]) -> float:
    return median(a.tok_per_s / b.tok_per_s for a, b in zip(faster, slower, strict=True))


def _identical_share(one: list[PromptTimings], other: list[PromptTimings]) -> float:
    """Share of prompts whose output is the same in every repeat of both."""
    return mean(float(all(t.token_ids == a.token_ids for t in (*a.timings, *b.timings))) for a, b in zip(one, other, strict=True))


def _median_ttft(prompts: list[PromptTimings]) -> float:
    return median(t.ttft_s for prompt in prompts for t in prompt.timings if t.ttft_s is not None)


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
