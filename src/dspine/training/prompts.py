"""Prompt files: JSONL, one {"turns": [user text, ...]} a line; other keys are allowed.

A prompt is referred to by its file's name without ".jsonl" and its line index from 0, so answers can be kept without the
texts of others. Only the first turn is used: an answer to it is what a training sequence holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.errors import UserError
from dspine.journal import numbered_rows

SUFFIX = ".jsonl"
Ref = tuple[str, int]


@dataclass(frozen=True)
class Prompt:
    """A prompt's first user turn. `ref`: file name without suffix, line index."""

    ref: Ref
    text: str
    num_turns: int = 1

    @property
    def sha256(self) -> str:
        return prompt_sha256(self.text)


def prompt_sha256(text: str) -> str:
    """First 16 hex digits of the text's sha256: what an answer remembers of its prompt."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file. Raises UserError for a missing or damaged one and for a line without a first turn."""
    if file.suffix != SUFFIX:
        raise UserError(f"prompt file {file} is not named *{SUFFIX}; answers refer to it by that name, so rename it")
    return [_prompt(row, (file.stem, index), file) for index, row in numbered_rows(file)]


def _prompt(row: dict[str, Any], ref: Ref, file: Path) -> Prompt:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f'{file}, line {ref[1] + 1} has no "turns", a list of user texts; write {{"turns": ["..."]}}')
    if not turns[0].strip():
        raise UserError(f"{file}, line {ref[1] + 1} has an empty first turn; remove the line or give it a text")
    try:
        turns[0].encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character, no tokenizer can read it
        raise UserError(f"{file}, line {ref[1] + 1} holds half a character (\\ud800 to \\udfff); correct the text") from error
    return Prompt(ref, turns[0], len(turns))


def collect_prompts(files: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of each file, in order. Raises UserError for two files of one name."""
    if not files:
        raise UserError("no prompt files; give at least one")
    stems: dict[str, Path] = {}
    prompts: list[Prompt] = []
    for file in files:
        if file.stem in stems:
            raise UserError(f"{stems[file.stem]} and {file} have the same name, by which answers refer to them; rename one")
        stems[file.stem] = file
        prompts += read_prompts(file)[:limit]
    if not prompts:
        raise UserError(f"no prompts in {', '.join(map(str, files))}")
    return prompts


def find_prompts(stem: str, folders: Iterable[Path]) -> dict[Ref, Prompt]:
    """The prompts of the first file of that name in `folders`. Raises UserError where there is none."""
    looked = list(folders)
    for folder in looked:
        file = folder / (stem + SUFFIX)
        if file.is_file():
            return {prompt.ref: prompt for prompt in read_prompts(file)}
    places = ", ".join(str(folder) for folder in looked)
    raise UserError(f"answers refer to the prompt file {stem}{SUFFIX}, which is not in {places}; put it there or name its folder")
