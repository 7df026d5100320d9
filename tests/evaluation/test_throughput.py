"""Throughput by concurrency: what is run in which order, what is counted, and files that go on where they stopped.

The ways here take made-up times by a made-up clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation import throughput
from dspine.evaluation.load import Answer, WayFacts
from dspine.evaluation.throughput import measure_throughput, planned_answers, todo
from dspine.evaluation.throughput_report import Machine, Percentiles, ThroughputReport, ThroughputSettings, started_report
from dspine.evaluation.timing import WARM_UP_TOKENS

MACHINE: Machine = {"cpu": "abacus", "threads": 2, "command": "dspine bench", "date": "2026-11-30"}
SETTINGS = ThroughputSettings(
    benchmark="g", prompts=4, prompts_sha256="0", requests=0, repeats=2, max_new_tokens=20, temperature=0.0, seed=0, chat=True,
    width="auto",
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class MadeUpWay:
    """Takes the next of `passes_s` for a measured pass; every answer has ten tokens unless `answer` says otherwise."""

    device = torch.device("cpu")

    def __init__(self, name: str, clock: Clock, passes_s: Sequence[float], answer: Callable[[int], Answer] | None = None) -> None:
        self.facts = WayFacts(name=name, decoder="engine", model="m")
        self.clock, self.passes_s = clock, list(passes_s)
        self.answer = answer or (lambda place: Answer(tokens=10, output=place, ttft_s=0.5, elapsed_s=1.4))
        self.calls: list[tuple[int, int, int]] = []

    async def decode(
        self, order: Sequence[int], concurrency: int, max_new_tokens: int, on_answer: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        LOG.append(self.facts.name)
        self.calls.append((len(order), concurrency, max_new_tokens))
        assert max(order) < SETTINGS.prompts
        if max_new_tokens == SETTINGS.max_new_tokens:  # not a warm-up
            self.clock.now += self.passes_s.pop(0)
        for _ in order:
            on_answer()
        return [self.answer(place) for place in range(len(order))]


LOG: list[str] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    LOG.clear()
    return clock


def measure(
    ways: Sequence[MadeUpWay], levels: Sequence[int], file: Path | None = None, settings: ThroughputSettings = SETTINGS
) -> ThroughputReport:
    settings = replace(settings, ways=tuple(way.facts for way in ways))
    return asyncio.run(measure_throughput(ways, started_report(settings, file, MACHINE), levels, file))


def test_ways_take_turns_after_a_warm_up(clock: Clock) -> None:
    ways = [MadeUpWay("plain", clock, (8.0, 4.0)), MadeUpWay("dspine", clock, (2.0, 2.0))]
    measure(ways, (8,))
    assert LOG == ["plain", "plain", "dspine", "dspine", "plain", "dspine", "dspine", "plain"]
    # 4 prompts are fewer than twice the concurrency: 16 requests; warm-ups are one request a place, then one, short.
    assert ways[0].calls == [(8, 8, WARM_UP_TOKENS), (1, 8, WARM_UP_TOKENS), (16, 8, 20), (16, 8, 20)]


def test_rates_are_of_all_repeats_and_speed_ups_of_each(clock: Clock) -> None:
    """Ratios 4 and 1.6, whose median is 2.8; the quotient of the rates is 12 / 4.5 = 2.67."""
    ways = [MadeUpWay("plain", clock, (8.0, 4.0)), MadeUpWay("dspine", clock, (2.0, 2.5)), MadeUpWay("dflash", clock, (4.0, 4.0))]
    (level,) = measure(ways, (1,)).levels
    plain, dspine, dflash = level.ways
    assert (level.concurrency, level.requests, plain.requests) == (1, 4, 8)
    assert (plain.tokens, plain.elapsed_s) == (80, 12.0)
    assert plain.tok_per_s == pytest.approx(80 / 12)
    assert dspine.speedup_over == {"plain": pytest.approx(2.8), "dflash": pytest.approx((2.0 + 1.6) / 2)}
    assert dflash.speedup_over["plain"] == pytest.approx(1.5)
    assert set(plain.speedup_over) == {"dspine", "dflash"}


def test_failed_requests_are_counted_and_count_for_nothing_else(clock: Clock) -> None:
    def answer(place: int) -> Answer:
        if place == 0:
            return Answer(failure="HTTP 500", tokens=0)
        if place == 1:
            return Answer(failure="timeout", refusals=2)
        return Answer(tokens=10, output=place, ttft_s=1.0, elapsed_s=2.8, refusals=1, cached_tokens=3)

    (level,) = measure([MadeUpWay("a", clock, (4.0, 4.0), answer)], (1,)).levels
    (way,) = level.ways
    assert way.failures == {"HTTP 500": 2, "timeout": 2}
    assert (way.requests, way.tokens, way.tok_per_s, way.refusals, way.cached_tokens) == (8, 40, 5.0, 8, 12)
    assert way.ttft_s == Percentiles(p50=1.0, p95=1.0, p99=1.0)
    assert way.tpot_s is not None
    assert way.latency_s is not None
    assert way.tpot_s.p99 == pytest.approx(0.2)
    assert way.latency_s.p50 == 2.8


def test_a_level_without_any_answer_is_an_error_that_keeps_the_levels_before(clock: Clock, tmp_path: Path) -> None:
    calls = iter(range(100))

    def answer(place: int) -> Answer:
        return Answer(failure="disconnected") if next(calls) >= 1 + 2 * 4 else Answer(tokens=2, elapsed_s=1.0)

    file = tmp_path / "t.json"
    with pytest.raises(UserError, match=r"all 4 requests to a \(engine\) failed at concurrency 2, 4 of them with: disconnected"):
        measure([MadeUpWay("a", clock, (1.0,) * 9, answer)], (1, 2), file)
    assert [level["concurrency"] for level in json.loads(file.read_text())["levels"]] == [1]


def test_percentiles_are_interpolated() -> None:
    percentiles = Percentiles.of([float(n) for n in range(101)])
    assert percentiles == Percentiles(p50=50.0, p95=95.0, p99=99.0)
    assert Percentiles.of([0.0, 4.0]) == Percentiles(p50=2.0, p95=3.8, p99=3.96)
    assert Percentiles.of([]) is None


def test_outputs_are_compared_with_the_first_ways_request_by_request(clock: Clock) -> None:
    ways = [
        MadeUpWay("plain", clock, (1.0, 1.0)),
        MadeUpWay("odd", clock, (1.0, 1.0), lambda place: Answer(tokens=1, output=place if place else "other", elapsed_s=1.0)),
    ]
    (level,) = measure(ways, (1,)).levels
    assert [way.identical_share for way in level.ways] == [None, 0.75]
    ways[0].passes_s, ways[1].passes_s = [1.0, 1.0], [1.0, 1.0]
    (level,) = measure(ways, (1,), settings=replace(SETTINGS, temperature=1.0)).levels
    assert [way.identical_share for way in level.ways] == [None, None], "sampled answers need not be the same"


def test_the_acceptance_length_is_over_all_rounds(clock: Clock) -> None:
    def answer(place: int) -> Answer:
        stats = DecodeStats()
        stats.record_round(5, place)  # of 0, 1, 2, 3 accepted: 2.5 tokens a round
        return Answer(tokens=1, elapsed_s=1.0, stats=stats)

    (level,) = measure([MadeUpWay("a", clock, (1.0, 1.0), answer), MadeUpWay("served", clock, (1.0, 1.0))], (1,)).levels
    assert [way.acceptance_length for way in level.ways] == [2.5, None]


def test_a_finished_level_is_not_measured_again(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    first = measure([MadeUpWay("a", clock, (1.0,) * 4)], (4, 1), file)
    assert [level.concurrency for level in first.levels] == [1, 4]
    way = MadeUpWay("a", clock, (1.0,) * 2)
    second = measure([way], (1, 2, 4, 2), file)
    assert {concurrency for _, concurrency, _ in way.calls} == {2}
    assert [level.concurrency for level in second.levels] == [1, 2, 4]
    assert second.levels[0] == first.levels[0]
    assert todo(second, (1, 2, 8)) == [8]
    assert planned_answers(second, (2, 8)) == 16 * 2, "16 requests, twice, by one way"
    assert measure([MadeUpWay("a", clock, ())], (1, 2), file) == second, "nothing was left to do"


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        ({"max_new_tokens": 64}, {}, "was measured with max_new_tokens = 20, this one has 64"),
        ({"prompts_sha256": "1"}, {}, "was measured with prompts_sha256 = '0', this one has '1'"),
        ({"ways": (WayFacts(name="b", decoder="engine", model="m"),)}, {}, "was measured with ways = "),
        ({}, {"cpu": "other"}, "was measured with cpu = 'abacus', this one has 'other'"),
    ],
)
def test_another_measurements_file_is_left_alone(
    settings: dict[str, object], machine: Machine, message: str, clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    report = measure([MadeUpWay("a", clock, (1.0,) * 2)], (1,), file)
    before = file.read_text()
    same = replace(SETTINGS, ways=report.ways)
    assert started_report(same, file, {**MACHINE, "date": "2027-01-01", "command": "other"}) == report
    with pytest.raises(UserError, match=message):
        started_report(replace(same, **settings), file, {**MACHINE, **machine})  # type: ignore[arg-type]
    assert file.read_text() == before


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    for text in ("{}", "no json"):
        file.write_text(text)
        with pytest.raises(UserError, match="is no result of this command; choose another output"):
            started_report(SETTINGS, file, MACHINE)
