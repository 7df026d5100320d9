"""`dspine eval acceptance`: the table, the JSON line, the report file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--max-new-tokens", "10")


def test_the_last_line_is_the_measurement(cli: Any, folders: Any) -> None:
    outcome = cli("eval", "acceptance", "--prompts", folders.prompts, *folders.options, *SHORT)
    assert (outcome.code, outcome.err) == (0, "")
    data = outcome.data
    assert (data["prompts"], data["width"], data["temperature"], data["drafter"]) == (3, "6", 0.0, "dspine")
    assert data["acceptance_length"] == pytest.approx(1 + sum(data["acceptance_by_position"]), abs=0.2)
    assert len(data["conditional_acceptance"]) == 5
    assert data["rounds"] > 0
    assert data["tokens"] > data["rounds"]
    low, high = data["acceptance_length_ci95"]
    assert low <= data["acceptance_length"] <= high
    assert "conversations" not in data
    assert f"acceptance length (tau) {data['acceptance_length']:.3f}" in outcome.out


def test_the_report_is_written_with_every_conversation(cli: Any, folders: Any, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = ("--temperature", "1", "--seed", "3", "--limit", "2", "--width", "4", "--output", output)
    data = cli("eval", "acceptance", "--prompts", folders.prompts, *folders.options, *SHORT, *options).data
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {key: report[key] for key in data} == data
    assert [c["turns"] for c in report["conversations"]] == [2, 1]
    assert len(data["acceptance_by_position"]) == 3


def test_batches_change_nothing(cli: Any, folders: Any) -> None:
    command = ("eval", "acceptance", "--prompts", folders.prompts, *folders.options, *SHORT, "--temperature", "0.7")
    one, many = (cli(*command, "--batch", size).data for size in ("1", "8"))
    assert one == many


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--output", "{tmp}/none/report.json"],
            "cannot write {tmp}/none/report.json: it is a folder or its folder does not exist",
        ),
        (["--output", "{tmp}"], "cannot write {tmp}: it is a folder"),
        (["--batch", "0"], "batch = 0: at least 1 conversation"),
        (["--width", "wide"], "width 'wide' is neither"),
        (["--temperature", "-2"], "temperature=-2.0 is out of range"),
        (["--drafter", "none"], "no drafter ships for"),
        (["--max-new-tokens", "512"], "nothing was drafted on prompts: its prompts leave no room for 512 new tokens"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any, tmp_path: Path) -> None:
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    outcome = cli("eval", "acceptance", "--prompts", folders.prompts, *folders.options, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith(message.replace("{tmp}", str(tmp_path)))
    assert not list(tmp_path.iterdir())
