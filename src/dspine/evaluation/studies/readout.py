"""How much of a slot's true token can be read from each draft layer (specification, section 9)?

One probe for each layer (see `probe`), fitted to some answers, its epoch chosen on more, tested on answers to other prompts.
A layer's state is what it passes on: in DSpine, after the injection.

Shapes: a blocks of one answer, M candidates of a block, L layers, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspine.errors import UserError
from dspine.evaluation.studies.answers import check_disjoint
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.probe import Examples, FitSettings, Fitted, Probe, fit_probe, hits
from dspine.evaluation.studies.results import BlockSettings, Share, StudyResult, StudyRows, answer_key, common, study_rows
from dspine.evaluation.studies.sample import sample_blocks
from dspine.evaluation.studies.slots import SlotRange, slot_groups
from dspine.journal import Row, storage_errors
from dspine.modules.losses import DraftHead
from dspine.training.corpus import Answer

Advance = Callable[[int], None]


@dataclass(frozen=True)
class FitAnswers:
    """Answers to fit the probes to, and others to choose their epoch by."""

    fit: Sequence[Answer]
    selection: Sequence[Answer]

    @classmethod
    def split(cls, answers: Sequence[Answer], settings: FitSettings) -> FitAnswers:
        """The first ones to fit to, those after them to choose by. Raises UserError where none is left to choose by."""
        if len(answers) <= settings.answers:
            raise UserError(
                f"only {len(answers)} answers, {settings.answers} of them to fit to, leave none to choose by; fit to fewer"
            )
        return cls(answers[: settings.answers], answers[settings.answers :][: settings.selection_answers])


def num_steps(studied: StudiedDrafter, fit_answers: FitAnswers, answers: Sequence[Answer], fit: FitSettings) -> int:
    """What `study_readout` counts as it goes: answers drafted, and epochs of every layer's probe."""
    return len(fit_answers.fit) + len(fit_answers.selection) + len(answers) + fit.epochs * studied.num_layers


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """Top-1 accuracy of the true token, by group of slots and by slot. `layer` is counted from 1; 0 is the draft itself."""

    layer: int
    groups: tuple[Share, ...]
    slots: tuple[Share, ...]
    epoch: int | None = None
    selection_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReadoutResult(StudyResult):
    fit: FitSettings
    fit_prompts: str
    fit_answers: int
    selection_answers: int
    slot_groups: tuple[SlotRange, ...]
    layers: tuple[LayerResult, ...]
    draft: LayerResult  # what the drafter proposes in the same blocks


def study_readout(
    studied: StudiedDrafter, fit_answers: FitAnswers, answers: Sequence[Answer], settings: BlockSettings, fit: FitSettings,
    output: Path, on_step: Advance = lambda count: None,
) -> ReadoutResult:  # fmt: skip
    """Fit the probes and test them. Block states, probes and tested answers are kept in `output`, and not worked out again.

    Raises UserError where a prompt is fitted to and tested on, and where there is nothing to fit to.
    """
    check_disjoint([*fit_answers.fit, *fit_answers.selection], answers)
    head = studied.drafter.head(studied.target)
    fitted_to = [_prompts(fit_answers), len(fit_answers.fit), len(fit_answers.selection)]
    with study_rows(output, "readout", studied, settings, fit=asdict(fit), fitted_to=fitted_to) as kept:
        fitted = _probes(studied, fit_answers, settings, fit, kept, head, on_step)
        probes = [one.probe for one in fitted]
        rows: list[Row] = []
        for answer in answers:
            rows.append(kept.get("test " + answer_key(answer), partial(_test, studied, answer, settings, probes, head)))
            on_step(1)
    fields = common("readout", studied, settings, [row["blocks"] for row in rows])
    rows = [row for row in rows if row["blocks"]]
    groups = slot_groups(studied.num_draft_tokens)
    layers = (
        _layer_result(rows, layer, groups, fitted[layer - 1].epoch, fitted[layer - 1].selection_accuracy)
        for layer in range(1, studied.num_layers + 1)
    )
    return ReadoutResult(
        **fields,
        fit=fit,
        fit_prompts=_prompts(fit_answers),
        fit_answers=len(fit_answers.fit),
        selection_answers=len(fit_answers.selection),
        slot_groups=groups,
        layers=tuple(layers),
        draft=_layer_result(rows, 0, groups),
    )


def _prompts(answers: FitAnswers) -> str:
    return ", ".join(dict.fromkeys(answer.ref[0] for answer in (*answers.fit, *answers.selection)))


@dataclass(frozen=True)
class BlockStates:
    """Every layer's states [L, a, M, d] in the blocks of an answer, the true tokens [a, M], and the drafted ones [a, M]."""

    states: Tensor
    tokens: Tensor
    drafted: Tensor


