"""Acceptance lengths per benchmark, with the lead over the strongest baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

from dspine.evaluation.report.page import MISSING, Block, Cell, Drawing, Fact, Section, Table
from dspine.evaluation.report.results import Results
from dspine.evaluation.report.style import PALETTE, REFERENCE, colour, display, new_axes, slug, styled
from dspine.evaluation.report.taus import Lead, Setting, Tau, by_setting, lead_of, read_taus, reference_of

TEXT = (
    "Acceptance length τ is the mean number of tokens that a verification round yields, the target's own included; plain "
    "decoding has 1. Whiskers and small numbers are 95 % intervals over prompts. The lead compares DSpine with the "
    "strongest other drafter on the same prompts, target and settings; its interval draws the same conversations for both."
)
BAR_IN = 0.25


def acceptance_section(results: Results) -> Section | None:
    settings = by_setting(read_taus(results))
    if not settings:
        return None
    blocks = []
    for (collection, target, temperature), group in groupby(settings, key=lambda s: (s.collection, s.target, s.temperature)):
        rows = {setting: settings[setting] for setting in group}
        longest = max(tau.high for taus in settings.values() for tau in taus)
        drawings = tuple(_bars(setting, taus, longest) for setting, taus in rows.items())
        where = f"comparison {collection}" if collection else target
        blocks.append(Block(f"{where}, T = {temperature:g}", drawings, (_table(rows),)))
    return Section("acceptance", "Acceptance length", TEXT, tuple(blocks), _facts(settings))


def drawing_name(kind: str, setting: Setting) -> str:
    """A file name that says what a figure shows."""
    parts = [kind, setting.collection, setting.benchmark, f"t{setting.temperature:g}"]
    if setting.prompts:
        parts += [setting.target, f"{setting.prompts}x{setting.max_new_tokens}", "" if setting.chat else "plain"]
        parts += [setting.thinking and f"thinking-{setting.thinking}", setting.prompts_sha256[:6]]
    return slug(*parts)


def lead_text(lead: Lead) -> str:
    return f"{lead.gain:+.1%} over {display(lead.rival.row)}"


def _bars(setting: Setting, taus: list[Tau], longest: float) -> Drawing:
    """Horizontal bars, one a row, named at their foot and numbered at their head: nothing is told by colour alone."""
    reference, lead = reference_of(taus), lead_of(taus)
    title = display(setting.benchmark)
    with styled():
        figure, axes = new_axes(0.62 + BAR_IN * len(taus))
        for place, tau in enumerate(reversed(taus)):
            shade = colour(tau.drafter, tau is not reference) if tau.drafter == REFERENCE else PALETTE["s1"]
            axes.barh(place, tau.value - 1, 0.66, left=1, color=shade)
            axes.plot([tau.low, tau.high], [place, place], color=PALETTE["ink"], linewidth=0.8)
            weight = "bold" if tau is reference else "normal"
            axes.text(tau.high + 0.02 * longest, place, f"{tau.value:.2f}", va="center", weight=weight)
        axes.set_yticks(range(len(taus)), [display(tau.row) for tau in reversed(taus)], color=PALETTE["ink"])
        axes.grid(axis="y", visible=False)
        axes.set_xlim(1, 1 + (longest - 1) * 1.16)
        axes.set_title(title)
        if lead is not None:
            axes.set_title(lead_text(lead), loc="right", color=PALETTE["accent"] if lead.gain > 0 else PALETTE["muted"])
    description = "; ".join(f"{display(tau.row)} {tau.value:.2f} ({tau.low:.2f} to {tau.high:.2f})" for tau in taus)
    if lead is not None:
        description += f". {display(lead.reference.row)}: {lead_text(lead)}"
    full_title = f"Acceptance length on {title}, T = {setting.temperature:g}"
    return Drawing(drawing_name("acceptance", setting), full_title, f"{description}.", figure)


def _table(rows: dict[Setting, list[Tau]]) -> Table:
    """Drafters by benchmarks, the leads below."""
    cells: defaultdict[str, dict[Setting, Tau]] = defaultdict(dict)
    for setting, taus in rows.items():
        for tau in taus:
            cells[tau.row][setting] = tau
    names = sorted(cells, key=lambda name: any(tau.drafter == REFERENCE for tau in cells[name].values()))
    body = [
        (
            Cell(display(name), _widths(cells[name].values())),
            *(_tau_cell(cells[name].get(setting), rows[setting]) for setting in rows),
        )
        for name in names
    ]
    leads = [lead_of(taus) for taus in rows.values()]
    if any(leads):
        body.append((Cell("lead", strong=True), *map(_lead_cell, leads)))
    heads = (Cell("drafter"), *(Cell(display(s.benchmark), _settings(s)) for s in rows))
    temperature = next(iter(rows)).temperature
    return Table(f"Acceptance length at T = {temperature:g}", heads, tuple(body))


def _widths(taus: Iterable[Tau]) -> str:
    """How many slots a row's rounds verified, where the results say so."""
    widths = dict.fromkeys(tau.report.width for tau in taus if tau.report is not None)
    return f"width {', '.join(widths)}" if widths else ""


def _settings(setting: Setting) -> str:
    if not setting.prompts:
        return ""
    chat = "" if setting.chat else ", no chat"
    thinking = f", thinking {setting.thinking}" if setting.thinking else ""
    return f"{setting.prompts} prompts, {setting.max_new_tokens} tokens{chat}{thinking}"


def _tau_cell(tau: Tau | None, rivals: list[Tau]) -> Cell:
    if tau is None:
        return Cell(MISSING)
    best = tau.value == max(rival.value for rival in rivals)
    return Cell(f"{tau.value:.2f}", f"{tau.low:.2f} to {tau.high:.2f}", (tau.source,), strong=best)


def _lead_cell(lead: Lead | None) -> Cell:
    if lead is None:
        return Cell(MISSING)
    interval = f"{lead.interval[0]:+.1%} to {lead.interval[1]:+.1%}, " if lead.interval else ""
    small = f"{interval}over {display(lead.rival.row)}"
    sources = tuple(sorted({lead.reference.source, lead.rival.source}))
    return Cell(f"{lead.gain:+.1%}", small, sources)


def _facts(settings: dict[Setting, list[Tau]]) -> tuple[Fact, ...]:
    """The mean lead at the lowest temperature of the first collection, for the top of the page."""
    first = next(iter(settings))
    leads = [
        lead
        for setting, taus in settings.items()
        if (setting.collection, setting.target, setting.temperature) == (first.collection, first.target, first.temperature)
        and (lead := lead_of(taus)) is not None
    ]
    if not leads:
        return ()
    mean = sum(lead.gain for lead in leads) / len(leads)
    sources = tuple(sorted({source for lead in leads for source in (lead.reference.source, lead.rival.source)}))
    label = f"mean lead in acceptance length over the strongest baseline, {len(leads)} benchmarks, T = {first.temperature:g}"
    best = max((lead.reference for lead in leads), key=lambda tau: tau.value)
    return (
        Fact(f"{mean:+.1%}", label, sources),
        Fact(
            f"{best.value:.2f}",
            f"tokens per round on {display(best.setting.benchmark)}, T = {first.temperature:g}",
            (best.source,),
        ),
    )
