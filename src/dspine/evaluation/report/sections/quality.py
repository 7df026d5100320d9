"""Answers with and without the drafter: whether they are the same, and what the benchmark's own judge says of both."""

from __future__ import annotations

from dspine.evaluation.quality import QualityReport
from dspine.evaluation.report.page import MISSING, Block, Cell, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import display

TEXT = (
    "The same prompts answered plainly and with the drafter. Greedy answers must be identical; sampled ones follow the same "
    "distribution, so their scores must agree within the interval of the difference (95 %, over conversations)."
)


def quality_section(results: Results) -> Section | None:
    found = results.of(QualityReport)
    if not found:
        return None
    heads = ("benchmark", "drafter", "T", "compared", "identical", "graded", "score, plain", "score, drafted", "difference")
    table = Table("Answers with and without the drafter", tuple(map(Cell, heads)), tuple(map(_row, found)), labels=2)
    return Section("quality", "Quality", TEXT, (Block("", tables=(table,)),))


def _row(result: Result[QualityReport]) -> tuple[Cell, ...]:
    r = result.data
    difference = Cell(MISSING)
    if r.plain_score is not None and r.spec_score is not None:
        interval = "" if r.score_difference_ci95 is None else "{:+.1%} to {:+.1%}".format(*r.score_difference_ci95)
        difference = Cell(f"{r.spec_score - r.plain_score:+.1%}", interval)
    return (
        Cell(display(r.benchmark), f"{r.prompts} prompts, {r.max_new_tokens} tokens", (result.source.number,)),
        Cell(display(r.drafter), r.target),
        Cell(f"{r.temperature:g}"),
        Cell(f"{r.compared:,}"),
        Cell(f"{r.identical:,}"),
        Cell(f"{r.graded:,}"),
        Cell(MISSING if r.plain_score is None else f"{r.plain_score:.1%}"),
        Cell(MISSING if r.spec_score is None else f"{r.spec_score:.1%}"),
        difference,
    )
