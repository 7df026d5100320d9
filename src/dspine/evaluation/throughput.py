"""Tokens per second and latencies by concurrency, of several ways of decoding in turn.

    settings = ThroughputSettings(benchmark="gsm8k", ..., ways=tuple(way.facts for way in ways))
    started = started_report(settings, file, machine_facts(ways[0].device))
    report = await measure_throughput(ways, started, (1, 2, 4, 8, 16, 32), file)
    report.levels[0].ways[1].speedup_over["plain"]

A level keeps so many requests under way until all are answered. Each repeat runs every way once, the first place rotating, so
that a disturbance of the machine meets them all; speed-ups are medians over repeats of ratios within a repeat. A finished
level is written at once and not measured again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from dspine.errors import UserError
from dspine.evaluation.load import Answer, Way, WayFacts
from dspine.evaluation.throughput_report import (
    Level,
    Pass,
    ThroughputReport,
    ThroughputSettings,
    way_result,
)
from dspine.evaluation.timing import WARM_UP_TOKENS
from dspine.files import write_text


async def measure_throughput(
    ways: Sequence[Way],
    started: ThroughputReport,
    levels: Sequence[int],
    file: Path | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> ThroughputReport:
    """Add the concurrencies `levels` to a `started_report`, except those that it has, and write it after each.

    Raises UserError where all requests of a level to one way failed.
    """
    report = started
    for concurrency in todo(started, levels):
        report = report.with_level(await _measure_level(ways, started, concurrency, on_answer))
        if file is not None:
            write_text(file, json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def todo(report: ThroughputReport, levels: Sequence[int]) -> list[int]:
    """The concurrencies of `levels` that `report` has no level of, each once, in order."""
    done = {level.concurrency for level in report.levels}
    return [concurrency for concurrency in dict.fromkeys(levels) if concurrency not in done]


def planned_answers(report: ThroughputReport, levels: Sequence[int]) -> int:
    """How many answers are still to come, for a progress bar."""
    return sum(report.requests_at(concurrency) for concurrency in todo(report, levels)) * report.repeats * len(report.ways)


async def _measure_level(
    ways: Sequence[Way], settings: ThroughputSettings, concurrency: int, on_answer: Callable[[], None]
) -> Level:
    order = [number % settings.prompts for number in range(settings.requests_at(concurrency))]
    for way in ways:
        for rows in dict.fromkeys((concurrency, 1)):  # a level ends with few rows, whose costs are measured at first sight too
            await way.decode(order[:rows], concurrency, min(WARM_UP_TOKENS, settings.max_new_tokens))
    passes: list[list[Pass]] = [[] for _ in ways]
    for repeat in range(settings.repeats):
        for turn in range(len(ways)):
            number = (turn + repeat) % len(ways)
            started = perf_counter()
            answers = await ways[number].decode(order, concurrency, settings.max_new_tokens, on_answer)
            passes[number].append(Pass(answers, perf_counter() - started))
            _check_answered(answers, ways[number].facts, concurrency)
    names = [way.facts.name for way in ways]
    results = []
    for number, name in enumerate(names):
        others = {other: passes[n] for n, other in enumerate(names) if n != number}
        first = passes[0] if number and settings.temperature == 0 else None
        results.append(way_result(name, passes[number], others, first))
    return Level(concurrency=concurrency, requests=len(order), ways=tuple(results))


def _check_answered(answers: list[Answer], facts: WayFacts, concurrency: int) -> None:
    reasons = Counter(answer.failure for answer in answers)
    if None not in reasons:
        reason, count = reasons.most_common(1)[0]
        raise UserError(
            f"all {len(answers)} requests to {facts.name} ({facts.decoder}) failed at concurrency {concurrency}, {count} of them "
            f"with: {reason}; check the server, then run the same command again"
        )
