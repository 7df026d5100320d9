"""What `evaluation.throughput` tells: results by concurrency and way, their percentiles and ratios, and the file they lie in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.load import Answer, WayFacts

MAY_DIFFER = {"command", "date"}  # of the machine, between levels of one file
Machine = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """What all levels of a file share. `requests` 0: per level as many as prompts, but at least twice the concurrency."""

    benchmark: str
    prompts: int
    prompts_sha256: str
    ways: tuple[WayFacts, ...] = ()
    requests: int
    repeats: int
    max_new_tokens: int
    temperature: float
    seed: int | None
    chat: bool
    width: str

    def requests_at(self, concurrency: int) -> int:
        return self.requests or max(self.prompts, 2 * concurrency)


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Over all answered requests of a level."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Interpolated linearly; None of nothing."""
        if not values:
            return None
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """One way at one concurrency, all repeats together.

    `failures` count failed requests by reason; their tokens are not in `tokens`, their time is in `elapsed_s`. `refusals` are
    replies that asked to come again later, whether or not the request was answered in the end. `speedup_over` has the other
    ways with which there is a ratio; `identical_share` is of answers equal to the first way's (None when sampling, and for it).
    """

    name: str
    requests: int
    failures: dict[str, int]
    refusals: int
    tokens: int
    cached_tokens: int
    elapsed_s: float
    tok_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    latency_s: Percentiles | None
    speedup_over: dict[str, float]
    identical_share: float | None
    acceptance_length: float | None


@dataclass(frozen=True, kw_only=True)
class Level:
    concurrency: int
    requests: int
    ways: tuple[WayResult, ...]


@dataclass(frozen=True, kw_only=True)
class ThroughputReport(ThroughputSettings):
    """All levels measured so far, by concurrency. `machine` is where the requests were sent from."""

    levels: tuple[Level, ...]
    machine: Machine

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_level(self, level: Level) -> ThroughputReport:
        return replace(self, levels=tuple(sorted((*self.levels, level), key=lambda level: level.concurrency)))


@dataclass(frozen=True)
class Pass:
    """All requests of one repeat by one way."""

    answers: list[Answer]
    elapsed_s: float

    @property
    def tok_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers if answer.failure is None) / self.elapsed_s


def started_report(settings: ThroughputSettings, file: Path | None, machine: Machine) -> ThroughputReport:
    """What `file` holds, or a report without levels where there is none. Raises UserError for another measurement's."""
    empty = ThroughputReport(**{f.name: getattr(settings, f.name) for f in fields(settings)}, levels=(), machine=machine)
    if file is None or not file.exists():
        return empty
    try:
        found = TypeAdapter(ThroughputReport).validate_json(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is no result of this command; choose another output, or remove that file") from error
    ours = {**asdict(settings), **{key: value for key, value in machine.items() if key not in MAY_DIFFER}}
    theirs = {**found.to_dict(), **found.machine}
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(
                f"{file} was measured with {key} = {theirs.get(key)!r}, this one has {value!r}; choose another output, or "
                "remove that file"
            )
    return found


def way_result(name: str, passes: list[Pass], others: dict[str, list[Pass]], first: list[Pass] | None) -> WayResult:
    sent = [answer for one in passes for answer in one.answers]
    answered = [answer for answer in sent if answer.failure is None]
    stats = DecodeStats()
    for answer in answered:
        if answer.stats is not None:
            stats.merge(answer.stats)
    elapsed_s, tokens = sum(one.elapsed_s for one in passes), sum(answer.tokens for answer in answered)
    return WayResult(
        name=name,
        requests=len(sent),
        failures=dict(Counter(answer.failure for answer in sent if answer.failure is not None)),
        refusals=sum(answer.refusals for answer in sent),
        tokens=tokens,
        cached_tokens=sum(answer.cached_tokens for answer in answered),
        elapsed_s=elapsed_s,
        tok_per_s=tokens / elapsed_s,
        ttft_s=Percentiles.of([answer.ttft_s for answer in answered]),
        tpot_s=Percentiles.of([answer.tpot_s for answer in answered if answer.tpot_s is not None]),
        latency_s=Percentiles.of([answer.elapsed_s for answer in answered]),
        speedup_over={
            other: median(a.tok_per_s / b.tok_per_s for a, b in zip(passes, theirs, strict=True))
            for other, theirs in others.items()
            if all(one.tok_per_s > 0 for one in theirs)
        },
        identical_share=None if first is None else _identical_share(passes, first),
        acceptance_length=stats.acceptance_length if stats.rounds else None,
    )


def _identical_share(passes: list[Pass], first: list[Pass]) -> float | None:
    """Share of the answers equal to the first way's to the same request; None where no request has both."""
    equal = [
        a.output == b.output
        for one, other in zip(passes, first, strict=True)
        for a, b in zip(one.answers, other.answers, strict=True)
        if a.failure is None and b.failure is None
    ]
    return sum(equal) / len(equal) if equal else None
