"""Training curves: held-out acceptance length over optimizer steps."""

from __future__ import annotations

from dspine.evaluation.report.kinds import Curve
from dspine.evaluation.report.page import MISSING, Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import MARKERS, REFERENCE, colour, display, legend_above, new_axes, styled

TEXT = (
    "Teacher-forced acceptance length on held-out answers while a drafter trains: true context, chosen tokens compared with "
    "the target's own greedy answer. It follows the decoded acceptance length and is cheap enough to be measured during "
    "training."
)


def training_section(results: Results) -> Section | None:
    curves = results.of(Curve)
    if not curves:
        return None
    blocks = []
    for collection in dict.fromkeys(curve.collection for curve in curves):
        own = [curve for curve in curves if curve.collection == collection]
        heading = f"comparison {collection}" if collection else ""
        blocks.append(Block(heading, (_drawing(collection, own),), (_last_table(own), _table(own))))
    return Section("training", "Training", TEXT, tuple(blocks))


def _drawing(collection: str, curves: list[Result[Curve]]) -> Drawing:
    seen: set[str] = set()
    with styled():
        figure, axes = new_axes(2.5)
        for curve in curves:
            drafter, points = curve.data.drafter, curve.data.points
            axes.plot(
                [point.step for point in points],
                [point.acceptance_length for point in points],
                color=colour(drafter, drafter in seen),
                marker=MARKERS.get(drafter, "X"),
                linewidth=2.0 if drafter == REFERENCE and drafter not in seen else 1.2,
                linestyle="--" if drafter in seen else "-",
                label=display(curve.row),
            )
            seen.add(drafter)
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        legend_above(figure, axes, "Held-out acceptance length" if len(curves) > 1 else f"Held-out τ: {curves[0].row}")
    ends = "; ".join(
        f"{display(c.row)} from {c.data.points[0].acceptance_length:.2f} at step {c.data.points[0].step:,} "
        f"to {c.data.points[-1].acceptance_length:.2f} at step {c.data.points[-1].step:,}"
        for c in curves
    )
    name = f"training-{collection}" if collection else "training"
    return Drawing(name.lower(), "Held-out acceptance length over training steps", f"{ends}.", figure)


def _last_table(curves: list[Result[Curve]]) -> Table:
    """How each run ended, slot by slot."""
    longest = max(len(curve.data.points[-1].slot_accuracy) for curve in curves)
    rows = []
    for curve in curves:
        last = curve.data.points[-1]
        slots = [Cell(f"{share:.1%}") for share in last.slot_accuracy]
        slots += [Cell(MISSING)] * (longest - len(slots))
        label = Cell(display(curve.row), sources=(curve.source.number,))
        rows.append((label, Cell(f"{last.step:,}"), Cell(f"{last.acceptance_length:.3f}", strong=True), *slots))
    heads = ("run", "step", "τ held out", *(f"slot {slot}" for slot in range(1, longest + 1)))
    return Table("At the end: accuracy of every slot, all before it right", tuple(map(Cell, heads)), tuple(rows))


def _table(curves: list[Result[Curve]]) -> Table:
    """Every point of every curve."""
    steps = sorted({point.step for curve in curves for point in curve.data.points})
    rows = []
    for step in steps:
        values = [next((p.acceptance_length for p in curve.data.points if p.step == step), None) for curve in curves]
        rows.append((Cell(f"{step:,}"), *(Cell(MISSING if value is None else f"{value:.3f}") for value in values)))
    heads = (Cell("step"), *(Cell(display(curve.row), sources=(curve.source.number,)) for curve in curves))
    return Table("Held-out acceptance length at every step", heads, tuple(rows), folded=True)
