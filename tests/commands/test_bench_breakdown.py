"""`dspine bench breakdown`: the table, the JSON line and file, and the exit code where the parts do not add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspine.evaluation import breakdown

SHORT = ("--max-new-tokens", "12", "--limit", "2")


def test_the_parts_of_a_round_are_told_and_written(cli: Any, folders: Any, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    outcome = cli("bench", "breakdown", "--prompts", folders.prompts, *folders.fixed, *SHORT, "--output", file)
    assert (outcome.code, outcome.err) == (0, "")
    data = outcome.data
    assert json.loads(file.read_text()) == data
    assert [part["stage"] for part in data["stages"]][:4] == ["draft_backbone", "injection", "head", "transition_cache"]
    assert (data["prompts"], data["batch"], data["width"], data["sum_agrees"]) == (2, 1, "4", True)
    assert "│ transition cache │" in outcome.out
    assert f"not in any stage: {data['residual_share']:.2%} of the round" in outcome.out


def test_several_prompts_are_decoded_at_once_and_plainly_on_request(cli: Any, folders: Any) -> None:
    target = ["--target", folders.target, "--drafter", "none"]
    data = cli("bench", "breakdown", "--prompts", folders.prompts, *target, *SHORT, "--batch", "2").data
    assert (data["batch"], data["drafter"]) == (2, "none")


def test_parts_that_do_not_add_up_fail_after_the_table(cli: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "LARGEST_RESIDUAL", -1.0)
    outcome = cli("bench", "breakdown", "--prompts", folders.prompts, *folders.fixed, *SHORT)
    assert outcome.code == 2
    assert outcome.error.startswith("the stages add up to ")
    assert outcome.data["sum_agrees"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batch = 0: at least 1 prompt must be decoded at a time"),
        (["--output", "no/such/folder/b.json"], "cannot write no/such/folder/b.json: it is a folder or its folder"),
        (["--max-new-tokens", "1"], "no answer took more than one round"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any) -> None:
    outcome = cli("bench", "breakdown", "--prompts", folders.prompts, *folders.options, *arguments)
    assert outcome.code == 2
    assert outcome.error.startswith(message)
