"""When does a draft layer need to know the prefix? The true prefix's features from some layers on (specification, section 9).

The middle token of a block (slot s, see `slots.middle_anchor`) becomes the anchor of a new one. The s - 1 tokens between the two
anchors are the draft's own predictions or the true tokens; the target encodes the context up to them, and its fused features are
the keys and values of the draft layers. Baseline: the predicted prefix in every layer. A schedule gives the true prefix's to some
layers. The new anchor is the true token always. Measured: how many tokens from the new anchor on are correct one after the other.

Shapes: a anchors (blocks of one answer), M candidates of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from dspine.evaluation.studies.blocks import StudiedDrafter, TrueAnswer
from dspine.evaluation.studies.results import BlockSettings, Share, StudyResult, answer_key, common, study_rows
from dspine.evaluation.studies.sample import sample_blocks
from dspine.evaluation.studies.slots import middle_anchor
from dspine.journal import Row
from dspine.training.corpus import Answer


@dataclass(frozen=True)
class Schedule:
    """Layers, counted from 1, that get the true prefix: all from the first of them on, or only the last and one earlier."""

    kind: Literal["from", "pair"]
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"from {self.layers[0]}" if self.kind == "from" else " + ".join(map(str, self.layers))


def schedules(num_layers: int) -> tuple[Schedule, ...]:
    """True from layer l on, l = 1..L (l = 1, everywhere, is what the others approach), and the last with one of 2..L-1."""
    every = tuple(range(1, num_layers + 1))
    return (
        *(Schedule("from", every[first:]) for first in range(num_layers)),
        *(Schedule("pair", (earlier, num_layers)) for earlier in every[1:-1]),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleResult:
    """`gain` is relative to the baseline's correct tokens; `changed_gain` counts only blocks whose predicted prefix is wrong, the
    only ones that a schedule can change."""

    schedule: Schedule
    correct_tokens: float  # mean per block
    gain: Share
    changed_gain: Share


@dataclass(frozen=True, kw_only=True)
class TimingResult(StudyResult):
    anchor_slot: int
    measured_slots: tuple[int, int]
    changed_blocks: int
    baseline_correct_tokens: float
    schedules: tuple[ScheduleResult, ...]


def study_timing(
    studied: StudiedDrafter, answers: Sequence[Answer], settings: BlockSettings, output: Path,
    on_answer: Callable[[int], None] = lambda count: None,
) -> TimingResult:  # fmt: skip
    """Measure every schedule on blocks of the answers; finished answers are kept in `output`."""
    middle_anchor(studied.num_draft_tokens)
    rows: list[Row] = []
    with study_rows(output, "timing", studied, settings) as kept:
        for answer in answers:
            rows.append(kept.get(answer_key(answer), partial(_measure, studied, answer, settings)))
            on_answer(1)
    return _result(studied, settings, rows)


def _measure(studied: StudiedDrafter, answer: Answer, settings: BlockSettings) -> Row:
    blocks = sample_blocks(studied, answer, settings)
    if blocks is None:
        return {"changed": [], "correct": {}}
    slot = middle_anchor(studied.num_draft_tokens)
    prefix = blocks.drafted.tokens[:, : slot - 1]
    changed = (prefix != blocks.true[:, 1:slot]).any(-1)
    correct = correct_tokens(studied, blocks.truth, blocks.anchors, blocks.true, prefix)
    return {"changed": changed.int().tolist(), "correct": {name: counts.tolist() for name, counts in correct.items()}}


def correct_tokens(
    studied: StudiedDrafter, truth: TrueAnswer, anchors: Tensor, true: Tensor, prefix: Tensor
) -> dict[str, Tensor]:
    """Consecutive correct tokens [a] after the new anchor, by schedule name and for the "baseline"; true [a, M + 1] are the
    blocks' tokens, the anchors' positions [a] first, and prefix [a, s - 1] those that stand for the tokens in between."""
    slot = prefix.shape[1] + 1
    known, wanted = true[:, slot], true[:, slot + 1 :]
    true_context = truth.context.until(anchors + slot)
    predicted_context = studied.continued(truth, anchors, prefix, known)
    counts = {}
    for name, layers in (("baseline", ()), *((s.name, s.layers) for s in schedules(studied.num_layers))):
        context = predicted_context.with_layers(true_context, layers)
        hits = studied.draft(known, context, wanted.shape[1]).tokens == wanted
        counts[name] = hits.long().cumprod(-1).sum(-1)
    return counts


def _result(studied: StudiedDrafter, settings: BlockSettings, rows: Sequence[Row]) -> TimingResult:
    fields = common("timing", studied, settings, [len(row["changed"]) for row in rows])
    rows = [row for row in rows if row["changed"]]
    slot = middle_anchor(studied.num_draft_tokens)

    def sums(name: str, changed_only: bool = False) -> list[int]:
        return [
            sum(count for count, changed in zip(row["correct"][name], row["changed"], strict=True) if changed or not changed_only)
            for row in rows
        ]

    def result(schedule: Schedule) -> ScheduleResult:
        return ScheduleResult(
            schedule=schedule,
            correct_tokens=sum(sums(schedule.name)) / fields["blocks"],
            gain=Share.of(sums(schedule.name), sums("baseline")).minus_one(),
            changed_gain=Share.of(sums(schedule.name, True), sums("baseline", True)).minus_one(),
        )

    return TimingResult(
        **fields,
        anchor_slot=slot,
        measured_slots=(slot + 1, studied.num_draft_tokens),
        changed_blocks=sum(sum(row["changed"]) for row in rows),
        baseline_correct_tokens=sum(sums("baseline")) / fields["blocks"],
        schedules=tuple(result(schedule) for schedule in schedules(studied.num_layers)),
    )
