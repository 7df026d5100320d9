"""Throughput by concurrency, as gain over DFlash."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.ticker import NullLocator

from dspine.evaluation.report.page import MISSING, Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import MARKERS, PALETTE, REFERENCE, colour, display, legend_above, new_axes, slug, styled
from dspine.evaluation.throughput_report import Level, Percentiles, ThroughputReport, WayResult

TEXT = (
    "Tokens per second of all requests together while so many are under way, every way of decoding in turn. The zero line is "
    "DFlash (or the first way where it was not measured); gains are medians over repeats of ratios within a repeat."
)
ZERO = "dflash"


def throughput_section(results: Results) -> Section | None:
    found = [result for result in results.of(ThroughputReport) if result.data.levels]
    if not found:
        return None
    blocks = tuple(Block(_heading(r.data), (_gains(r), _speeds(r)), (_table(r), _latencies(r))) for r in found)
    return Section("throughput", "Throughput by concurrency", TEXT, blocks)


def _heading(report: ThroughputReport) -> str:
    settings = f"at most {report.max_new_tokens} tokens, T = {report.temperature:g}, {report.repeats} repeats"
    return f"{display(report.benchmark)}, {report.prompts} prompts, {settings}"


def zero_of(report: ThroughputReport) -> str:
    """The name of the way that gains are relative to."""
    names = [way.name for way in report.levels[0].ways]
    return next((name for name in names if drafter_of(report, name) == ZERO), names[0])


def drafter_of(report: ThroughputReport, name: str) -> str:
    """The kind of the way's drafter; of a server nobody can tell, so its name must."""
    return next((way.drafter for way in report.ways if way.name == name and way.drafter), name)


def gain_of(way: WayResult, zero: str) -> float | None:
    """By how much the way's throughput exceeds that of `zero`; 0 for `zero` itself, None where there is no ratio."""
    if way.name == zero:
        return 0.0
    return way.speedup_over[zero] - 1 if zero in way.speedup_over else None


def _gains(result: Result[ThroughputReport]) -> Drawing:
    zero = zero_of(result.data)
    title = f"Throughput gain over {display(zero)}"
    return _curves(result, title, "gain", lambda way: gain_of(way, zero), "{x:+.0%}", "+.1%", zero)


def _speeds(result: Result[ThroughputReport]) -> Drawing:
    return _curves(result, "Tokens per second of all requests", "tok-per-s", lambda way: way.tok_per_s, "{x:,.0f}", ",.1f", None)


def _curves(
    result: Result[ThroughputReport], title: str, name: str, value_of: Callable[[WayResult], float | None], ticks: str, form: str,
    zero: str | None,
) -> Drawing:  # fmt: skip
    """One line a way over the concurrencies; `zero` is the way that is a straight line at 0."""
    levels = result.data.levels
    words = []
    with styled():
        figure, axes = new_axes(2.6)
        for way in [way.name for way in levels[0].ways]:
            points = [(level.concurrency, value) for level in levels if (value := value_of(_named(level, way))) is not None]
            words.append(f"{display(way)}: " + ", ".join(f"{value:{form}} at {number}" for number, value in points))
            drafter = drafter_of(result.data, way)
            axes.plot(
                [number for number, _ in points],
                [value for _, value in points],
                color=PALETTE["muted"] if way == zero else colour(drafter),
                marker="" if way == zero else MARKERS.get(drafter, "X"),
                linewidth=2.0 if drafter == REFERENCE else 1.2,
                label=f"{display(way)} = 0" if way == zero else display(way),
            )
        numbers = [level.concurrency for level in levels]
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ticks)
        axes.set_xlabel("requests under way")
        legend_above(figure, axes, title)
    return Drawing(
        slug("throughput", name, result.data.benchmark, str(result.source.number)), title, "; ".join(words) + ".", figure
    )


def _named(level: Level, name: str) -> WayResult:
    return next(way for way in level.ways if way.name == name)


def _table(result: Result[ThroughputReport]) -> Table:
    zero, first = zero_of(result.data), result.data.levels[0].ways[0].name
    heads = ["requests under way", "way", "tok/s", f"gain over {display(zero)}", f"over {display(first)}", "tokens", "time (s)"]
    heads += ["τ", "identical answers", "requests", "failed", "asked to wait"]
    rows = []
    for level in result.data.levels:
        for way in level.ways:
            gain, over = gain_of(way, zero), 1.0 if way.name == first else way.speedup_over.get(first)
            texts = [
                f"{way.tok_per_s:,.1f}",
                MISSING if gain is None else f"{gain:+.1%}",
                MISSING if over is None else f"{over:.2f}x",
                f"{way.tokens:,}",
                f"{way.elapsed_s:,.1f}",
                MISSING if way.acceptance_length is None else f"{way.acceptance_length:.2f}",
                MISSING if way.identical_share is None else f"{way.identical_share:.0%}",
                f"{way.requests:,}",
                str(sum(way.failures.values())),
                str(way.refusals),
            ]
            label = Cell(str(level.concurrency), sources=(result.source.number,))
            rows.append((label, Cell(display(way.name)), *map(Cell, texts)))
    return Table("Throughput", tuple(map(Cell, heads)), tuple(rows), labels=2)


def _latencies(result: Result[ThroughputReport]) -> Table:
    kinds = ("first token (ms)", "time per token (ms)", "whole answer (ms)")
    heads = ("requests under way", "way", *(f"{kind}, {share}" for kind in kinds for share in ("median", "95 %", "99 %")))
    rows = []
    for level in result.data.levels:
        for way in level.ways:
            label = Cell(str(level.concurrency), sources=(result.source.number,))
            cells = [cell for times in (way.ttft_s, way.tpot_s, way.latency_s) for cell in _percentiles(times)]
            rows.append((label, Cell(display(way.name)), *cells))
    return Table("Latencies", tuple(map(Cell, heads)), tuple(rows), labels=2, folded=True)


def _percentiles(times_s: Percentiles | None) -> list[Cell]:
    if times_s is None:
        return [Cell(MISSING)] * 3
    return [Cell(f"{1000 * value:,.1f}") for value in (times_s.p50, times_s.p95, times_s.p99)]
