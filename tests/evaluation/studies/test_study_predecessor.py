"""The predecessor study: conditions replace exactly what they say, and results count what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.evaluation.studies import predecessor as predecessor_module
from dspine.evaluation.studies.answers import block_anchors
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.predecessor import CONTENTS, key_value_layers, slot_hits, study_predecessor
from dspine.evaluation.studies.results import BlockSettings
from dspine.targets.model import Target
from dspine.training.anchors import block_tokens
from dspine.training.corpus import Answer
from dspine.training.sources import target_states

SLOT = 4
Study = Callable[..., StudiedDrafter]


def next_token(studied: StudiedDrafter, target: Target, ids: list[int]) -> int:
    """The first token that a fresh runner drafts after `ids`."""
    tokens = torch.tensor(ids)
    features, _ = target_states(target, tokens[:-1], studied.config.target_layer_ids)
    runner = studied.drafter.runner(target)
    cache = runner.new_cache(1, 4)
    runner.extend(features[None], tokens[None, 1:], cache)
    cache.lengths += len(ids) - 1
    return int(runner.propose(tokens[-1:], cache, 1, torch.zeros(1), None).tokens[0, 0])


def wrong(true: Tensor, target: Target) -> Tensor:
    """Drafted tokens [a, M] of which none is right."""
    return (true[:, 1:] + 5) % target.vocab_size


def test_the_layers_of_the_timing_part() -> None:
    assert key_value_layers(5) == ((5,), (4, 5), (3, 5), (2, 5), (1, 5), (1, 2, 3, 4, 5))
    assert key_value_layers(2) == ((2,), (1, 2))
    assert key_value_layers(1) == ((1,),)


def test_each_content_drafts_after_the_tokens_it_says(
    kind: str, study: Study, answer: Answer, anchors: Tensor, tiny_target: Target
) -> None:
    studied = study(kind)
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, studied.num_draft_tokens + 1)
    drafted = wrong(true, tiny_target)
    # A label that one condition would draft shows which one drafts it.
    for row, anchor in enumerate(anchors.tolist()):
        older = {False: true[row, 1 : SLOT - 1].tolist(), True: drafted[row, : SLOT - 2].tolist()}
        last = {False: int(true[row, SLOT - 1]), True: int(drafted[row, SLOT - 2])}
        start = answer.ids[: anchor + 1]
        expected = {
            name: next_token(
                studied, tiny_target, [*start, *older[name in {"history", "both"}], last[name in {"predecessor", "both"}]]
            )
            for name in CONTENTS
        }
        for name in CONTENTS:
            label = true.clone()
            label[row, SLOT] = expected[name]
            hits = slot_hits(studied, truth, anchors, label, drafted, SLOT)
            assert {n: bool(hits[n][row]) for n in CONTENTS} == {n: expected[n] == expected[name] for n in CONTENTS}


def test_the_true_predecessor_in_its_own_place_changes_nothing(kind: str, study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study(kind)
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, studied.num_draft_tokens + 1)
    # Labels that the truth drafts: every condition is to hit them.
    after = studied.draft(true[:, SLOT - 1], truth.context.until(anchors + SLOT - 1), 1).tokens[:, 0]
    true[:, SLOT] = after
    hits = slot_hits(studied, truth, anchors, true, true[:, 1:], SLOT)
    assert not hits.pop("wrong predecessor").any()
    assert not hits.pop("wrong history").any()
    assert set(hits) == {*CONTENTS, "3", "2 + 3", "1 + 3", "1 + 2 + 3"}
    for name, found in hits.items():
        assert found.all(), name


def test_the_true_predecessor_in_all_layers_is_the_truth_in_dflash(
    study: Study, answer: Answer, tiny_target: Target
) -> None:  # fmt: skip
    studied, anchors = study("dflash"), block_anchors(answer, 7, 100, seed=0)
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, 8)
    true[:, SLOT] = studied.draft(true[:, SLOT - 1], truth.context.until(anchors + SLOT - 1), 1).tokens[:, 0]
    hits = slot_hits(studied, truth, anchors, true, wrong(true, tiny_target), SLOT)
    assert hits["wrong predecessor"].all()
    assert hits["1 + 2 + 3"].all()
    assert not hits["predecessor"].all()


def test_shares_are_counted_where_the_condition_changes_something(
    study: Study, long_answers: list[Answer], settings: BlockSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks an answer with known outcomes."""
    outcomes = {
        "truth": [1, 1, 1, 0],
        "predecessor": [1, 0, 1, 0],
        "history": [1, 1, 0, 0],
        "both": [1, 0, 0, 0],
        "wrong predecessor": [0, 1, 0, 1],
        "wrong history": [0, 0, 1, 0],
        "3": [1, 0, 1, 0],
        "2 + 3": [1, 1, 1, 0],
        "1 + 3": [1, 1, 1, 1],
        "1 + 2 + 3": [1, 1, 1, 0],
    }

    def known(studied: Any, truth: Any, anchors: Tensor, true: Any, drafted: Any, slot: int) -> dict[str, Tensor]:
        return {name: torch.tensor(values)[: anchors.shape[0]] for name, values in outcomes.items()}

    monkeypatch.setattr(predecessor_module, "slot_hits", known)
    result = study_predecessor(study("dflash"), long_answers, settings, tmp_path)
    assert result.blocks == 4 * len(long_answers) > 4
    assert [slot.slot for slot in result.slots] == [3, 4, 6]
    for slot in result.slots:
        content = {one.name: one for one in slot.content}
        assert {name: one.accuracy.value for name, one in content.items()} == {
            "truth": 0.75, "predecessor": 0.5, "history": 0.5, "both": 0.25,
        }  # fmt: skip
        assert content["truth"].accuracy_changed.value is None
        assert content["predecessor"].accuracy_changed.value == 0
        assert content["predecessor"].truth_changed.value == 0.5
        assert content["history"].accuracy_changed.value == 0
        assert content["history"].truth_changed.value == 1
        assert content["both"].accuracy_changed.total == 3 * len(long_answers)
        timing = {one.name: one.accuracy_changed.value for one in slot.timing}
        assert timing == {"3": 0.0, "2 + 3": 0.5, "1 + 3": 1.0, "1 + 2 + 3": 0.5}


def test_a_whole_study_of_every_drafter(
    kind: str, study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path
) -> None:
    studied = study(kind)
    steps: list[int] = []
    result = study_predecessor(studied, answers, settings, tmp_path, steps.append)
    assert len(steps) == len(answers)
    assert (result.subject.drafter, result.answers <= len(answers)) == (kind, True)
    assert study_predecessor(studied, answers, settings, tmp_path) == result
    for slot in result.slots:
        truth, predecessor = slot.content[0], slot.content[1]
        assert truth.accuracy.total == result.blocks
        assert predecessor.accuracy_changed.total > result.blocks / 2  # a random drafter is mostly wrong
