"""Shares with their intervals, results as files, rows that belong to one study, and figures of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspine.errors import UserError
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.evaluation.studies.figures import draw_predecessor, draw_readout, draw_timing
from dspine.evaluation.studies.predecessor import study_predecessor
from dspine.evaluation.studies.probe import FitSettings
from dspine.evaluation.studies.readout import FitAnswers, study_readout
from dspine.evaluation.studies.results import BlockSettings, Share, StudyRows, Subject
from dspine.evaluation.studies.timing import study_timing
from dspine.training.corpus import Answer

Study = Callable[..., StudiedDrafter]


def test_a_share_is_the_quotient_of_sums() -> None:
    share = Share.of([1, 3, 0], [4, 4, 0])
    assert (share.value, share.total) == (0.5, 8)
    assert share.ci95 is not None
    assert share.ci95[0] == 0.25
    assert share.ci95[1] == 0.75
    assert Share.of([3, 9], [2, 6]).minus_one() == Share(0.5, (0.5, 0.5), 8)
    nothing = Share.of([0, 0], [0, 0])
    assert nothing == nothing.minus_one() == Share(None, None, 0)


def test_the_subject_tells_two_trainings_apart(study: Study) -> None:
    one, again, other = (Subject.of(study("dflash", seed=seed, draft_ids=torch.arange(9))) for seed in (0, 0, 1))
    assert one == again
    assert (one.drafter, one.num_layers, one.block_size, one.num_draft_tokens, one.attention) == (
        "dflash",
        3,
        8,
        7,
        "bidirectional",
    )
    assert one.weights_sha256 != other.weights_sha256


def test_rows_are_made_once_and_survive_a_crash(tmp_path: Path) -> None:
    rows = StudyRows(tmp_path, {"study": "timing", "seed": 1})
    assert rows.get("a", lambda: {"value": 1}) == {"key": "a", "value": 1}
    assert rows.get("a", lambda: {"value": 2})["value"] == 1
    rows.close()
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write('{"key":"b","val')  # killed while writing
    again = StudyRows(tmp_path, {"study": "timing", "seed": 1})
    assert "a" in again
    assert "b" not in again
    again.close()
    with pytest.raises(UserError, match=r"holds a study with seed = 1, this one has 2; choose another --output"):
        StudyRows(tmp_path, {"study": "timing", "seed": 2})


def test_results_say_what_they_are_of(study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path) -> None:
    result = study_timing(study("dspine"), answers, settings, tmp_path)
    result.write(tmp_path / "timing.json")
    data = json.loads((tmp_path / "timing.json").read_text(encoding="utf-8"))
    assert data["study"] == "timing"
    assert data["subject"]["drafter"] == "dspine"
    assert data["settings"] == {"prompts": "questions", "max_new_tokens": 30, "blocks_per_answer": 4, "seed": 0}
    assert data["machine"]["torch"] == torch.__version__
    assert data["schedules"][0]["schedule"] == {"kind": "from", "layers": [1, 2, 3]}
    assert data["schedules"][0]["gain"]["value"] == result.schedules[0].gain.value


def test_every_study_draws_the_same_figure_again(
    study: Study, answers: list[Answer], settings: BlockSettings, tmp_path: Path
) -> None:
    studied = study("dspine", num_layers=4)
    fit = FitSettings(answers=2, selection_answers=1, rank=4, epochs=1)
    readout = study_readout(studied, FitAnswers.split(answers[:3], fit), answers[3:], settings, fit, tmp_path / "r")
    timing = study_timing(studied, answers, settings, tmp_path / "t")
    predecessor = study_predecessor(studied, answers, settings, tmp_path / "p")
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        draw_readout(readout, folder), draw_timing(timing, folder), draw_predecessor(predecessor, folder)
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == [f"{study}.{kind}" for study in ("predecessor", "readout", "timing") for kind in ("png", "svg")]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
