"""Acceptance lengths that may be compared with each other, and the reference's lead over the strongest baseline.

Two results compare when everything but the drafter is the same: collection, target, prompts and decoding (`Setting`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from dspine.evaluation.acceptance import AcceptanceReport
from dspine.evaluation.report.kinds import ComparisonTable, Value
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import REFERENCE

RESAMPLES = 2000
ENGINE = "dspine"  # the decoder of results that no server gave
_HEAD = re.compile(r"(?P<benchmark>.+) T=(?P<temperature>[0-9.]+)$")  # of a table of `dspine compare`


@dataclass(frozen=True, order=True)
class Setting:
    """What two acceptance lengths must share to be compared. `prompts` is 0 where only a comparison's table is known."""

    collection: str
    target: str
    temperature: float
    benchmark: str
    prompts: int = 0
    max_new_tokens: int = 0
    chat: bool = True
    thinking: str = ""
    prompts_sha256: str = ""  # results from before it was recorded compare with each other only


@dataclass(frozen=True)
class Tau:
    """One acceptance length with its 95 % interval; `report` is the whole result, where the table is not all there is."""

    setting: Setting
    row: str
    drafter: str
    value: float
    low: float
    high: float
    source: int
    report: AcceptanceReport | None = None


@dataclass(frozen=True)
class Lead:
    """By how much the reference's tau exceeds the strongest other drafter's: ratio - 1, with a 95 % interval where
    conversations can be paired."""

    rival: Tau
    reference: Tau
    gain: float
    interval: tuple[float, float] | None


def read_taus(results: Results) -> list[Tau]:
    """All acceptance lengths: of result files, and of comparison tables whose row files are not there."""
    reports = results.of(AcceptanceReport)
    taken: defaultdict[tuple[Setting, str], int] = defaultdict(int)
    taus = []
    for result in reports:
        tau = _of_report(result)
        taken[tau.setting, tau.row] += 1
        if taken[tau.setting, tau.row] > 1:  # the same drafter once more: another width, checkpoint or day
            tau = _of_report(result, row=f"{tau.row} ({PurePath(result.source.file).stem})")
        taus.append(tau)
    known = {(tau.setting.collection, tau.row, tau.setting.benchmark, tau.setting.temperature) for tau in taus}
    for table in results.of(ComparisonTable):
        for tau in _of_table(table):
            if (tau.setting.collection, tau.row, tau.setting.benchmark, tau.setting.temperature) not in known:
                taus.append(tau)
    return taus


def _of_report(result: Result[AcceptanceReport], row: str = "") -> Tau:
    data = result.data
    setting = Setting(
        collection=result.collection,
        target=data.target,
        temperature=data.temperature,
        benchmark=data.benchmark,
        prompts=data.prompts,
        max_new_tokens=data.max_new_tokens,
        chat=data.chat,
        thinking=data.thinking,
        prompts_sha256=data.prompts_sha256,
    )
    low, high = data.acceptance_length_ci95
    row = row or result.row or (data.drafter if data.decoder == ENGINE else f"{data.drafter}, {data.decoder}")
    return Tau(setting, row, data.drafter, data.acceptance_length, low, high, result.source.number, data)


def _of_table(table: Result[ComparisonTable]) -> Iterable[Tau]:
    for row in table.data.rows:
        for head in row:
            match = _HEAD.match(head)
            cells: list[Value] = [row.get(f"{head}{end}") for end in ("", " low", " high")]
            numbers = [float(cell) for cell in cells if isinstance(cell, (int, float))]
            if match is not None and len(numbers) == 3:
                setting = Setting(table.collection, "", float(match["temperature"]), match["benchmark"])
                value, low, high = numbers
                yield Tau(setting, str(row["row"]), str(row["drafter"]), value, low, high, table.source.number)


def by_setting(taus: Iterable[Tau]) -> dict[Setting, list[Tau]]:
    """Settings in order, each with its rows, the reference last as the eye lands there."""
    groups: defaultdict[Setting, list[Tau]] = defaultdict(list)
    for tau in taus:
        groups[tau.setting].append(tau)
    return {setting: sorted(groups[setting], key=lambda tau: tau.drafter == REFERENCE) for setting in sorted(groups)}


def reference_of(taus: Sequence[Tau]) -> Tau | None:
    """The row that is DSpine as trained: named so, or the first with that drafter."""
    ours = [tau for tau in taus if tau.drafter == REFERENCE]
    return next((tau for tau in ours if tau.row == REFERENCE), ours[0] if ours else None)


def lead_of(taus: Sequence[Tau]) -> Lead | None:
    """The lead among rows of one setting; None without the reference or without another drafter."""
    reference, rivals = reference_of(taus), [tau for tau in taus if tau.drafter != REFERENCE]
    if reference is None or not rivals:
        return None
    rival = max(rivals, key=lambda tau: tau.value)
    return Lead(rival, reference, reference.value / rival.value - 1, paired_interval(reference.report, rival.report))


def paired_interval(ours: AcceptanceReport | None, theirs: AcceptanceReport | None) -> tuple[float, float] | None:
    """95 % percentile interval of tau / tau' - 1 over conversations, the same ones drawn (with replacement) for both.

    None where the two did not decode the same conversations.
    """
    if ours is None or theirs is None or [c.index for c in ours.conversations] != [c.index for c in theirs.conversations]:
        return None
    counts = [np.array([(c.acceptance_length * c.rounds, c.rounds) for c in r.conversations]) for r in (ours, theirs)]
    drawn = np.random.default_rng(0).integers(len(counts[0]), size=(RESAMPLES, len(counts[0])))
    yields = [count[drawn].sum(1) for count in counts]  # [resamples, 2]: tokens yielded, rounds
    if any((total[:, 1] == 0).any() for total in yields):
        return None
    gains = (yields[0][:, 0] / yields[0][:, 1]) / (yields[1][:, 0] / yields[1][:, 1]) - 1
    low, high = np.quantile(gains, (0.025, 0.975)).tolist()
    return low, high
