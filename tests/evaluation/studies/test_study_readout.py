"""The readout study: a token planted in one layer's states is read there and nowhere else; nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspine.errors import UserError
from dspine.evaluation.studies import readout as readout_module
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.probe import FitSettings
from dspine.evaluation.studies.readout import BlockStates, FitAnswers, block_states, num_steps, study_readout
from dspine.evaluation.studies.results import BlockSettings
from dspine.training.corpus import Answer

FIT = FitSettings(answers=2, selection_answers=1, rank=8, epochs=4, batch_rows=16)
Study = Callable[..., StudiedDrafter]


@pytest.fixture
def sets(long_answers: list[Answer]) -> tuple[FitAnswers, list[Answer]]:
    return FitAnswers.split(long_answers[:3], FIT), long_answers[3:5]


def test_answers_are_split_in_order(answers: list[Answer]) -> None:
    parts = FitAnswers.split(answers, FIT)
    assert (parts.fit, parts.selection) == (answers[:2], answers[2:3])
    with pytest.raises(UserError, match="only 2 answers, 2 of them to fit to, leave none to choose by"):
        FitAnswers.split(answers[:2], FIT)


def test_block_states_stand_beside_their_own_tokens(kind: str, study: Study, answer: Answer, settings: BlockSettings) -> None:
    studied = study(kind)
    found = block_states(studied, answer, settings)
    assert found is not None
    m = studied.num_draft_tokens
    assert found.states.shape[:3] == (3, 4, m)
    text = answer.ids[answer.prompt_length :]
    windows = [text[i : i + m] for i in range(len(text) - m + 1)]
    assert all(tokens in windows for tokens in found.tokens.tolist())
    assert found.drafted.shape == found.tokens.shape
    assert block_states(studied, replace(answer, ids=answer.ids[: answer.prompt_length + 3]), settings) is None


def test_a_planted_token_is_read_where_it_was_planted(
    study: Study, sets: tuple[FitAnswers, list[Answer]], settings: BlockSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 2 says its token in the head's own terms, in the first group of slots only."""
    studied = study("dflash")
    head = studied.target.head_weight

    def planted(own: StudiedDrafter, answer: Answer, blocks: BlockSettings) -> BlockStates | None:
        found = block_states(own, answer, blocks)
        if found is None:
            return None
        states = found.states.clone()
        readable = torch.linalg.pinv(head)[:, found.tokens].movedim(0, -1)  # the head reads these tokens from them
        states[1, :, :2] = readable[:, :2]
        return BlockStates(states, found.tokens, found.drafted)

    monkeypatch.setattr(readout_module, "block_states", planted)
    result = study_readout(studied, *sets, settings, FIT, tmp_path)
    assert result.slot_groups == ((1, 2), (3, 4), (5, 7))
    accuracy = [[share.value for share in layer.groups] for layer in result.layers]
    assert accuracy[1][0] is not None
    assert accuracy[1][0] > 0.9
    others = [value for layer, row in enumerate(accuracy) for group, value in enumerate(row) if (layer, group) != (1, 0)]
    assert max(value for value in others if value is not None) < 0.5
    assert result.layers[1].slots[2].value == pytest.approx(accuracy[1][1], abs=0.3)


def test_the_drafts_own_accuracy_stands_beside(
    study: Study, sets: tuple[FitAnswers, list[Answer]], settings: BlockSettings, tmp_path: Path
) -> None:
    studied = study("dspine")
    steps: list[int] = []
    result = study_readout(studied, *sets, settings, FIT, tmp_path, steps.append)
    assert sum(steps) == num_steps(studied, *sets, FIT) == 3 + 2 + 4 * 3
    right = total = 0
    for answer in sets[1]:
        found = block_states(studied, answer, settings)
        assert found is not None
        right += int((found.tokens == found.drafted)[:, 0].sum())
        total += found.tokens.shape[0]
    assert result.draft.slots[0].value == right / total
    assert result.draft.slots[0].total == total == result.blocks
    assert (result.fit_prompts, result.fit_answers, result.selection_answers, result.answers) == ("questions", 2, 1, 2)
    assert [layer.layer for layer in result.layers] == [1, 2, 3]


def test_nothing_is_worked_out_twice(
    study: Study, sets: tuple[FitAnswers, list[Answer]], settings: BlockSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studied, drafted = study("dspine"), list[Answer]()

    def counting(own: StudiedDrafter, answer: Answer, blocks: BlockSettings) -> BlockStates | None:
        drafted.append(answer)
        return block_states(own, answer, blocks)

    monkeypatch.setattr(readout_module, "block_states", counting)
    whole = study_readout(studied, *sets, settings, FIT, tmp_path / "whole")
    assert len(drafted) == 5

    def stop_after(count: int) -> Callable[[int], None]:
        seen: list[int] = []

        def on_step(done: int) -> None:
            seen.append(done)
            if len(seen) == count:
                raise KeyboardInterrupt

        return on_step

    for count in (2, 6, 17):  # among the answers to fit to, in the second probe, at the last tested answer
        with pytest.raises(KeyboardInterrupt):
            study_readout(studied, *sets, settings, FIT, tmp_path / "parts", stop_after(count))
    drafted.clear()
    steps: list[int] = []
    assert study_readout(studied, *sets, settings, FIT, tmp_path / "parts", steps.append) == whole
    assert drafted == []
    assert sum(steps) == num_steps(studied, *sets, FIT)
    with pytest.raises(UserError, match="holds a study with fit = "):
        study_readout(studied, *sets, settings, replace(FIT, rank=3), tmp_path / "parts")


def test_prompts_of_both_sets_are_refused(study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is among the test prompts too"):
        study_readout(study("dflash"), FitAnswers.split(answers, FIT), answers[2:], settings, FIT, tmp_path)
    short = [replace(answer, ids=answer.ids[: answer.prompt_length + 2]) for answer in answers[:3]]
    with pytest.raises(UserError, match="no answer to fit to holds a block of 8 tokens"):
        study_readout(study("dflash"), FitAnswers.split(short, FIT), answers[3:], settings, FIT, tmp_path)


def test_labels_of_drafts_from_few_tokens(
    study: Study, sets: tuple[FitAnswers, list[Answer]], settings: BlockSettings, tmp_path: Path
) -> None:
    """A token outside the draft vocabulary is never read."""
    absent = {token for answer in sets[1] for token in answer.ids[answer.prompt_length :]}
    ids = torch.tensor([token for token in range(260) if token not in absent])
    result = study_readout(study("dflash", draft_ids=ids), *sets, settings, FIT, tmp_path)
    assert all(share.value == 0 for layer in (*result.layers, result.draft) for share in layer.groups)
