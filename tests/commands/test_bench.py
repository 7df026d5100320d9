"""`dspine bench speed` and `batch`: the tables, the JSON lines, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--max-new-tokens", "8", "--limit", "2")
KEYS = {
    "speedup", "acceptance_length", "identical", "plain_tok_per_s", "spec_tok_per_s",
    "draft_share", "verify_share", "other_share", "prompts", "tokens", "machine",
}  # fmt: skip


def test_the_last_line_is_the_measurement(cli: Any, folders: Any) -> None:
    outcome = cli("bench", "speed", "--prompts", folders.prompts, *folders.options, *SHORT, "--width", "4", "--repeats", "2")
    assert (outcome.code, outcome.err) == (0, "")
    data = outcome.data
    assert set(data) >= KEYS
    assert (data["identical"], data["prompts"], data["repeats"], data["width"]) == (True, 2, 2, "4")
    assert f"acceptance length (tau) {data['acceptance_length']:.2f}, output token-identical to plain: yes" in outcome.out
    assert f"draft {data['draft_share']:.0%}, verify {data['verify_share']:.0%}, other {data['other_share']:.0%}" in outcome.out
    assert f"a round verifies {data['mean_width']:.2f} slots" in outcome.out
    assert 1 <= data["mean_width"] <= 4
    assert "transformers_tok_per_s" not in data


def test_options_without_a_command_are_those_of_speed(cli: Any) -> None:
    outcome = cli("bench", "--prompts", "nowhere.jsonl", "--limit", "1")
    assert outcome.code == 2
    assert "cannot read prompts from nowhere.jsonl" in outcome.err
    assert "Compare plain and speculative" in cli("bench", "--help").out


def test_the_reference_is_timed_on_request(cli: Any, folders: Any) -> None:
    outcome = cli("bench", "speed", "--prompts", folders.prompts, *folders.options, *SHORT, "--reference", "--no-chat")
    data = outcome.data
    assert data["transformers_identical_share"] == 1.0
    assert data["transformers_tok_per_s"] > 0
    assert data["speedup_over_transformers"] > 0
    assert "│ transformers │" in outcome.out


def test_sampling_can_be_timed(cli: Any, folders: Any) -> None:
    data = cli("bench", "speed", "--prompts", folders.prompts, *folders.options, *SHORT, "--temperature", "1", "--reference").data
    assert (data["identical"], data["temperature"]) == (None, 1.0)


def test_batches_are_timed_against_transformers(cli: Any, folders: Any) -> None:
    outcome = cli(
        "bench", "batch", "--prompts", folders.prompts, "--target", folders.target, "--rows", "3", "--max-new-tokens", "6"
    )
    data = outcome.data
    assert (data["batch"], data["tokens"], data["identical_share"]) == (3, 18, 1.0)
    assert data["ratio"] > 0
    assert "│ transformers  │" in outcome.out


def test_prompts_without_room_are_skipped_and_told(cli: Any, folders: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"turns": ["x" * 510]}) + "\n" + json.dumps({"turns": ["fine"]}) + "\n", encoding="utf-8")
    outcome = cli("bench", "speed", "--prompts", prompts, *folders.options, *SHORT)
    assert outcome.data["prompts"] == 1
    assert outcome.err == "skipped 1 prompts that leave no room for 8 new tokens in the context\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "none.jsonl"], "cannot read prompts from none.jsonl: No such file or directory"),
        (["--limit", "-1"], "limit = -1: give the number of prompts to use, or 0 for all of them"),
        (["--repeats", "0"], "repeats = 0: at least 1 is needed"),
        (["--drafter", "none"], "no drafter ships for {target}, and none was named"),
        (["--max-new-tokens", "511"], "no prompt of prompts leaves room for 511 new tokens"),
        (["--width", "7"], "width = 7: give 'auto', 'confidence' or a whole number from 1 (plain) to 6"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any) -> None:
    outcome = cli("bench", "speed", "--prompts", folders.prompts, *folders.options, *arguments)
    assert outcome.code == 2
    assert outcome.error.startswith(message.replace("{target}", str(folders.target)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "rows = 0: at least 1 prompt must be decoded at a time"),
        (["--rows", "99"], "a batch of 99 needs as many prompts, but prompts has 3 that fit"),
        (["--repeats", "0"], "repeats = 0: at least 1 is needed"),
    ],
)
def test_an_impossible_batch_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any) -> None:
    outcome = cli("bench", "batch", "--prompts", folders.prompts, "--target", folders.target, *arguments)
    assert outcome.code == 2
    assert outcome.error.startswith(message)
