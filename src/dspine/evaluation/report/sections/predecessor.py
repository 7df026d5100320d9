"""The predecessor study: what the token just before a slot is worth, against all that is older, and in which layers."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.evaluation.report.page import Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.shares import Series, share_bars, share_cell, share_text, subject_name, subject_text
from dspine.evaluation.report.style import colour, display
from dspine.evaluation.studies.predecessor import HISTORY, PREDECESSOR, ConditionResult, PredecessorResult

TEXT = (
    "A slot is asked for its token while its predecessor, or all that is older, is the draft's prediction instead of the "
    "truth; counted are the blocks where that prediction is wrong. Then the predecessor stays predicted, but in some layers "
    "the true one's keys and values stand in its place."
)
OPACITIES = (1.0, 0.7, 0.45)  # from the first slot to the last


def predecessor_section(results: Results) -> Section | None:
    found = results.of(PredecessorResult)
    if not found:
        return None
    drawings = tuple(draw(result.data) for draw in (_content, _timing) for result in found)
    block = Block("", drawings, tuple(_table(result) for result in found))
    return Section("predecessor", "Study: the adjacent predecessor", TEXT, (block,))


def _content(result: PredecessorResult) -> Drawing:
    rows = [(slot.slot, name, condition_of(slot.content, name)) for slot in result.slots for name in (PREDECESSOR, HISTORY)]
    labels = [f"slot {slot}: {name}" for slot, name, _ in rows]
    series = (
        Series("all true", tuple(condition.truth_changed for _, _, condition in rows), 0.45),
        Series("wrong", tuple(condition.accuracy_changed for _, _, condition in rows)),
    )
    drafter = display(result.subject.drafter)
    heading, axis = f"{drafter}: what a wrong one costs", "accuracy of the slot's token"
    figure = share_bars(heading, axis, labels, series, colour(result.subject.drafter))
    words = "; ".join(
        f"{label} wrong: {share_text(condition.accuracy_changed)}, all true: {share_text(condition.truth_changed)}"
        for label, (_, _, condition) in zip(labels, rows, strict=True)
    )
    title = f"Accuracy with a wrong predecessor or a wrong history, {drafter}"
    return Drawing(f"{subject_name(result)}-content", title, f"{words}.", figure)


def _timing(result: PredecessorResult) -> Drawing:
    names = [condition.name for condition in result.slots[0].timing]
    series = tuple(
        Series(
            f"slot {slot.slot}",
            (
                condition_of(slot.content, PREDECESSOR).accuracy_changed,
                *(condition_of(slot.timing, name).accuracy_changed for name in names),
            ),
            OPACITIES[number % len(OPACITIES)],
        )
        for number, slot in enumerate(result.slots)
    )
    labels = ["no layer", *(f"layers {name}" for name in names)]
    drafter = display(result.subject.drafter)
    figure = share_bars(
        f"{drafter}: true predecessor in",
        "accuracy where the prediction is wrong",
        labels,
        series,
        colour(result.subject.drafter),
    )
    words = "; ".join(
        f"{one.name}: " + ", ".join(f"{label} {share_text(share)}" for label, share in zip(labels, one.shares, strict=True))
        for one in series
    )
    title = f"Accuracy with the true predecessor in some layers, {drafter}"
    return Drawing(f"{subject_name(result)}-layers", title, f"{words}.", figure)


def condition_of(conditions: Sequence[ConditionResult], name: str) -> ConditionResult:
    return next(condition for condition in conditions if condition.name == name)


def _table(result: Result[PredecessorResult]) -> Table:
    heads = (
        "slot",
        "predicted, or layers with the true predecessor",
        "accuracy",
        "where it is wrong",
        "all true there",
        "blocks",
    )
    rows = []
    for slot in result.data.slots:
        for kind, conditions in (("predicted", slot.content), ("true in", slot.timing)):
            for one in conditions:
                name = Cell(f"{kind}: {one.name}" if kind == "predicted" else f"{kind} layers {one.name}")
                shares = map(share_cell, (one.accuracy, one.accuracy_changed, one.truth_changed))
                label = Cell(str(slot.slot), sources=(result.source.number,))
                rows.append((label, name, *shares, Cell(f"{one.accuracy_changed.total:,} of {one.accuracy.total:,}")))
    return Table(f"{subject_text(result.data)}: accuracy of the slot's token", tuple(map(Cell, heads)), tuple(rows), labels=2)
