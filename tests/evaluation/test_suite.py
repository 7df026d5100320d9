"""The seven benchmarks from the hub or a folder: pinned commits, and what each row becomes. Invented rows, no network."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from dspine.errors import UserError
from dspine.evaluation.benchmarks import load_benchmark, load_named
from dspine.evaluation.references import MathAnswer, UnitTests
from dspine.evaluation.suite import SUITE

# One invented row of each data set, with the fields and types of the real one.
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,234"},
    "math500": {"problem": "Find $x$.", "solution": "...", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1},
    "humaneval": {
        "task_id": "X/0",
        "prompt": 'def twice(x):\n    """Double."""\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "twice",
    },
    "mbpp": {"prompt": "Double it.", "test_imports": ["import math"], "test_list": ["assert f(1) == 2", "assert f(2) == 4"]},
    "livecodebench": {"question_content": "Print it.", "starter_code": "", "private_test_cases": "..."},
    "mt-bench": {"question_id": 1, "category": "writing", "prompt": ["Say a.", "Now b."]},
    "arena-hard-v2": {"uid": "u", "category": "c", "prompt": "Do it."},
}  # fmt: skip
PROMPTS = {
    "gsm8k": ["How many?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "math500": ["Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "humaneval": [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        '```python\ndef twice(x):\n    """Double."""\n\n```'
    ],
    "mbpp": ["Double it."],
    "livecodebench": [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
        "Python program that matches the specification and passes all tests. You will NOT return anything except for the "
        "program\n\n### Question:\nPrint it.\n\n### Format: Write your code in the following format:\n"
        "```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)"
    ],
    "mt-bench": ["Say a.", "Now b."],
    "arena-hard-v2": ["Do it."],
}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The hub's client with a cache that holds each benchmark's files, two rows in the first; lists what was asked for."""
    asked: list[tuple[str, str]] = []
    for name, known in SUITE.items():
        for number, part in enumerate(known.files):
            write(tmp_path / known.repo / "snapshots" / known.revision / part, [ROWS[name]] * (2 if number == 0 else 1))

    def fetch(repo: str, file: str, *, repo_type: str, revision: str) -> str:
        assert repo_type == "dataset"
        asked.append((file, revision))
        commit = SUITE["gsm8k"].revision if revision == "a-branch" else revision
        path = tmp_path / repo / "snapshots" / commit / file
        if not path.is_file():
            raise FileNotFoundError(f"no {file} there\nand more")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    return asked


@pytest.mark.parametrize("name", SUITE)
def test_every_benchmark_is_pinned_to_a_commit_and_read_from_it(name: str, hub: list[tuple[str, str]]) -> None:
    known = SUITE[name]
    assert re.fullmatch(r"[0-9a-f]{40}", known.revision)
    benchmark = load_named(name)
    assert [list(turns) for turns in benchmark.conversations] == [PROMPTS[name]] * (1 + len(known.files))
    assert hub == [(part, known.revision) for part in known.files]
    assert benchmark.source == f"{known.repo}@{known.revision} ({known.config}, {known.split})"


def test_files_beyond_the_limit_are_not_fetched(hub: list[tuple[str, str]]) -> None:
    assert len(load_named("livecodebench", limit=2).conversations) == 2
    assert [file for file, _ in hub] == ["test.jsonl"]
    assert len(load_named("livecodebench", limit=3).conversations) == 3
    assert [file for file, _ in hub[1:]] == ["test.jsonl", "test2.jsonl"]


def test_a_branch_is_recorded_as_the_commit_it_stood_at(hub: list[tuple[str, str]]) -> None:
    assert load_named("gsm8k", revision="a-branch").source.startswith(f"openai/gsm8k@{SUITE['gsm8k'].revision} ")
    assert hub[0][1] == "a-branch"


