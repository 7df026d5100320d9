"""Benchmarks: where their conversations come from, and how they become token ids.

    load_benchmark(Path("gsm8k.jsonl"), 100)               # a prompt file
    load_named("gsm8k", folder=Path("data"), limit=100)    # one of the seven, from a folder ...
    load_named("gsm8k", limit=100)                         # ... or from the Hugging Face hub, at its pinned revision

A prompt file has one JSON object a line: {"turns": ["first user text", "second user text", ...]}. Beside "turns" there may be
the reference of the first one: "answer" (a number or LaTeX), or "tests" (Python that raises where the answer's code is wrong,
with "preamble" before the code and "entry_point"). Other keys are left alone. A file named like one of the seven benchmarks may
hold the rows of its data set instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dspine.errors import UserError
from dspine.evaluation.references import MathAnswer, Reference, UnitTests
from dspine.evaluation.rows import ENDINGS, download, read_rows
from dspine.evaluation.suite import SUITE, HubBenchmark, Problem
from dspine.targets.model import Target


@dataclass(frozen=True)
class Benchmark:
    """Conversations by their user turns; `name` is the file's without its ending, `source` says where they were read.

    `references` are as many as the conversations, or none at all.
    """

    name: str
    conversations: tuple[tuple[str, ...], ...]
    references: tuple[Reference | None, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def sha256(self) -> str:
        """First 16 hex digits over all turns: two results with the same one were measured on the same prompts."""
        return hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()[:16]

    @property
    def references_sha256(self) -> str:
        """The same over what a right answer is; "" without references."""
        return hashlib.sha256(repr(self.references).encode()).hexdigest()[:16] if self.references else ""


def load_benchmark(file: Path, limit: int | None = None, *, graded: bool = False) -> Benchmark:
    """Read the first `limit` conversations (None = all). Raises UserError naming the first bad line.

    `graded` asks for the prompts whose answers can be scored, where a benchmark has others for that.
    """
    name = file.name.partition(".")[0]
    known = SUITE.get(name)
    problems = _first((_problem(row, where, known, graded) for where, row in read_rows(file)), limit)
    if not problems:
        raise UserError(f'{file} holds no prompts; write one {{"turns": ["..."]}} per line')
    return _benchmark(name, problems, file.name)


def load_named(
    name: str, *, folder: Path | None = None, revision: str | None = None, limit: int | None = None, graded: bool = False
) -> Benchmark:
    """One of the seven: from `folder`/NAME.jsonl (or .jsonl.gz, .parquet), else from the hub at `revision` (the pinned one).

    Raises UserError for an unknown name, a folder without it, and a hub that cannot be reached.
    """
    known = SUITE.get(name)
    if folder is not None:
        files = [folder / f"{name}{ending}" for ending in ENDINGS]
        found = [file for file in files if file.is_file()]
        if not found:
            raise UserError(f"{folder} holds no {files[0].name} (nor {', '.join(file.name for file in files[1:])})")
        return load_benchmark(found[0], limit, graded=graded)
    if known is None:
        raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(SUITE)}, or give your own prompts with --prompts")
    problems: list[Problem] = []
    commit = revision or known.revision
    for part in known.files:
        path, commit = download(known.repo, part, commit)
        rows = (known.read_row(row, where, graded=graded) for where, row in read_rows(path))
        problems += _first(rows, None if limit is None else limit - len(problems))
        if len(problems) == limit:
            break
    return _benchmark(name, problems, f"{known.repo}@{commit} ({known.config}, {known.split})")


def load_benchmarks(
    names: Sequence[str],
    files: Sequence[Path],
    *,
    folder: Path | None = None,
    revision: str | None = None,
    limit: int | None = None,
    graded: bool = False,
) -> list[Benchmark]:
    """What a command names: benchmarks ("all" = the seven) and prompt files. Raises UserError for none, and for one twice."""
    wanted = list(SUITE) if "all" in names else list(names)
    if revision is not None and (folder is not None or len(wanted) != 1):
        raise UserError(
            f"revision {revision!r} is one of a data set on the hub: give it with exactly one --benchmark, without --data"
        )
    found = [load_named(name, folder=folder, revision=revision, limit=limit, graded=graded) for name in wanted]
    found += [load_benchmark(file, limit, graded=graded) for file in files]
    if not found:
        raise UserError(f"nothing to measure; give --benchmark ({', '.join(SUITE)} or all) or --prompts FILE")
    seen = [benchmark.name for benchmark in found]
    for name in seen:
        if seen.count(name) > 1:
            raise UserError(f"{name} is named twice; results go by that name, so give each benchmark once")
    return found


def _first(problems: Iterable[Problem], limit: int | None) -> list[Problem]:
    """The first `limit`: what follows is not even read."""
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit}: at least 1 prompt is needed")
    return list(islice(problems, limit))


def _benchmark(name: str, problems: Sequence[Problem], source: str) -> Benchmark:
    references = tuple(problem.reference for problem in problems)
    return Benchmark(name, tuple(problem.turns for problem in problems), references if any(references) else (), source)


def _problem(row: Any, where: str, known: HubBenchmark | None, graded: bool) -> Problem:
    if known is not None and isinstance(row, dict) and "turns" not in row:
        return known.read_row(row, where, graded=graded)
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f'{where} has no "turns": a list of at least one text that is not empty')
    return Problem(tuple(turns), _reference(row, where))


def _reference(row: dict[str, Any], where: str) -> Reference | None:
    given = {key: row[key] for key in ("answer", "tests", "preamble", "entry_point") if key in row}
    for key, value in given.items():
        if not isinstance(value, str):
            raise UserError(f'{where}: "{key}" must be a text, not {value!r}')
    if "answer" in given:
        return MathAnswer(given["answer"])
    return UnitTests(**given) if "tests" in given else None


def encode_conversation(
    target: Target, turns: Sequence[str], answers: Sequence[str], *, chat: bool, thinking: bool | None = None
) -> list[int]:
    """Token ids up to the answer to the last of `turns`; `answers` are those to all turns before it.

    Without a chat template (`chat=False`) turns and answers follow each other, a line break between them. `thinking` is the
    template's switch (None: as the template has it by itself).
    """
    assert len(turns) == len(answers) + 1, f"{len(turns)} turns need {len(turns) - 1} answers before the last one"
    if not chat:
        parts = [part for pair in zip(turns, answers, strict=False) for part in pair]
        return list(target.tokenizer("\n".join([*parts, turns[-1]]))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return target.encode_chat(messages, thinking=thinking)


def first_turns(benchmark: Benchmark, target: Target, *, chat: bool, max_new_tokens: int) -> tuple[list[list[int]], int]:
    """Token ids of every first turn whose answer fits the target's context, and how many do not.

    Raises UserError when none fits.
    """
    encoded = [encode_conversation(target, turns[:1], (), chat=chat) for turns in benchmark.conversations]
    fitting = [ids for ids in encoded if ids and len(ids) + max_new_tokens <= target.max_length]
    if not fitting:
        raise UserError(
            f"no prompt of {benchmark.name} leaves room for {max_new_tokens} new tokens in the {target.max_length} that "
            f"{target.name} holds; lower the number of new tokens or choose shorter prompts"
        )
    return fitting, len(encoded) - len(fitting)
