"""The timing study: in which layers the true prefix is worth having."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.evaluation.report.page import Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.shares import Series, share_bars, share_cell, share_text, subject_name, subject_text
from dspine.evaluation.report.style import colour, display
from dspine.evaluation.studies.timing import ScheduleResult, TimingResult

TEXT = (
    "A token in the middle of a block becomes the anchor of a new one. The prefix between the two anchors enters the draft "
    "layers as predicted, or as the true tokens in some of the layers: the gain in consecutive correct tokens, relative to "
    "the predicted prefix in all layers, tells when a layer needs to know it. Only blocks whose predicted prefix is wrong "
    "can change."
)


def timing_section(results: Results) -> Section | None:
    found = results.of(TimingResult)
    if not found:
        return None
    drawings = sorted((drawing for result in found for drawing in _drawings(result.data)), key=_is_pair)  # alike side by side
    block = Block("", tuple(drawings), tuple(_table(result) for result in found))
    return Section("timing", "Study: when a layer needs the prefix", TEXT, (block,))


def _is_pair(drawing: Drawing) -> bool:
    return drawing.name.endswith("-pair")


def _drawings(result: TimingResult) -> tuple[Drawing, ...]:
    kinds = {
        "from": ("true prefix from a layer on", "from"),
        "pair": ("true prefix in two layers only", "pair"),
    }
    drawings = []
    for kind, (title, name) in kinds.items():
        schedules = [one for one in result.schedules if one.schedule.kind == kind]
        if schedules:
            drawings.append(_bars(result, schedules, title, name))
    return tuple(drawings)


def _bars(result: TimingResult, schedules: Sequence[ScheduleResult], title: str, name: str) -> Drawing:
    changed = f"prefix wrong ({result.changed_blocks / result.blocks:.0%})"
    series = (
        Series("all blocks", tuple(one.gain for one in schedules)),
        Series(changed, tuple(one.changed_gain for one in schedules), 0.5),
    )
    labels = [f"layers {one.schedule.name}" for one in schedules]
    drafter = display(result.subject.drafter)
    figure = share_bars(f"{drafter}: {title}", "gain in correct tokens", labels, series, colour(result.subject.drafter), "+.1%")
    words = "; ".join(f"{label}: {share_text(one.gain, '+.1%')}" for label, one in zip(labels, schedules, strict=True))
    return Drawing(f"{subject_name(result)}-{name}", f"Gain from the {title}, {drafter}", f"{words}.", figure)


def _table(result: Result[TimingResult]) -> Table:
    data, (first, last) = result.data, result.data.measured_slots
    heads = ("true prefix in", f"correct tokens, slots {first}-{last}", "gain", "gain where the prefix is wrong")
    label = Cell("no layer", sources=(result.source.number,))
    rows = [(label, Cell(f"{data.baseline_correct_tokens:.3f}"), Cell(""), Cell(""))]
    for one in data.schedules:
        gains = (share_cell(one.gain, "+.1%"), share_cell(one.changed_gain, "+.1%"))
        name = Cell(f"layers {one.schedule.name}", sources=(result.source.number,))
        rows.append((name, Cell(f"{one.correct_tokens:.3f}"), *gains))
    return Table(f"{subject_text(data)}, {data.changed_blocks:,} with a wrong prefix", tuple(map(Cell, heads)), tuple(rows))
