"""What is the adjacent predecessor worth, and in which layers (specification, section 9)?

A slot t is asked for its token with the token at slot t - 1, its predecessor, as the new anchor; what is older is context.
Content: predecessor and older history are each the true tokens or the draft's predictions, in all layers. Timing: history true,
predecessor predicted, but in some layers the other slots see the true predecessor's keys and values in the anchor's place; the
last layer is always among them. Whatever else a drafter makes of its anchor (DSpine's injected code, DFlash2's convolution,
DSpark's Markov head) stays the prediction's: the study moves attention alone.

A prediction may be right. What a condition does to the blocks that it really changes is therefore told apart.

Shapes: a anchors (blocks of one answer), M candidates of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from dspine.evaluation.studies.blocks import Context, StudiedDrafter, TrueAnswer
from dspine.evaluation.studies.results import BlockSettings, Share, StudyResult, answer_key, common, study_rows
from dspine.evaluation.studies.sample import sample_blocks
from dspine.evaluation.studies.slots import receiver_slots
from dspine.journal import Row
from dspine.training.corpus import Answer

TRUTH, PREDECESSOR, HISTORY, BOTH = "truth", "predecessor", "history", "both"
CONTENTS = (TRUTH, PREDECESSOR, HISTORY, BOTH)  # what is predicted; truth: nothing


def key_value_layers(num_layers: int) -> tuple[tuple[int, ...], ...]:
    """The layers, counted from 1, that see the true predecessor's keys and values: the last alone; the last and one earlier,
    moved from L - 1 down to 1; all."""
    last = (num_layers,)
    pairs = tuple((earlier, num_layers) for earlier in range(num_layers - 1, 0, -1))
    every = tuple(range(1, num_layers + 1))
    return tuple(dict.fromkeys((last, *pairs, every)))


def layers_name(layers: tuple[int, ...]) -> str:
    return " + ".join(map(str, layers))


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """Accuracy of the slot's token over all blocks, and over the `changed` ones, where what is predicted is wrong; there
    `truth_changed` is what the same blocks give when nothing is predicted."""

    name: str
    accuracy: Share
    accuracy_changed: Share
    truth_changed: Share


@dataclass(frozen=True, kw_only=True)
class SlotResult:
    slot: int
    content: tuple[ConditionResult, ...]
    timing: tuple[ConditionResult, ...]  # named by the layers that see the true predecessor


@dataclass(frozen=True, kw_only=True)
class PredecessorResult(StudyResult):
    slots: tuple[SlotResult, ...]


def study_predecessor(
    studied: StudiedDrafter, answers: Sequence[Answer], settings: BlockSettings, output: Path,
    on_answer: Callable[[int], None] = lambda count: None,
) -> PredecessorResult:  # fmt: skip
    """Measure every condition on blocks of the answers; finished answers are kept in `output`."""
    slots = receiver_slots(studied.num_draft_tokens)
    rows: list[Row] = []
    with study_rows(output, "predecessor", studied, settings) as kept:
        for answer in answers:
            rows.append(kept.get(answer_key(answer), partial(_measure, studied, answer, settings)))
            on_answer(1)
    fields = common("predecessor", studied, settings, [row["blocks"] for row in rows])
    rows = [row for row in rows if row["blocks"]]
    return PredecessorResult(**fields, slots=tuple(_slot_result(rows, slot, studied.num_layers) for slot in slots))


def _measure(studied: StudiedDrafter, answer: Answer, settings: BlockSettings) -> Row:
    blocks = sample_blocks(studied, answer, settings)
    if blocks is None:
        return {"blocks": 0, "slots": {}}
    slots: Row = {}
    for slot in receiver_slots(studied.num_draft_tokens):
        hits = slot_hits(studied, blocks.truth, blocks.anchors, blocks.true, blocks.drafted.tokens, slot)
        slots[str(slot)] = {name: found.int().tolist() for name, found in hits.items()}
    return {"blocks": blocks.anchors.shape[0], "slots": slots}


def slot_hits(
    studied: StudiedDrafter, truth: TrueAnswer, anchors: Tensor, true: Tensor, drafted: Tensor, slot: int
) -> dict[str, Tensor]:
    """Where the slot's token comes out right [a], by condition; and, as "wrong predecessor" and "wrong history", where the
    draft's differ from the true ones. true [a, M + 1] has the anchors first, drafted [a, M] does not."""
    right, guess = true[:, slot - 1], drafted[:, slot - 2]
    label = true[:, slot]
    true_history = truth.context.until(anchors + slot - 1)
    drafted_history = studied.continued(truth, anchors, drafted[:, : slot - 2], guess)

    def hits(predecessor: Tensor, history: Context, anchor_kv: dict[int, Tensor] | None = None) -> Tensor:
        return studied.draft(predecessor, history, 1, anchor_kv).tokens[:, 0] == label

    of_truth = studied.draft(right, true_history, 1)
    found = {
        TRUTH: of_truth.tokens[:, 0] == label,
        PREDECESSOR: hits(guess, true_history),
        HISTORY: hits(right, drafted_history),
        BOTH: hits(guess, drafted_history),
        "wrong predecessor": guess != right,
        "wrong history": (drafted[:, : slot - 2] != true[:, 1 : slot - 1]).any(-1),
    }
    for layers in key_value_layers(studied.num_layers):
        kv = {layer: of_truth.anchor_kv[layer - 1] for layer in layers}
        found[layers_name(layers)] = hits(guess, true_history, kv)
    return found


def _slot_result(rows: Sequence[Row], slot: int, num_layers: int) -> SlotResult:
    found = [row["slots"][str(slot)] for row in rows]  # of each answer

    def condition(name: str) -> ConditionResult:
        everywhere = [[1] * len(answer[name]) for answer in found]
        changed = [_changed(answer, name) for answer in found]
        return ConditionResult(
            name=name,
            accuracy=_share(found, name, everywhere),
            accuracy_changed=_share(found, name, changed),
            truth_changed=_share(found, TRUTH, changed),
        )

    timing = [layers_name(layers) for layers in key_value_layers(num_layers)]
    return SlotResult(slot=slot, content=tuple(map(condition, CONTENTS)), timing=tuple(map(condition, timing)))


def _changed(answer: dict[str, list[int]], name: str) -> list[int]:
    """1 at each block of an answer in which the condition's predictions are wrong."""
    predecessor, history = answer["wrong predecessor"], answer["wrong history"]
    if name == TRUTH:
        return [0] * len(predecessor)
    if name == HISTORY:
        return history
    if name == BOTH:
        return [max(pair) for pair in zip(predecessor, history, strict=True)]
    return predecessor


def _share(found: Sequence[dict[str, list[int]]], name: str, counted: Sequence[list[int]]) -> Share:
    hits = [
        sum(hit * counts for hit, counts in zip(answer[name], own, strict=True))
        for answer, own in zip(found, counted, strict=True)
    ]
    return Share.of(hits, [sum(own) for own in counted])
