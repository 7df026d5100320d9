"""Reading result files: which are results, what they belong to, where their numbers come from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dspine.errors import UserError
from dspine.evaluation.acceptance import AcceptanceReport
from dspine.evaluation.batch_speed import BatchReport
from dspine.evaluation.report.kinds import ComparisonTable, Curve
from dspine.evaluation.report.provenance import UNKNOWN, describe_machine, last_commit, trace
from dspine.evaluation.report.results import read_results
from dspine.evaluation.speed import SpeedReport

Make = Callable[..., Path]


def test_the_committed_results_are_read_by_the_classes_that_wrote_them(committed: tuple[Path, Path]) -> None:
    results = read_results(committed)
    assert results.warnings == ()
    counts = [len(results.of(kind)) for kind in (AcceptanceReport, SpeedReport, BatchReport, Curve)]
    assert counts == [12, 3, 1, 2]
    assert [result.source.number for result in results.all] == list(range(1, 19))
    first = results.of(AcceptanceReport)[0]
    assert first.data == AcceptanceReport(**{**vars(first.data)})
    assert first.data.conversations[0].rounds == 66
    assert first.data.acceptance_length_ci95[0] < first.data.acceptance_length
    assert {curve.data.drafter for curve in results.of(Curve)} == {"dflash", "dspine"}
    assert results.of(Curve)[0].row == "smollm2-135m-dflash"


def test_files_named_twice_are_read_once(make_acceptance: Make) -> None:
    file = make_acceptance("a.json")
    assert len(read_results([file, file.parent, file]).all) == 1


def test_rows_of_a_comparison_carry_its_name_and_their_own(comparison: Path) -> None:
    results = read_results([comparison])
    rows = [(result.collection, result.row) for result in results.of(AcceptanceReport)]
    assert rows == [("six", "dflash"), ("six", "dspine"), ("six", "dspine-k4")]
    assert [(r.collection, r.row) for r in results.of(ComparisonTable)] == [("six", "")]
    assert [(r.collection, r.row) for r in results.of(Curve)] == [("six", "dspine")]
    assert results.warnings == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is no JSON: Expecting value in line 1"),
        ("[1, 2]", "is no result: a JSON object is expected"),
        ('{"loss": 3}', "is no result that the report knows"),
        ('{"rows": [{"row": ["nested"]}], "gains": []}', "is no valid result: rows.0.row"),
        (b"\xff\xfe\x00", "cannot be read as text"),
    ],
    ids=["text", "list", "foreign", "wrong", "binary"],
)
def test_what_is_no_result(text: str | bytes, message: str, make_acceptance: Make, tmp_path: Path) -> None:
    """Named, it is an error; merely lying in a folder, it is left out with a warning. Both are one line with its name."""
    make_acceptance("good.json")
    bad = tmp_path / "bad.json"
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        read_results([bad])
    assert str(error.value).startswith(f"{bad.relative_to(tmp_path.parent).name} {message}")
    assert "\n" not in str(error.value)
    results = read_results([tmp_path])
    assert len(results.all) == 1
    assert len(results.warnings) == 1
    assert results.warnings[0].startswith(f"left out: {tmp_path.name}/bad.json {message}")
    assert "\n" not in results.warnings[0]


def test_a_result_with_a_broken_field_is_refused_by_name(make_acceptance: Make) -> None:
    file = make_acceptance("a.json", acceptance_length="much")
    with pytest.raises(UserError, match=r"a\.json is no valid result: acceptance_length: Input should be a valid number"):
        read_results([file])


def test_empty_curves_and_missing_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"curve\.jsonl is empty"):
        read_results([tmp_path / "curve.jsonl"])
    with pytest.raises(UserError, match="none does not exist"):
        read_results([tmp_path / "none"])
    (tmp_path / "curve.jsonl").unlink()
    with pytest.raises(UserError, match="no results in"):
        read_results([tmp_path])


def test_hidden_folders_and_configs_are_passed_over(make_acceptance: Make, tmp_path: Path) -> None:
    make_acceptance("a.json")
    make_acceptance(".hidden/b.json")
    (tmp_path / "config.json").write_text('{"drafter": "dspine"}')
    results = read_results([tmp_path])
    assert (len(results.all), results.warnings) == (1, ())


def test_a_recorded_command_day_and_revision_are_told_as_they_are(make_acceptance: Make) -> None:
    machine = {"cpu": "Chip", "threads": 1, "device": "cpu", "command": "dspine eval x", "date": "2027-01-02", "revision": "abc"}
    source = read_results([make_acceptance("a.json", machine=machine)]).all[0].source
    assert (source.command, source.machine, source.date, source.revision) == (
        "dspine eval x", "Chip, 1 thread", "2027-01-02", "abc",
    )  # fmt: skip


def test_an_older_result_is_traced_to_its_commit_and_its_settings(make_acceptance: Make, tmp_path: Path) -> None:
    file = make_acceptance("a.json")
    assert last_commit(file) is None
    assert trace(1, file, "a.json", {}, None).command == UNKNOWN
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "a.json"], ["commit", "-q", "-m", "one", "--date", "2026-01-02T12:00:00"]):
        subprocess.run([*git, *arguments], check=True, env={"GIT_COMMITTER_DATE": "2026-01-02T12:00:00"})
    source = read_results([file]).all[0].source
    assert source.date == "2026-01-02 (committed)"
    assert source.revision.endswith(" (committed)")
    assert source.command.startswith(
        "dspine eval acceptance --prompts gsm8k.jsonl --limit 100 --target smollm2-135m --drafter dspine"
    )
    assert source.command.endswith("(rebuilt from its settings)")


def test_machines_in_one_line(committed: tuple[Path, Path]) -> None:
    assert describe_machine({}) == UNKNOWN
    assert describe_machine({"device": "Some GPU", "cpu": "Chip", "threads": 8, "torch": "2"}) == "Some GPU, torch 2"
    recorded = json.loads((committed[0] / "batch-32.json").read_text())["machine"]
    assert describe_machine(recorded).startswith("AMD EPYC, 2 threads, Linux x86_64, dspine 0.1.0, torch")
