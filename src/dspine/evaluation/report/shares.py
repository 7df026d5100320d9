"""Shares with their intervals, as cells and as bars: what the studies report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from dspine.evaluation.report.page import MISSING, Cell
from dspine.evaluation.report.style import PALETTE, display, legend_above, new_axes, slug, styled
from dspine.evaluation.studies.results import Share, StudyResult

BAR_IN, GAP_IN = 0.19, 0.12


@dataclass(frozen=True)
class Series:
    """Bars of one opacity, a share for every label."""

    name: str
    shares: tuple[Share, ...]
    opacity: float = 1.0


def share_cell(share: Share, form: str = ".1%", source: int | None = None) -> Cell:
    """The share, its interval below it."""
    if share.value is None or share.ci95 is None:
        return Cell(MISSING)
    low, high = share.ci95
    return Cell(f"{share.value:{form}}", f"{low:{form}} to {high:{form}}", () if source is None else (source,))


def share_text(share: Share, form: str = ".1%") -> str:
    """The share with its interval, in words."""
    if share.value is None or share.ci95 is None:
        return "nothing measured"
    return f"{share.value:{form}} ({share.ci95[0]:{form}} to {share.ci95[1]:{form}})"


def share_bars(
    title: str, axis: str, labels: Sequence[str], series: Sequence[Series], colour: str, form: str = ".1%"
) -> Figure:  # fmt: skip
    """Horizontal bars from 0, the series of a label below each other, whiskers for the intervals, numbers behind them."""
    group_in = BAR_IN * len(series) + GAP_IN
    ends = [end for one in series for share in one.shares if share.ci95 is not None for end in (*share.ci95, share.value or 0.0)]
    low, high = min(0.0, *ends, 0.0), max(0.0, *ends, 0.0)
    span = (high - low) or 1.0
    with styled():
        figure, axes = new_axes(0.78 + group_in * len(labels) + (0.2 * -(-len(series) // 3) if len(series) > 1 else 0.0))
        for number, one in enumerate(series):
            for place, share in enumerate(one.shares):
                if share.value is None or share.ci95 is None:
                    continue
                y = place * group_in + (number - (len(series) - 1) / 2) * BAR_IN
                axes.barh(y, share.value, BAR_IN * 0.82, color=colour, alpha=one.opacity, label=one.name if place == 0 else None)
                axes.plot(share.ci95, [y, y], color=PALETTE["ink"], linewidth=0.8)
                axes.text(max(share.ci95[1], 0.0) + 0.02 * span, y, f"{share.value:{form}}", va="center", fontsize=7.5)
        axes.set_yticks([place * group_in for place in range(len(labels))], labels, color=PALETTE["ink"])
        axes.set_ylim((len(labels) - 0.5) * group_in, -0.5 * group_in)
        axes.set_xlim(low - 0.02 * span, high + 0.18 * span)
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)
        legend_above(figure, axes, title)
    return figure


def subject_text(result: StudyResult) -> str:
    """Whom a study looked at, for a heading."""
    subject = f"{display(result.subject.drafter)} on {display(result.settings.prompts)}"
    return f"{subject}, {result.subject.target}: {result.blocks:,} blocks of {result.answers:,} answers"


def subject_name(result: StudyResult) -> str:
    """Whom a study looked at, for file names."""
    return slug(result.study, result.subject.drafter, result.settings.prompts, result.subject.weights_sha256[:6])
