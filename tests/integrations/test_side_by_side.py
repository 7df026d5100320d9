"""Two engines on the same prompts; here the other one is dspine's own, whole or made to err."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.checkpoint import load_drafter, save_drafter
from dspine.integrations.side_by_side import Decoded, Prompts, command, compare, decode_in_dspine, run
from dspine.targets.model import Target

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def checkpoint(tiny_target: Target, make_drafter: Any, tmp_path: Path) -> Path:
    save_drafter(make_drafter(tiny_target, "dspine"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def other(target: Target, _model: Path, checkpoint: Path | None, prompts: Prompts, params: SamplingParams) -> Decoded:
    drafter = None if checkpoint is None else load_drafter(checkpoint, target)
    return decode_in_dspine(LLM(target, drafter, width=1 if drafter is None else drafter.config.max_width), prompts, params)


def test_acceptance_length_is_of_the_answers_alone() -> None:
    """Two answers of five and three tokens: their first ones are the prefill's."""
    assert Decoded(outputs=[[1, 2, 3, 4, 5], [1, 2, 3]], rounds=4, accepted_at=(3, 1)).acceptance_length == 6 / 4
    assert Decoded(outputs=[[1, 2, 3]]).acceptance_length == 1.0


def test_the_same_engine_twice(tiny_target: Target, checkpoint: Path) -> None:
    row = compare("twin", other, tiny_target, Path(), checkpoint, PROMPTS, GREEDY)
    assert (row["drafter"], row["identical"], row["tokens"]) == ("dspine", 3, 36)
    assert row["twin"] == row["dspine"]
    assert row["dspine"]["acceptance_length"] == 33 / row["dspine"]["rounds"]
    assert row["acceptance_length_ratio"] == 1.0
    assert compare("twin", other, tiny_target, Path(), None, PROMPTS, GREEDY) == {"drafter": "none", "identical": 3, "tokens": 36}


def test_a_difference_is_seen(tiny_target: Target, checkpoint: Path) -> None:
    def wrong(*arguments: Any) -> Decoded:
        found = other(*arguments)
        outputs = [[*found.outputs[0][:-1], 1 - found.outputs[0][-1]], *found.outputs[1:]]
        return dataclasses.replace(found, outputs=outputs, rounds=2 * found.rounds)

    row = compare("other", wrong, tiny_target, Path(), checkpoint, PROMPTS, GREEDY)
    assert (row["identical"], row["acceptance_length_ratio"]) == (2, 0.5)


def test_sampled_answers_are_not_compared_token_by_token(tiny_target: Target, checkpoint: Path) -> None:
    params = dataclasses.replace(GREEDY, temperature=1.0, seed=0)
    assert "identical" not in compare("twin", other, tiny_target, Path(), checkpoint, PROMPTS, params)


@pytest.fixture
def files(make_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A target's folder and a file of prompts."""
    make_model("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(5)), encoding="utf-8")
    return tmp_path / "target", prompts


def test_the_command(files: tuple[Path, Path], checkpoint: Path, tmp_path: Path) -> None:
    target, prompts = files
    app = typer.Typer()
    app.command()(command("twin", "1.2", other, ["dspine"]))
    options = ["-d", "none", "-d", str(checkpoint), "-l", "3", "-n", "6", "-t", str(target), "-o", str(tmp_path / "result.json")]
    outcome = CliRunner().invoke(app, [str(prompts), *options], catch_exceptions=False)
    assert outcome.exit_code == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [json.loads(line) for line in outcome.stdout.splitlines()] == result["rows"]
    assert [row["drafter"] for row in result["rows"]] == ["none", "dspine"]
    assert [row["identical"] for row in result["rows"]] == [3, 3]
    assert (result["prompts"], result["max_new_tokens"], result["machine"]["twin"]) == (3, 6, "1.2")


def test_what_is_wrong_is_said_in_a_line(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = files
    monkeypatch.setattr("sys.argv", ["comparison", str(prompts), "-t", str(target), "-d", "nothing-here"])
    with pytest.raises(SystemExit, match=r"^error: .*nothing-here"):
        run("twin", "1.2", other, ["dspine"])
