"""The readout study: how much of the true token can be read from each draft layer."""

from __future__ import annotations

from dspine.evaluation.report.page import Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.shares import share_cell, share_text, subject_name, subject_text
from dspine.evaluation.report.style import PALETTE, colour, display, legend_above, new_axes, styled
from dspine.evaluation.studies.readout import LayerResult, ReadoutResult

TEXT = (
    "A probe of equal capacity for every draft layer reads the true token from the layer's state; its accuracy, by group of "
    "slots, tells when in depth the block's later tokens become known. Dashed: the tokens that the drafter itself proposes. "
    "Whiskers and small numbers are 95 % intervals over answers."
)
LOOKS = ((1.0, "o"), (0.7, "s"), (0.45, "^"))  # opacity and marker, from the first group of slots to the last


def readout_section(results: Results) -> Section | None:
    found = results.of(ReadoutResult)
    if not found:
        return None
    tables = tuple(table for result in found for table in (_groups(result), _slots(result)))
    block = Block("", tuple(_drawing(result.data) for result in found), tables)
    return Section("readout", "Study: what each layer knows", TEXT, (block,))


def _drawing(result: ReadoutResult) -> Drawing:
    layers = [layer.layer for layer in result.layers]
    with styled():
        figure, axes = new_axes(2.7)
        shade = colour(result.subject.drafter)
        for group, (first, last) in enumerate(result.slot_groups):
            shares = [layer.groups[group] for layer in result.layers]
            values = [float("nan") if share.value is None else share.value for share in shares]
            alpha, marker = LOOKS[group % len(LOOKS)]
            axes.plot(layers, values, color=shade, alpha=alpha, marker=marker, label=f"slots {first}-{last}")
            for layer, share in zip(layers, shares, strict=True):
                if share.ci95 is not None:
                    axes.plot([layer, layer], share.ci95, color=PALETTE["ink"], linewidth=0.8)
            own = result.draft.groups[group].value
            if own is not None:
                axes.axhline(own, linestyle="--", linewidth=0.9, color=shade, alpha=alpha)
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel("draft layer")
        legend_above(figure, axes, f"{display(result.subject.drafter)}: true token read")
    last_layer = result.layers[-1]
    groups = "; ".join(
        f"slots {first}-{last}: {share_text(last_layer.groups[group])} in layer {last_layer.layer}"
        for group, (first, last) in enumerate(result.slot_groups)
    )
    title = f"Accuracy of the true token read from each draft layer, {display(result.subject.drafter)}"
    return Drawing(subject_name(result), title, f"{groups}.", figure)


def _groups(result: Result[ReadoutResult]) -> Table:
    heads = ("layer", *(f"slots {first}-{last}" for first, last in result.data.slot_groups), "epoch", "accuracy on selection")
    rows = [_row(layer, result.source.number) for layer in result.data.layers]
    rows.append((Cell("the draft itself"), *map(share_cell, result.data.draft.groups), Cell(""), Cell("")))
    return Table(f"{subject_text(result.data)}: accuracy by layer and group of slots", tuple(map(Cell, heads)), tuple(rows))


def _row(layer: LayerResult, source: int) -> tuple[Cell, ...]:
    selection = "" if layer.selection_accuracy is None else f"{layer.selection_accuracy:.1%}"
    epoch = "" if layer.epoch is None else str(layer.epoch)
    return (Cell(str(layer.layer), sources=(source,)), *map(share_cell, layer.groups), Cell(epoch), Cell(selection))


def _slots(result: Result[ReadoutResult]) -> Table:
    """Every slot on its own."""
    heads = ("layer", *(f"slot {slot}" for slot in range(1, len(result.data.draft.slots) + 1)))
    rows = [
        (Cell(str(layer.layer), sources=(result.source.number,)), *map(share_cell, layer.slots)) for layer in result.data.layers
    ]
    rows.append((Cell("the draft itself"), *map(share_cell, result.data.draft.slots)))
    return Table(f"{subject_text(result.data)}: accuracy by layer and slot", tuple(map(Cell, heads)), tuple(rows), folded=True)
