"""`dspine study`: files and figures of every study, answers that are shared, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--max-new-tokens", "24", "--blocks", "3")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return _prompts(tmp_path / "questions.jsonl", "question", 6)


def _prompts(file: Path, word: str, count: int) -> Path:
    lines = [json.dumps({"turns": [f"{word} {number} of {7 * number}"]}) + "\n" for number in range(count)]
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("study", ["timing", "predecessor"])
def test_a_study_leaves_its_result_and_figures(study: str, cli: Any, folders: Any, questions: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    command = ("study", study, "--prompts", questions, *folders.options, *SHORT, "--output", output)
    outcome = cli(*command)
    assert outcome.code == 0, outcome.err
    data = json.loads((output / f"{study}.json").read_text(encoding="utf-8"))
    assert (data["study"], data["subject"]["drafter"], data["settings"]["prompts"]) == (study, "dspine", "questions")
    assert f"{study}: dspine on questions, {data['answers']} answers, {data['blocks']} blocks" in outcome.out
    assert {file.suffix for file in output.glob(f"{study}.*")} == {".json", ".png", ".svg"}
    assert f"{output / study}.png" in outcome.err
    before = (output / "rows.jsonl").read_bytes()
    again = cli(*command)
    assert again.out == outcome.out
    assert (output / "rows.jsonl").read_bytes() == before
    other = cli(*command, "--seed", "4")
    assert (other.code, other.error) == (2, f"{output} holds a study with seed = 0, this one has 4; choose another --output")


def test_timing_tells_gains_and_predecessor_tells_layers(cli: Any, folders: Any, questions: Path, tmp_path: Path) -> None:
    options = ("--prompts", questions, *folders.options, *SHORT)
    timing = cli("study", "timing", *options, "--output", tmp_path / "t").out
    for name in ("no layer", "layers from 1", "layers from 2"):
        assert name in timing
    predecessor = cli("study", "predecessor", *options, "--output", tmp_path / "p").out
    for name in ("truth", "history", "both", "1 + 2"):
        assert name in predecessor


def test_a_readout_of_given_answers(cli: Any, folders: Any, questions: Path, tmp_path: Path) -> None:
    train = _prompts(tmp_path / "train.jsonl", "exercise", 5)
    made = tmp_path / "answers.jsonl.gz"
    regenerate = (
        "data",
        "regenerate",
        "--prompts",
        train,
        "--target",
        folders.target,
        "--max-new-tokens",
        "24",
        "--output",
        made,
    )
    assert cli(*regenerate).code == 0
    fit = (
        "--fit-prompts",
        train,
        "--fit-answers",
        made,
        "--fit-limit",
        "3",
        "--select-limit",
        "2",
        "--epochs",
        "2",
        "--rank",
        "4",
    )
    command = ("study", "readout", "--prompts", questions, *folders.options, *SHORT, "--output", tmp_path / "out")
    outcome = cli(*command, *fit)
    assert outcome.code == 0, outcome.err
    data = json.loads((tmp_path / "out" / "readout.json").read_text(encoding="utf-8"))
    assert (data["fit_prompts"], data["fit_answers"], data["selection_answers"]) == ("train", 3, 2)
    assert data["fit"]["rank"] == 4
    assert len(data["layers"]) == data["subject"]["num_layers"] == 2
    assert "slots 1-2" in outcome.out
    assert not (tmp_path / "out" / "answers-train.jsonl.gz").exists()
    same = cli(*command, "--fit-prompts", questions, "--fit-limit", "3", "--select-limit", "2", "--limit", "2")
    assert same.error == "questions.jsonl line 1 is among the test prompts too; fit to other prompts"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "-1"], "limit = -1"),
        (["--blocks", "0"], "0 blocks per answer is not possible"),
        (["--drafter", "none"], "no drafter ships for"),
        (["--prompts", "{tmp}/none.jsonl"], "no such file: {tmp}/none.jsonl"),
        (["--max-new-tokens", "2"], "no answer to questions holds a block of 6 tokens"),
        (["--answers", "{tmp}/none.jsonl.gz"], "no such file: {tmp}/none.jsonl.gz"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    arguments: list[str], message: str, cli: Any, folders: Any, questions: Path, tmp_path: Path
) -> None:
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    outcome = cli("study", "timing", "--prompts", questions, *folders.options, "--output", tmp_path / "out", *given)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith(message.replace("{tmp}", str(tmp_path)))
    assert not (tmp_path / "out" / "timing.json").exists()


def test_a_missing_matplotlib_is_said_before_the_work(
    cli: Any, folders: Any, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = cli("study", "timing", "--prompts", questions, *folders.options, "--output", tmp_path / "out")
    assert (outcome.code, outcome.error) == (2, "figures need matplotlib; install dspine[report]")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("study", ["readout", "timing", "predecessor"])
def test_help_teaches_with_examples(study: str, cli: Any) -> None:
    outcome = cli("study", study, "--help")
    assert outcome.code == 0
    assert f"dspine study {study} -p" in outcome.out


def test_the_group_alone_shows_its_help(cli: Any) -> None:
    outcome = cli("study")
    assert (outcome.code, outcome.err) == (0, "")
    for study in ("readout", "timing", "predecessor"):
        assert study in outcome.out