def test_what_the_hub_refuses_is_one_sentence(hub: list[tuple[str, str]]) -> None:
    with pytest.raises(
        UserError, match=r"cannot fetch test.jsonl of .*MATH-500 at revision b0 \(no test.jsonl there\); .* --data"
    ):
        load_named("math500", revision="b0")
    with pytest.raises(UserError, match="unknown benchmark 'gsm9k'; choose from gsm8k, math500, humaneval"):
        load_named("gsm9k")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_folder_may_hold_the_rows_of_the_data_set(ending: str, tmp_path: Path) -> None:
    write(tmp_path / f"gsm8k{ending}", [ROWS["gsm8k"]])
    benchmark = load_named("gsm8k", folder=tmp_path)
    assert [list(turns) for turns in benchmark.conversations] == [PROMPTS["gsm8k"]]
    assert (benchmark.references, benchmark.source) == ((MathAnswer("1234"),), f"gsm8k{ending}")
    with pytest.raises(UserError, match=r"holds no mbpp.jsonl \(nor mbpp.jsonl.gz, mbpp.parquet\)"):
        load_named("mbpp", folder=tmp_path)


def test_rows_that_lack_a_field_are_named(tmp_path: Path) -> None:
    write(tmp_path / "humaneval.jsonl", [{"prompt": "def f(): ..."}])
    with pytest.raises(UserError, match=r"humaneval.jsonl, line 1 of openai/openai_humaneval has no field 'test'; it has prompt"):
        load_named("humaneval", folder=tmp_path)


def test_references_say_what_is_right(tmp_path: Path) -> None:
    for name in ("math500", "humaneval", "mbpp", "mt-bench"):
        write(tmp_path / f"{name}.parquet", [ROWS[name]])
    found = {name: load_named(name, folder=tmp_path, graded=True) for name in ("math500", "humaneval", "mbpp", "mt-bench")}
    assert found["math500"].references == (MathAnswer("\\frac{1}{2}"),)
    human = ROWS["humaneval"]
    expected = UnitTests(human["test"] + "\ncheck(twice)\n", preamble=human["prompt"], entry_point="twice")
    assert found["humaneval"].references == (expected,)
    assert found["mbpp"].references == (UnitTests("assert f(1) == 2\nassert f(2) == 4", preamble="import math"),)
    assert found["mbpp"].conversations[0][0].endswith("these tests:\n```python\nassert f(1) == 2\nassert f(2) == 4\n```")
    assert found["mt-bench"].references == ()


def test_livecodebench_shows_the_code_to_start_from() -> None:
    problem = SUITE["livecodebench"].read_row({"question_content": "Q", "starter_code": "class Solution:\n    pass"})
    assert "### Format: Use the following code structure:\n```python\nclass Solution:\n    pass\n```" in problem.turns[0]


def test_own_prompts_may_carry_their_references(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"turns": ["a"], "answer": "3"},
        {"turns": ["b"]},
        {"turns": ["c"], "tests": "assert f()", "preamble": "import os", "entry_point": "f"},
    ]
    benchmark = load_benchmark(write(tmp_path / "own.jsonl", rows))
    assert benchmark.references == (MathAnswer("3"), None, UnitTests("assert f()", "import os", "f"))
    with pytest.raises(UserError, match='line 1: "answer" must be a text, not 3'):
        load_benchmark(write(tmp_path / "bad.jsonl", [{"turns": ["a"], "answer": 3}]))


def test_the_digest_is_that_of_the_prompts(tmp_path: Path) -> None:
    first = load_benchmark(write(tmp_path / "a.jsonl", [{"turns": ["x"]}, {"turns": ["y"]}]))
    same = load_benchmark(write(tmp_path / "b.jsonl", [{"turns": ["x"], "id": 1}, {"turns": ["y"], "answer": "1"}]))
    assert first.sha256 == same.sha256 != load_benchmark(tmp_path / "a.jsonl", 1).sha256


def test_damaged_files_are_explained(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.parquet").write_bytes(b"PAR1 and then nothing of use")
    with pytest.raises(UserError, match=r"cannot read .*gsm8k.parquet \(.*\); copy it again"):
        load_benchmark(tmp_path / "gsm8k.parquet")
    whole = gzip.compress(b'{"turns": ["a"]}\n' * 50)
    (tmp_path / "p.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"p\.jsonl\.gz is no complete gzip file"):
        load_benchmark(tmp_path / "p.jsonl.gz")
