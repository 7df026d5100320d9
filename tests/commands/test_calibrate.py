"""`dspine calibrate`: the table, the JSON line, the file, and that decoding uses it without changing a token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--max-new-tokens", "12", "--limit", "0")


@pytest.fixture
def checkpoint(folders: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.dspine, tmp_path / "drafter"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"question number {i}"]}) + "\n" for i in range(8)), encoding="utf-8")
    return file


def test_it_writes_the_maps_and_says_how_good_they_are(
    cli: Any, folders: Any, checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    options = ("--prompts", prompts, "--target", folders.target, "--drafter", checkpoint, *SHORT, "--output", output)
    outcome = cli("calibrate", *options)
    assert outcome.code == 0, outcome.err
    data = outcome.data
    assert [t["temperature"] for t in data["temperatures"]] == [0.0, 1.0]
    for t in data["temperatures"]:
        assert t["fitted_rounds"] > t["held_out_rounds"] > 0
        assert t["after"]["acceptance"]["count"] == t["before"]["acceptance"]["count"]
        assert 0 <= t["after"]["survival"]["ece"] <= 1
    assert json.loads(output.read_text(encoding="utf-8")) == data
    assert json.loads((checkpoint / "calibration.json").read_text(encoding="utf-8")) == data["calibration"]
    assert len(data["calibration"]["maps"][0]["slope"]) == 5
    assert "ECE before" in outcome.out


def test_widths_by_confidence_give_the_same_text(cli: Any, folders: Any, checkpoint: Path, prompts: Path) -> None:
    where = ("--target", folders.target, "--drafter", checkpoint)
    assert cli("calibrate", "--prompts", prompts, *where, *SHORT).code == 0
    outcome = cli("bench", "speed", "--prompts", prompts, *where, *SHORT, "--width", "confidence")
    assert (outcome.code, outcome.err) == (0, "")
    assert (outcome.data["identical"], outcome.data["width"]) == (True, "confidence")
    assert 1 <= outcome.data["mean_width"] <= 6
    sampled = cli("eval", "acceptance", "--prompts", prompts, *where, *SHORT, "--width", "confidence", "--temperature", "1")
    assert sampled.code == 0


def test_without_a_calibration_the_whole_block_is_verified_and_that_is_said(cli: Any, folders: Any) -> None:
    command = ("eval", "acceptance", "--prompts", folders.prompts, *folders.options, "--max-new-tokens", "10")
    outcome = cli(*command, "--width", "confidence")
    assert "this drafter is not calibrated, so the whole block is verified" in outcome.err
    full = cli(*command, "--width", "full")
    assert outcome.data["acceptance_by_position"] == full.data["acceptance_by_position"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "none.jsonl"], "cannot read prompts from none.jsonl"),
        (["--limit", "3"], "3 prompts are too few to calibrate on"),
        (["--batch", "0"], "batch = 0: at least 1 prompt"),
        (["--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["--drafter", "none"], "no drafter ships for"),
        (["--output", "none/report.json"], "cannot write none/report.json: it is a folder or its folder does not exist"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    arguments: list[str], message: str, cli: Any, folders: Any, checkpoint: Path, prompts: Path
) -> None:
    outcome = cli("calibrate", "--prompts", prompts, "--target", folders.target, "--drafter", checkpoint, *SHORT, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith(message)
    assert not (checkpoint / "calibration.json").exists()
