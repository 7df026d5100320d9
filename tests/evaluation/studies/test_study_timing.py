"""The timing study: each schedule drafts from the features it says, gains are of the counts it measured, stopped runs go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspine.errors import UserError
from dspine.evaluation.studies import timing as timing_module
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.results import BlockSettings
from dspine.evaluation.studies.timing import correct_tokens, schedules, study_timing
from dspine.targets.model import Target
from dspine.training.anchors import block_tokens
from dspine.training.corpus import Answer
from dspine.training.sources import target_states

SLOT, LEFT = 3, 4  # of blocks with 7 candidates: the new anchor, and what it drafts
Study = Callable[..., StudiedDrafter]


def consecutive(drafted: list[int], wanted: list[int]) -> int:
    count = 0
    for ours, theirs in zip(drafted, wanted, strict=True):
        if ours != theirs:
            break
        count += 1
    return count


def draft_from(studied: StudiedDrafter, target: Target, ids: list[int], features_of: dict[int, list[int]]) -> list[int]:
    """A fresh runner's draft after `ids`, each layer's context being that of its own tokens before the anchor."""
    config = studied.config
    runner = studied.drafter.runner(target)
    caches = []
    for layer in range(config.num_layers):
        tokens = torch.tensor([*features_of[layer + 1], ids[-1]])
        features, _ = target_states(target, tokens[:-1], config.target_layer_ids)
        cache = runner.new_cache(1, 100)
        runner.extend(features[None], tokens[None, 1:], cache)
        cache.lengths += len(tokens) - 1
        caches.append(cache)
    cache = caches[0]
    cache.data = torch.stack([caches[layer].data[layer] for layer in range(config.num_layers)])
    return runner.propose(torch.tensor(ids[-1:]), cache, LEFT, torch.zeros(1), None).tokens[0].tolist()


def test_the_papers_schedules() -> None:
    assert [schedule.layers for schedule in schedules(5)] == [
        (1, 2, 3, 4, 5), (2, 3, 4, 5), (3, 4, 5), (4, 5), (5,), (2, 5), (3, 5), (4, 5),
    ]  # fmt: skip
    assert [schedule.name for schedule in schedules(3)] == ["from 1", "from 2", "from 3", "2 + 3"]
    assert [schedule.name for schedule in schedules(1)] == ["from 1"]


def test_every_schedule_drafts_from_the_features_it_says(
    kind: str, study: Study, answer: Answer, anchors: Tensor, tiny_target: Target
) -> None:
    """The baseline from the predicted prefix's, true from layer 1 from the true prefix's, all others from each in its layers."""
    studied = study(kind, block_size=8 if kind not in {"domino", "dspark"} else 7, num_layers=4)
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, 8)
    prefix = (true[:, 1:SLOT] + 3) % tiny_target.vocab_size  # wrong everywhere
    seen = dict(correct_tokens_of(studied, truth, anchors, true, prefix))
    assert list(seen) == ["baseline", *(schedule.name for schedule in schedules(4))]
    layers = {"baseline": (), **{schedule.name: schedule.layers for schedule in schedules(4)}}
    for row, anchor in enumerate(anchors.tolist()):
        right = answer.ids[: anchor + SLOT]
        wrong = [*answer.ids[: anchor + 1], *prefix[row].tolist()]
        for name, drafted in seen.items():
            features_of = {layer: right if layer in layers[name] else wrong for layer in range(1, 5)}
            expected = draft_from(studied, tiny_target, answer.ids[: anchor + SLOT + 1], features_of)
            assert drafted[row] == expected, (name, row)
    assert seen["from 1"] != seen["baseline"]  # the features matter


def correct_tokens_of(
    studied: StudiedDrafter, truth: object, anchors: Tensor, true: Tensor, prefix: Tensor
) -> list[tuple[str, list[list[int]]]]:
    """The tokens that `correct_tokens` compares with the true ones, by condition, in its order."""
    drafts: list[list[list[int]]] = []
    draft = studied.draft

    def spy(*arguments, **named):  # type: ignore[no-untyped-def]
        drafted = draft(*arguments, **named)
        drafts.append(drafted.tokens.tolist())
        return drafted

    studied.draft = spy  # type: ignore[method-assign]
    counts = correct_tokens(studied, truth, anchors, true, prefix)  # type: ignore[arg-type]
    studied.draft = draft  # type: ignore[method-assign]
    wanted = true[:, SLOT + 1 :].tolist()
    for (name, counted), tokens in zip(counts.items(), drafts, strict=True):
        assert counted.tolist() == [consecutive(t, w) for t, w in zip(tokens, wanted, strict=True)], name
    return list(zip(counts, drafts, strict=True))


def test_a_right_prediction_leaves_nothing_to_gain(study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study("dspine")
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, 8)
    counts = correct_tokens(studied, truth, anchors, true, true[:, 1:SLOT])
    for name, found in counts.items():
        assert torch.equal(found, counts["baseline"]), name


def test_gains_are_those_of_the_measured_counts(
    study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts that are known: 1 token in the baseline, 2 with the true prefix from layer 1, 3 from layer 3; every other block's
    prefix is wrong."""

    def known(studied: StudiedDrafter, truth: object, anchors: Tensor, true: Tensor, prefix: Tensor) -> dict[str, Tensor]:
        values = {"baseline": 1, "from 1": 2, "from 2": 1, "from 3": 3, "2 + 3": 0}
        return {name: torch.full(anchors.shape, value) for name, value in values.items()}

    monkeypatch.setattr(timing_module, "correct_tokens", known)
    result = study_timing(study("dflash"), answers, settings, tmp_path)
    assert (result.anchor_slot, result.measured_slots, result.baseline_correct_tokens) == (3, (4, 7), 1.0)
    by_name = {one.schedule.name: one for one in result.schedules}
    assert {name: one.gain.value for name, one in by_name.items()} == {"from 1": 1, "from 2": 0, "from 3": 2, "2 + 3": -1}
    assert by_name["from 3"].gain.ci95 == (2.0, 2.0)
    assert by_name["from 3"].correct_tokens == 3
    assert by_name["from 3"].changed_gain.total == result.changed_blocks <= result.blocks == result.schedules[0].gain.total


