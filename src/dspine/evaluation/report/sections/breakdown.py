"""What a round consists of: `dspine bench breakdown` in all its parts, `dspine bench speed` in three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from dspine.evaluation.breakdown import BreakdownReport
from dspine.evaluation.report.page import MISSING, Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Results
from dspine.evaluation.report.style import PALETTE, display, legend_above, new_axes, styled
from dspine.evaluation.speed import SpeedReport
from dspine.stages import STAGES

TEXT = (
    "Time of one verification round by what it is spent on. Parts exclude each other: bars are as long as a round. Where "
    "parts were timed one by one, what they leave of the wall time is told as the rest; in bench speed the drafter's "
    "context counts as draft."
)
SHADES = {
    "draft backbone": "accent-soft",
    "draft": "accent-soft",
    "injection": "accent",
    "head": "s4",
    "transition cache": "s2",
    "selection": "s3",
    "verification": "s1",
    "acceptance": "s5",
    "bookkeeping": "s6",
    "rest": "s6",
}
LABELLED_SHARE = 0.09  # of the longest bar: narrower parts have no room for their number


@dataclass(frozen=True)
class Round:
    """One bar: milliseconds by part, in the order in which they stand."""

    label: str
    small: str
    parts: Mapping[str, float]
    source: int

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())


def breakdown_section(results: Results) -> Section | None:
    blocks = []
    for heading, name, rounds in (
        ("All parts", "breakdown", _of_breakdowns(results)),
        ("Draft, verification and the rest, in bench speed", "round", _of_speeds(results)),
    ):
        if rounds:
            blocks.append(Block(heading, (_drawing(rounds, name),), (_table(rounds),)))
    return Section("breakdown", "What a round consists of", TEXT, tuple(blocks)) if blocks else None


def _of_breakdowns(results: Results) -> list[Round]:
    rounds = []
    for result in results.of(BreakdownReport):
        r = result.data
        times = {part.stage: part.round_ms for part in r.stages}
        parts = {stage.replace("_", " "): times[stage] for stage in STAGES if stage in times}
        small = f"width {r.width}, {r.batch} at once, τ {r.acceptance_length:.2f}, rest {r.residual_share:.1%}"
        rounds.append(Round(display(result.row or r.drafter), small, parts, result.source.number))
    return rounds


def _of_speeds(results: Results) -> list[Round]:
    rounds = []
    for result in results.of(SpeedReport):
        r = result.data
        shares = {"draft": r.draft_share, "verification": r.verify_share, "rest": r.other_share}
        small = f"width {r.width}, {r.prompts} prompts, τ {r.acceptance_length:.2f}"
        parts = {part: share * r.round_ms for part, share in shares.items()}
        rounds.append(Round(display(result.row or r.drafter), small, parts, result.source.number))
    return rounds


def _parts(rounds: list[Round]) -> list[str]:
    """All parts of all rounds, in the order of a round."""
    return [part for part in SHADES if any(part in one.parts for one in rounds)]


def _drawing(rounds: list[Round], name: str) -> Drawing:
    title = "Time of one round, in milliseconds, by what it is spent on"
    words = "; ".join(f"{one.label}: " + ", ".join(f"{part} {ms:.2f}" for part, ms in one.parts.items()) for one in rounds)
    return Drawing(name, title, f"{words}.", _stack(rounds))


def _stack(rounds: list[Round]) -> Figure:
    longest = max(one.total_ms for one in rounds)
    parts = _parts(rounds)
    with styled():
        figure, axes = new_axes(0.75 + 0.36 * len(rounds) + 0.17 * -(-len(parts) // 3))
        for place, one in enumerate(rounds):
            left = 0.0
            for part in parts:
                ms = one.parts.get(part, 0.0)
                axes.barh(place, ms, 0.62, left=left, color=PALETTE[SHADES[part]], edgecolor=PALETTE["paper"], linewidth=0.6)
                if ms > LABELLED_SHARE * longest:
                    axes.text(left + ms / 2, place, f"{ms:.1f}", va="center", ha="center", color=PALETTE["paper"], weight="bold")
                left += ms
            axes.text(left + 0.015 * longest, place, f"{left:.1f}", va="center")
        for part in parts:
            axes.barh(0, 0, color=PALETTE[SHADES[part]], label=part)
        axes.set_yticks(range(len(rounds)), [one.label for one in rounds], color=PALETTE["ink"])
        axes.set_ylim(len(rounds) - 0.5, -0.5)
        axes.set_xlim(0, longest * 1.14)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ms per round")
        legend_above(figure, axes, "One round")
    return figure


def _table(rounds: list[Round]) -> Table:
    parts = _parts(rounds)
    rows = []
    for one in rounds:
        cells = [
            Cell(f"{one.parts[part]:.3f}", f"{one.parts[part] / one.total_ms:.1%}") if part in one.parts else Cell(MISSING)
            for part in parts
        ]
        rows.append((Cell(one.label, one.small, (one.source,)), *cells, Cell(f"{one.total_ms:.2f}", strong=True)))
    heads = (Cell("drafter"), *(Cell(part) for part in parts), Cell("sum"))
    return Table("Milliseconds per round, and their share", heads, tuple(rows))
