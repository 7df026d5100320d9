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
        (["--temperature", "0", "-T", "1", "--output", "{tmp}/r.json"], "2 results do not go into the one file {tmp}/r.json"),
        (["--temperature", "0", "-T", "0", "--output", "{tmp}"], "a temperature is given twice"),
        (["--prompts", "{tmp}/none.jsonl"], "cannot read prompts from {tmp}/none.jsonl"),
        (["--benchmark", "gsm9k"], "unknown benchmark 'gsm9k'; choose from gsm8k"),
        (["--benchmark", "gsm8k", "--data", "{tmp}"], "{tmp} holds no gsm8k.jsonl"),
        (["--revision", "main"], "revision 'main' is one of a data set on the hub"),
        (["--thinking"], "the chat template of"),
        (["--endpoint", "nowhere"], "endpoint 'nowhere' is no http address"),
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


def test_a_call_without_prompts_says_what_it_needs(cli: Any, folders: Any) -> None:
    for command in ("acceptance", "quality"):
        outcome = cli("eval", command, *folders.options)
        assert outcome.code == 2
        assert outcome.error.startswith("nothing to measure; give --benchmark (gsm8k, math500, humaneval, mbpp, livecodebench")


def test_benchmarks_and_temperatures_make_a_folder_of_results(cli: Any, folders: Any, tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "out" / "dspine"
    data.mkdir()
    (data / "mt-bench.jsonl").write_text('{"prompt": ["one", "two"]}\n{"prompt": ["three", "four"]}\n')
    (data / "gsm8k.jsonl").write_text('{"turns": ["five"]}\n')
    names = ("-B", "mt-bench", "-B", "gsm8k", "--data", data, "--prompts", folders.prompts)
    command = ("eval", "acceptance", *names, *folders.options, *SHORT, "-T", "0", "-T", "1", "--output", output)
    outcome = cli(*command)
    assert (outcome.code, outcome.err) == (0, "")
    found = {file.name: json.loads(file.read_text()) for file in output.iterdir()}
    assert sorted(found) == [f"{name}-T{t}.json" for name in ("gsm8k", "mt-bench", "prompts") for t in (0, 1)]
    assert [found[f"{name}-T0.json"]["tokens"] > 0 for name in ("gsm8k", "mt-bench")] == [True, True]
    assert found["mt-bench-T1.json"]["temperature"] == 1.0
    assert found["mt-bench-T1.json"]["source"] == "mt-bench.jsonl"
    assert [c["turns"] for c in found["mt-bench-T0.json"]["conversations"]] == [2, 2]
    for report in found.values():
        assert report["machine"]["torch"]
        assert (len(report["drafter_sha256"]), len(report["chat_template_sha256"]), report["thinking"]) == (16, 16, "")
    lines = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    assert [(line["benchmark"], line["temperature"]) for line in lines] == [
        (name, t) for name in ("mt-bench", "gsm8k", "prompts") for t in (0.0, 1.0)
    ]
    times = {file.name: file.stat().st_mtime_ns for file in output.iterdir()}
    (output / "gsm8k-T1.json").unlink()
    assert cli(*command).data == lines[-1]
    kept = {file.name for file in output.iterdir() if file.stat().st_mtime_ns == times[file.name]}
    assert kept == set(found) - {"gsm8k-T1.json"}, "only what is missing is measured again"
    refused = cli(*command, "--max-new-tokens", "9")
    assert refused.error.endswith(
        "was measured with max_new_tokens = 10, this one has 9; choose another output, or remove that file"
    )


def test_quality_compares_texts_and_scores(cli: Any, folders: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"turns": ["what is it?"], "answer": "7"}\n{"turns": ["and this?"], "tests": "pass", "preamble": "x = 1"}\n')
    outcome = cli("eval", "quality", "--prompts", own, *folders.options, *SHORT, "--output", tmp_path / "q")
    assert (outcome.code, outcome.err) == (0, "")
    data = outcome.data
    assert (data["compared"], data["identical"], data["graded"]) == (2, 2, 2)
    assert data["plain_score"] == data["spec_score"]
    assert json.loads((tmp_path / "q" / "own-T0.json").read_text())["conversations"][1]["first_difference"] is None
    assert "2 of 2 conversations identical, token for token" in outcome.out


def test_quality_without_references_says_so(cli: Any, folders: Any) -> None:
    outcome = cli("eval", "quality", "--prompts", folders.prompts, *folders.options, *SHORT)
    assert outcome.err == "prompts comes without references here: only the texts are compared, nothing is scored\n"
    assert (outcome.data["identical"], outcome.data["plain_score"]) == (3, None)
