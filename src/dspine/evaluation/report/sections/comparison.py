"""The tables of `dspine compare`, whole."""

from __future__ import annotations

from dspine.evaluation.report.kinds import ComparisonTable, Value
from dspine.evaluation.report.page import MISSING, Block, Cell, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import display

TEXT = (
    "Drafters trained on identical data, anchors, order, steps and seed, and decoded in the same engine. Acceptance lengths "
    "with 95 % intervals over prompts; shares are of a round's time."
)
LABELS = ("row", "drafter")


def comparison_section(results: Results) -> Section | None:
    tables = results.of(ComparisonTable)
    if not tables:
        return None
    blocks = tuple(Block(table.collection or table.source.file, tables=_tables(table)) for table in tables)
    return Section("comparison", "Comparisons", TEXT, blocks)


def _tables(result: Result[ComparisonTable]) -> tuple[Table, ...]:
    source = (result.source.number,)
    # Every row has the same heads; intervals stand below their number instead of in columns of their own.
    heads = [head for head in result.data.rows[0] if not head.endswith((" low", " high"))] if result.data.rows else []
    best = {
        head: max((v for row in result.data.rows if isinstance(v := row[head], (int, float))), default=None) for head in heads
    }
    body = []
    for row in result.data.rows:
        cells = [
            Cell(
                _text(head, row[head]), _interval(row, head), source if head == LABELS[0] else (), _is_best(row, head, best[head])
            )
            for head in heads
        ]
        body.append(tuple(cells))
    table = Table(f"Comparison {result.collection}".strip(), tuple(Cell(head) for head in heads), tuple(body), labels=len(LABELS))
    gains = tuple(
        (
            Cell(display(str(gain["benchmark"])), sources=source),
            Cell(f"{gain['temperature']:g}" if isinstance(gain["temperature"], (int, float)) else MISSING),
            Cell(f"{gain['gain']:+.1%}" if isinstance(gain["gain"], (int, float)) else MISSING, strong=True),
            Cell(display(str(gain["rival"]))),
        )
        for gain in result.data.gains
    )
    if not gains:
        return (table,)
    gain_heads = tuple(map(Cell, ("benchmark", "T", "lead in τ", "over")))
    return (table, Table("Lead of the reference over the strongest other drafter", gain_heads, gains))


def _text(head: str, value: Value) -> str:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return display(value)
    if head.endswith("share"):
        return f"{value:.1%}"
    return f"{value:.1f}" if head.endswith(("tok/s", "(ms)")) else f"{value:.2f}"


def _interval(row: dict[str, Value], head: str) -> str:
    low, high = row.get(f"{head} low"), row.get(f"{head} high")
    return f"{low:.2f} to {high:.2f}" if isinstance(low, (int, float)) and isinstance(high, (int, float)) else ""


def _is_best(row: dict[str, Value], head: str, best: Value) -> bool:
    """Whether this is the largest acceptance length of its column (of other columns the largest is not the best)."""
    return f"{head} low" in row and row[head] is not None and row[head] == best
