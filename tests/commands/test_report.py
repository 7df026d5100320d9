"""`dspine report`: what it prints, warns of and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-30"


def test_it_prints_the_page_and_names_what_it_left_out(cli: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "batch.json").write_bytes((RESULTS / "batch-32.json").read_bytes())
    (results / "notes.json").write_text("{}")
    outcome = cli("report", results, "--output", tmp_path / "out", "--title", "Ours")
    assert outcome.code == 0
    assert outcome.out == f"{tmp_path / 'out' / 'index.html'}\n"
    assert outcome.err == "left out: results/notes.json is no result that the report knows\nSpeed; 0 figure files\n"
    assert "<h1>Ours</h1>" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'results'"),
        (["{tmp}/none"], "{tmp}/none does not exist"),
        (["{tmp}"], "no results in {tmp}; give files that `dspine eval`"),
        (
            ["{results}/batch-32.json", "--output", "{results}/batch-32.json"],
            "{results}/batch-32.json is a file; give the folder",
        ),
    ],
    ids=["nothing", "missing", "empty", "output"],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, tmp_path: Path) -> None:
    arguments = [argument.format(tmp=tmp_path, results=RESULTS) for argument in arguments]
    outcome = cli("report", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith(message.format(tmp=tmp_path, results=RESULTS))
    assert not list(tmp_path.iterdir())
