"""The target's features of a corpus on disk, so that several epochs pay for one forward.

A store is a folder: `store.json` (what was computed), `index.jsonl` (one line a sequence: ref, p, ids, n), and two raw
float16 files with n rows a sequence: `taps.f16` [taps * d] and `hidden.f16` [d] (after the final norm; the teacher).
Data is appended before its index line, so a killed run loses at most the sequence it was writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.errors import UserError
from dspine.files import write_text

BYTES_PER_VALUE = 2
FLOAT16_MAX = 65504.0  # some targets have larger activations in a few dimensions


@dataclass(frozen=True)
class AnswerFeatures:
    """One answered prompt: tokens [n + 1 or more], prompt length, features [n, taps * d], teacher states [n, d]."""

    tokens: Tensor
    prompt_length: int
    features: Tensor
    teacher: Tensor


def store_bytes(num_tokens: int, num_taps: int, hidden_size: int) -> int:
    """Disk space of a store before it is written."""
    return num_tokens * (num_taps + 1) * hidden_size * BYTES_PER_VALUE


class FeatureStore:
    """Append with `append`, read with `[i]`. Raises UserError for a store made for another target or other taps."""

    def __init__(self, folder: Path, facts: dict[str, Any], num_taps: int, hidden_size: int) -> None:
        self.folder = folder
        self.widths = {"taps.f16": num_taps * hidden_size, "hidden.f16": hidden_size}
        folder.mkdir(parents=True, exist_ok=True)
        self._check_facts(facts)
        self.entries = self._read_index()
        self.starts = np.concatenate(([0], np.cumsum([e["n"] for e in self.entries], dtype=np.int64)))
        self._drop_unindexed()

    def _check_facts(self, facts: dict[str, Any]) -> None:
        described = self.folder / "store.json"
        if not described.is_file():
            write_text(described, json.dumps(facts, indent=2) + "\n")
            return
        try:
            found = json.loads(described.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{described} is damaged; delete {self.folder} and compute the features again") from error
        for key, value in facts.items():
            if found.get(key) != value:
                theirs = found.get(key)
                raise UserError(f"{self.folder} holds features with {key} = {theirs}, not {value}; choose another cache folder")

    def _read_index(self) -> list[dict[str, Any]]:
        file = self.folder / "index.jsonl"
        if not file.is_file():
            return []
        lines = file.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a run was killed inside this line
            torn = lines.pop()
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size - len(torn))
        return [json.loads(line) for line in lines]

    def _drop_unindexed(self) -> None:
        """Cut a killed run's unfinished tail."""
        keep = int(self.starts[-1])
        for name, width in self.widths.items():
            file = self.folder / name
            size = keep * width * BYTES_PER_VALUE
            have = file.stat().st_size if file.is_file() else 0
            if have < size:
                raise UserError(f"{file} is shorter than its index says; delete {self.folder} and compute the features again")
            if have > size:
                with file.open("r+b") as stream:
                    stream.truncate(size)

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: dict[str, Any], taps: Tensor, hidden: Tensor) -> None:
        """Add a sequence: entry has ref, p and ids; taps [n, taps * d], hidden [n, d]."""
        line = {**entry, "n": taps.shape[0]}
        try:
            for name, data in (("taps.f16", taps), ("hidden.f16", hidden)):
                with (self.folder / name).open("ab") as stream:
                    stream.write(data.to("cpu").clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16).numpy().tobytes())
            with (self.folder / "index.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            # Opening the store again cuts what this append left behind.
            raise UserError(
                f"cannot write features to {self.folder} ({error}); free disk space and run the same command"
            ) from error
        self.entries.append(line)
        self.starts = np.append(self.starts, self.starts[-1] + taps.shape[0])

    def __getitem__(self, i: int) -> AnswerFeatures:
        i = range(len(self))[i]
        entry, start = self.entries[i], int(self.starts[i])
        parts = [self._rows(name, width, start, entry["n"]) for name, width in self.widths.items()]
        return AnswerFeatures(torch.tensor(entry["ids"]), entry["p"], parts[0], parts[1])

    def _rows(self, name: str, width: int, start: int, count: int) -> Tensor:
        offset = start * width * BYTES_PER_VALUE
        data = np.fromfile(self.folder / name, dtype=np.float16, count=count * width, offset=offset)
        return torch.from_numpy(data.reshape(count, width)).float()


def most_frequent_tokens(answers: Iterable[tuple[list[int], int]], size: int) -> Tensor:
    """The `size` most frequent response token ids [<= size] of (ids, prompt length) pairs: a draft vocabulary."""
    counts: dict[int, int] = {}
    for ids, prompt_length in answers:
        for token in ids[prompt_length:]:
            counts[token] = counts.get(token, 0) + 1
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))