def test_only_blocks_with_a_wrong_prefix_gain(
    study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path
) -> None:
    result = study_timing(study("dspine"), answers, settings, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert sum(len(row["changed"]) for row in rows) == result.blocks
    assert sum(map(sum, (row["changed"] for row in rows))) == result.changed_blocks > 0
    for row in rows:
        for counts in row["correct"].values():
            for count, base, changed in zip(counts, row["correct"]["baseline"], row["changed"], strict=True):
                assert changed or count == base


def test_a_stopped_study_goes_on(
    study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studied, steps = study("dspine"), list[int]()

    def stop(count: int) -> None:
        steps.append(count)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study_timing(studied, answers, settings, tmp_path, stop)
    measured: list[tuple[str, int]] = []
    measure = timing_module._measure

    def counting(own: StudiedDrafter, answer: Answer, blocks: BlockSettings) -> dict[str, object]:
        measured.append(answer.ref)
        return measure(own, answer, blocks)

    monkeypatch.setattr(timing_module, "_measure", counting)
    result = study_timing(studied, answers, settings, tmp_path)
    assert measured == [answer.ref for answer in answers[2:]]
    assert study_timing(studied, answers, settings, tmp_path) == result
    assert len(measured) == 10
    for other, message in (
        (study("dspine", seed=5), "holds a study with weights_sha256 = "),
        (study("dflash"), "holds a study with attention = causal, this one has bidirectional; choose another --output"),
    ):
        with pytest.raises(UserError, match=message):
            study_timing(other, answers, settings, tmp_path)


def test_what_cannot_be_studied_is_said(study: Study, answers: list[Answer], tmp_path: Path) -> None:
    short = BlockSettings(prompts="questions", max_new_tokens=30)
    with pytest.raises(UserError, match="drafts 3 tokens; the timing study needs at least 4"):
        study_timing(study("dflash", block_size=4), answers, short, tmp_path / "a")
    with pytest.raises(UserError, match="no answer to questions holds a block of 40 tokens; allow longer answers"):
        study_timing(study("dflash", block_size=40), answers, short, tmp_path / "b")
    with pytest.raises(UserError, match="0 blocks per answer is not possible"):
        BlockSettings(prompts="questions", max_new_tokens=30, blocks_per_answer=0)
