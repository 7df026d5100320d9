"""Tokens per second of plain and speculative decoding (and of transformers), interleaved in one process.

    report = measure_speed(llm, prompts, SamplingParams(max_new_tokens=160), repeats=3)
    report.speedup

`speedup` is the median over prompts of the ratio of the two speeds of one prompt; the speeds reported beside it are medians
over prompts too, so their quotient is near it, not equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.machine import machine_facts, peak_memory_bytes
from dspine.evaluation.products import product_share
from dspine.evaluation.timing import Decode, PromptTimings, engine_decode, interleave

PROFILED_PROMPTS = 3  # decoded once more, to see what of a round is matrix products


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
    mean_width: float = 0.0  # slots per round; 0 in results from before it was recorded
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
        mean_width=total.mean_width,
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