def block_states(studied: StudiedDrafter, answer: Answer, settings: BlockSettings) -> BlockStates | None:
    """Draft the answer's blocks; None where it is too short for one."""
    blocks = sample_blocks(studied, answer, settings)
    return None if blocks is None else BlockStates(blocks.drafted.states, blocks.true[:, 1:], blocks.drafted.tokens)


def _probes(
    studied: StudiedDrafter, answers: FitAnswers, settings: BlockSettings, fit: FitSettings, kept: StudyRows,
    head: DraftHead, on_step: Advance,
) -> list[Fitted]:  # fmt: skip
    """Each layer's probe: from `output` where it is there, else fitted. States are read only if one has to be fitted."""
    sets: list[list[Examples]] = []

    def examples() -> list[list[Examples]]:
        if not sets:
            sets.extend(_collect(studied, part, settings, kept, head, on_step) for part in (answers.fit, answers.selection))
        return sets

    def make(layer: int) -> Row:
        fit_set, selection = (part[layer] for part in examples())
        one = fit_probe(fit_set, selection, head, fit, on_step)
        with storage_errors(kept.output):
            save_file(one.probe.state_dict(), kept.output / _probe_file(layer))
        return {"epoch": one.epoch, "selection_accuracy": one.selection_accuracy}

    found = []
    for layer in range(studied.num_layers):
        known = f"probe {layer + 1}" in kept
        row = kept.get(f"probe {layer + 1}", partial(make, layer))
        if known:
            on_step(fit.epochs)
        probe = Probe(studied.config.hidden_size, fit.rank)
        probe.load_state_dict(load_file(kept.output / _probe_file(layer)))
        found.append(Fitted(probe.to(studied.target.device), row["epoch"], row["selection_accuracy"]))
    if not sets:  # they were all there
        on_step(len(answers.fit) + len(answers.selection))
    return found


def _probe_file(layer: int) -> str:
    return f"probe-{layer + 1}.safetensors"


def _collect(
    studied: StudiedDrafter, answers: Sequence[Answer], settings: BlockSettings, kept: StudyRows, head: DraftHead,
    on_step: Advance,
) -> list[Examples]:  # fmt: skip
    """Each layer's examples from the answers' blocks. States go to disk in half precision as they come."""
    folder = kept.output / "states"
    folder.mkdir(exist_ok=True)

    def keep(answer: Answer, file: Path) -> Row:
        found = block_states(studied, answer, settings)
        if found is None:
            return {"blocks": 0}
        with storage_errors(file):
            save_file({"states": found.states.to(torch.float16), "tokens": found.tokens.contiguous()}, file)
        return {"blocks": found.tokens.shape[0]}

    states, tokens = [], []
    for answer in answers:
        file = folder / f"{answer.ref[0]}-{answer.ref[1]}.safetensors"
        if kept.get("states " + answer_key(answer), partial(keep, answer, file))["blocks"]:
            part = load_file(file, device=str(studied.target.device))
            states.append(part["states"].flatten(1, 2))
            tokens.append(part["tokens"].flatten())
        on_step(1)
    if not states:
        raise UserError(f"no answer to fit to holds a block of {studied.num_draft_tokens + 1} tokens; allow longer answers")
    labels = head.row_of(torch.cat(tokens))
    return [Examples(layer, labels) for layer in torch.cat(states, 1)]


def _test(studied: StudiedDrafter, answer: Answer, settings: BlockSettings, probes: Sequence[Probe], head: DraftHead) -> Row:
    """Correct tokens by slot: of the draft (layer 0), then of every layer's probe."""
    found = block_states(studied, answer, settings)
    if found is None:
        return {"blocks": 0, "correct": []}
    labels = head.row_of(found.tokens.flatten())
    right = [found.drafted == found.tokens]
    for probe, states in zip(probes, found.states, strict=True):
        right.append(hits(probe, Examples(states.flatten(0, 1), labels), head).view_as(found.tokens))
    return {"blocks": found.tokens.shape[0], "correct": [part.sum(0).tolist() for part in right]}


def _layer_result(
    rows: Sequence[Row], layer: int, groups: Sequence[SlotRange], epoch: int | None = None, selection: float | None = None
) -> LayerResult:
    def share(first: int, last: int) -> Share:
        correct = [sum(row["correct"][layer][first - 1 : last]) for row in rows]
        return Share.of(correct, [row["blocks"] * (last - first + 1) for row in rows])

    slots = range(1, groups[-1][1] + 1)
    return LayerResult(
        layer=layer,
        groups=tuple(share(*group) for group in groups),
        slots=tuple(share(slot, slot) for slot in slots),
        epoch=epoch,
        selection_accuracy=selection,
    )
