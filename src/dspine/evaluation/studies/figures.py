"""The studies' pictures: FOLDER/NAME.png and .svg from a result. Whiskers and bands are 95 % over answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspine.evaluation.plotting import colour, prepare_matplotlib, save_figure
from dspine.evaluation.studies.predecessor import HISTORY, PREDECESSOR, ConditionResult, PredecessorResult
from dspine.evaluation.studies.readout import ReadoutResult
from dspine.evaluation.studies.results import Share, StudyResult
from dspine.evaluation.studies.timing import ScheduleResult, TimingResult

BAR = 0.26


def draw_readout(result: ReadoutResult, folder: Path) -> tuple[Path, Path]:
    """Accuracy over layers, one curve for each group of slots; dashed: what the drafter itself proposes there."""
    figure, axes = _panels(1, 5.2)
    layers = [layer.layer for layer in result.layers]
    for group, (first, last) in enumerate(result.slot_groups):
        shares = [layer.groups[group] for layer in result.layers]
        own = result.draft.groups[group].value
        axes[0].errorbar(
            layers, _percent(shares), yerr=_spread(shares), marker="o", markersize=4, capsize=2, color=colour(group + 2),
            label=f"slots {first}-{last}",
        )  # fmt: skip
        if own is not None:
            axes[0].axhline(100 * own, color=colour(group + 2), linewidth=0.8, linestyle="--")
    axes[0].set_xticks(layers)
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlabel("draft layer")
    axes[0].set_ylabel("true token read (%)")
    axes[0].set_title(f"{_what(result)}; dashed: the draft's own tokens", fontsize=10)
    axes[0].legend(fontsize=8, frameon=False)
    return _save(figure, result, folder)


def draw_timing(result: TimingResult, folder: Path) -> tuple[Path, Path]:
    """Gain in consecutive correct tokens: true features from a layer on, and in the last layer and one earlier.

    The only pair of a drafter with three layers is one of the schedules beside it and gets no panel.
    """
    pairs = [s for s in result.schedules if s.schedule.kind == "pair"]
    figure, axes = _panels(2 if len(pairs) > 1 else 1, 4.6)
    _gains(axes[0], [s for s in result.schedules if s.schedule.kind == "from"], "true prefix from layer", result)
    axes[0].set_ylabel("gain in consecutive correct tokens (%)")
    axes[0].set_title(_what(result), fontsize=10, loc="left")
    if len(pairs) > 1:
        _gains(axes[1], pairs, "true prefix in two layers only", result)
    return _save(figure, result, folder)


def _gains(axes: Any, found: Sequence[ScheduleResult], label: str, result: TimingResult) -> None:
    names = [str(s.schedule.layers[0]) if s.schedule.kind == "from" else s.schedule.name for s in found]
    changed = f"prefix predicted wrongly ({result.changed_blocks / result.blocks:.0%})"
    _bars(axes, 0, 2, [s.gain for s in found], "all blocks")
    _bars(axes, 1, 2, [s.changed_gain for s in found], changed)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel(label)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def draw_predecessor(result: PredecessorResult, folder: Path) -> tuple[Path, Path]:
    """What a wrong predecessor or a wrong history costs, by slot, and the layers in which the true predecessor is worth most."""
    figure, axes = _panels(2, 4.4)
    slots = result.slots
    wrong = {name: [_named(slot.content, name) for slot in slots] for name in (PREDECESSOR, HISTORY)}
    for number, name in enumerate(wrong):
        _bars(axes[0], 2 * number, 4, [c.truth_changed for c in wrong[name]], f"all true (where the {name} is predicted wrongly)")
        _bars(axes[0], 2 * number + 1, 4, [c.accuracy_changed for c in wrong[name]], f"wrong {name}")
    axes[0].set_xticks(range(len(slots)), [str(slot.slot) for slot in slots])
    axes[0].set_xlabel("slot")
    axes[0].set_ylabel("accuracy of the slot's token (%)")
    axes[0].set_title(_what(result), fontsize=10, loc="left")
    axes[0].legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    names = ["none", *(condition.name for condition in slots[0].timing[:-1]), "all"]
    for number, slot in enumerate(slots):
        shares = [_named(slot.content, PREDECESSOR).accuracy_changed, *(c.accuracy_changed for c in slot.timing)]
        _bars(axes[1], number, len(slots), shares, f"slot {slot.slot}")
    axes[1].set_xticks(range(len(names)), names)
    axes[1].set_xlabel("layers with the true predecessor's keys and values")
    axes[1].legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(slots))
    return _save(figure, result, folder)


def _named(conditions: Sequence[ConditionResult], name: str) -> ConditionResult:
    return next(condition for condition in conditions if condition.name == name)


def _bars(axes: Any, number: int, count: int, shares: Sequence[Share], label: str) -> None:
    """One of `count` series of bars beside each other; a share that nothing counts for leaves its place empty."""
    width = min(BAR, 0.8 / count)
    places = [position + (number - (count - 1) / 2) * width for position in range(len(shares))]
    axes.bar(
        places, _percent(shares), width * 0.92, yerr=_spread(shares), color=colour(number + 2), label=label,
        error_kw={"linewidth": 0.8},
    )  # fmt: skip


def _percent(shares: Sequence[Share]) -> list[float]:
    return [float("nan") if share.value is None else 100 * share.value for share in shares]


def _spread(shares: Sequence[Share]) -> tuple[list[float], list[float]]:
    """Distances of the interval's ends from the value; a resampled interval may miss it by a rounding."""
    below, above = [], []
    for share in shares:
        value, (low, high) = share.value or 0.0, share.ci95 or (0.0, 0.0)
        below.append(max(0.0, 100 * (value - low)) if share.ci95 else 0.0)
        above.append(max(0.0, 100 * (high - value)) if share.ci95 else 0.0)
    return below, above


def _panels(count: int, width: float) -> tuple[Any, list[Any]]:
    prepare_matplotlib()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width * count, 3.6), squeeze=False, sharey=True)
    return figure, list(axes[0])


def _what(result: StudyResult) -> str:
    return f"{result.subject.drafter}, {result.settings.prompts}, {result.blocks} blocks"


def _save(figure: Any, result: StudyResult, folder: Path) -> tuple[Path, Path]:
    png, svg = folder / f"{result.study}.png", folder / f"{result.study}.svg"
    save_figure(figure, png, svg)
    return png, svg
