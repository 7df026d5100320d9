"""Acceptance of every draft position: given that all before it were accepted, and with all before it."""

from __future__ import annotations

from itertools import groupby

from matplotlib.ticker import MaxNLocator

from dspine.evaluation.acceptance import AcceptanceReport
from dspine.evaluation.report.page import MISSING, Block, Cell, Drawing, Section, Table
from dspine.evaluation.report.results import Results
from dspine.evaluation.report.sections.acceptance import drawing_name
from dspine.evaluation.report.style import MARKERS, REFERENCE, colour, display, legend_above, new_axes, styled
from dspine.evaluation.report.taus import Setting, Tau, by_setting, read_taus, reference_of

TEXT = (
    "Conditional acceptance is the share of rounds in which the token at a position stood, among those in which all before "
    "it stood: what a position adds. Cumulative acceptance is the share of all rounds that came at least that far; its sum "
    "plus 1 is τ. Curves leave out positions that fewer than 20 rounds came to; the tables have them, with the number of "
    "rounds."
)
LEAST_ROUNDS = 20  # a share of fewer is noise that the eye would take for a trend
KINDS = {"conditional": "accepted, given all before", "cumulative": "accepted, with all before"}


def positions_section(results: Results) -> Section | None:
    settings = {}
    for setting, taus in by_setting(read_taus(results)).items():
        whole = [(tau, tau.report) for tau in taus if tau.report is not None]
        if whole:
            settings[setting] = whole
    if not settings:
        return None
    blocks = []
    for (collection, target, temperature), group in groupby(settings, key=lambda s: (s.collection, s.target, s.temperature)):
        rows = {setting: settings[setting] for setting in group}
        where = f"comparison {collection}" if collection else target
        drawings = tuple(_curves(setting, kind, taus) for kind in KINDS for setting, taus in rows.items())
        blocks.append(Block(f"{where}, T = {temperature:g}", drawings, tuple(_table(rows, kind) for kind in KINDS)))
    return Section("positions", "Acceptance by position", TEXT, tuple(blocks))


def _shares(report: AcceptanceReport, kind: str) -> tuple[float, ...]:
    return report.conditional_acceptance if kind == "conditional" else report.acceptance_by_position


def _rounds_at(report: AcceptanceReport, kind: str) -> list[int]:
    """The rounds that each position's share is of: all, or those that accepted everything before it."""
    if kind == "cumulative":
        return [report.rounds] * len(report.acceptance_by_position)
    return [round(share * report.rounds) for share in (1.0, *report.acceptance_by_position[:-1])]


def _curves(setting: Setting, kind: str, taus: list[tuple[Tau, AcceptanceReport]]) -> Drawing:
    reference = reference_of([tau for tau, _ in taus])
    with styled():
        figure, axes = new_axes(2.3)
        for tau, report in taus:
            shares = zip(_shares(report, kind), _rounds_at(report, kind), strict=True)
            shown = [(position, share) for position, (share, rounds) in enumerate(shares, 1) if rounds >= LEAST_ROUNDS]
            axes.plot(
                [position for position, _ in shown],
                [share for _, share in shown],
                color=colour(tau.drafter, tau is not reference),
                marker=MARKERS.get(tau.drafter, "X"),
                linewidth=2.0 if tau is reference else 1.2,
                linestyle="--" if tau.drafter == REFERENCE and tau is not reference else "-",
                label=display(tau.row),
            )
        axes.set_ylim(0, 1)
        axes.set_xlim(0.7, max(len(_shares(report, kind)) for _, report in taus) + 0.3)
        axes.set_xlabel("draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter("{x:.0%}")
        legend_above(figure, axes, f"{display(setting.benchmark)}: {KINDS[kind]}")
    description = "; ".join(f"{display(tau.row)} " + ", ".join(f"{s:.0%}" for s in _shares(r, kind)) for tau, r in taus)
    title = f"{display(setting.benchmark)}, T = {setting.temperature:g}: {KINDS[kind]}, by draft position"
    return Drawing(drawing_name(kind, setting), title, f"{description}.", figure)


def _table(rows: dict[Setting, list[tuple[Tau, AcceptanceReport]]], kind: str) -> Table:
    longest = max(len(_shares(report, kind)) for taus in rows.values() for _, report in taus)
    body = []
    for setting, taus in rows.items():
        for tau, report in taus:
            counts = zip(_shares(report, kind), _rounds_at(report, kind), strict=True)
            cells = [Cell(f"{share:.1%}", f"of {rounds:,}") for share, rounds in counts]
            cells += [Cell(MISSING)] * (longest - len(cells))
            body.append((Cell(display(setting.benchmark)), Cell(display(tau.row), sources=(tau.source,)), *cells))
    heads = (Cell("benchmark"), Cell("drafter"), *(Cell(str(position)) for position in range(1, longest + 1)))
    return Table(f"{kind.capitalize()} acceptance by draft position", heads, tuple(body), labels=2, folded=True)
