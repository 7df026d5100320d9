"""What every study's result file says beside its numbers, how shares get their intervals, and the rows a stopped study keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dspine.errors import UserError
from dspine.evaluation.intervals import ratio_interval
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.files import write_text
from dspine.journal import Journal, Row
from dspine.training.corpus import Answer

StudyName = Literal["readout", "timing", "predecessor"]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Which blocks of the answers are studied."""

    prompts: str  # the prompt file's name without its ending
    max_new_tokens: int
    blocks_per_answer: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks_per_answer < 1:
            raise UserError(f"{self.blocks_per_answer} blocks per answer is not possible; give a number from 1")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The frozen drafter and its target. `weights_sha256` tells two trainings of one shape apart."""

    target: str
    drafter: str
    weights_sha256: str
    num_layers: int
    block_size: int
    num_draft_tokens: int
    attention: str

    @classmethod
    def of(cls, studied: StudiedDrafter) -> Subject:
        config = studied.config
        digest = hashlib.sha256()
        for tensor in studied.drafter.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return cls(
            target=studied.target.name,
            drafter=config.drafter,
            weights_sha256=digest.hexdigest()[:16],
            num_layers=config.num_layers,
            block_size=config.block_size,
            num_draft_tokens=config.num_draft_tokens,
            attention=config.attention,
        )


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The common part of a result. `answers` gave at least one block."""

    study: StudyName
    subject: Subject
    settings: BlockSettings
    answers: int
    blocks: int
    machine: dict[str, str | int]

    def write(self, file: Path) -> None:
        """Write JSON by one rename."""
        write_text(file, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


def common(study: StudyName, studied: StudiedDrafter, settings: BlockSettings, blocks: Sequence[int]) -> dict[str, Any]:
    """The common part's fields; `blocks` counts those of each answer. Raises UserError where there are none."""
    if not any(blocks):
        raise UserError(
            f"no answer to {settings.prompts} holds a block of {studied.num_draft_tokens + 1} tokens; allow longer answers"
        )
    return {
        "study": study,
        "subject": Subject.of(studied),
        "settings": settings,
        "answers": sum(count > 0 for count in blocks),
        "blocks": sum(blocks),
        "machine": machine_facts(studied.target.device),
    }


@dataclass(frozen=True)
class Share:
    """A quotient of two sums over answers with its 95 % interval (see `intervals`); None: nothing to divide by."""

    value: float | None
    ci95: Interval | None
    total: int  # the sum divided by

    @classmethod
    def of(cls, parts: Sequence[int], totals: Sequence[int]) -> Share:
        """`parts` and `totals` are each answer's."""
        if sum(totals) == 0:
            return cls(None, None, 0)
        return cls(sum(parts) / sum(totals), ratio_interval(parts, totals), sum(totals))

    def minus_one(self) -> Share:
        """A quotient as a relative gain."""
        if self.value is None or self.ci95 is None:
            return self
        return Share(self.value - 1, (self.ci95[0] - 1, self.ci95[1] - 1), self.total)


class StudyRows:
    """Rows already worked out, by key, in OUTPUT/rows.jsonl. Close it, or use `study_rows`.

    Raises UserError where OUTPUT holds the rows of another study, drafter or settings.
    """

    def __init__(self, output: Path, facts: Row) -> None:
        self.output = output
        ours: Row = json.loads(json.dumps(facts))

        def check(theirs: Row) -> None:
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    raise UserError(
                        f"{output} holds a study with {name} = {theirs.get(name)}, this one has {ours.get(name)}; "
                        "choose another --output"
                    )

        self._journal = Journal(output / "rows.jsonl", ours, check)
        self._rows = {row["key"]: row for row in self._journal.rows}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str, make: Callable[[], Row]) -> Row:
        """The row of that key, made and kept now if it is not there."""
        if key not in self._rows:
            row = {"key": key, **make()}
            self._journal.append(row)
            self._rows[key] = row
        return self._rows[key]

    def close(self) -> None:
        self._journal.close()


def study_rows(
    output: Path, study: StudyName, studied: StudiedDrafter, settings: BlockSettings, **more: Any
) -> closing[StudyRows]:  # fmt: skip
    """The rows of one study of one drafter, for a `with` statement."""
    facts = {"study": study, **asdict(Subject.of(studied)), **asdict(settings), **more}
    return closing(StudyRows(output, facts))


def answer_key(answer: Answer) -> str:
    return f"{answer.ref[0]}:{answer.ref[1]}"
