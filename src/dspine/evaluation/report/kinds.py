"""The kinds of result files, each with the class that wrote it: a file is what all of its class's required fields make it.

Reading goes through pydantic's TypeAdapter of that very class, so a result whose field is missing or of another type is
refused with the field's name instead of turning up wrong in a table.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any, Union

from pydantic import TypeAdapter, ValidationError

from dspine.errors import UserError
from dspine.evaluation.acceptance import AcceptanceReport
from dspine.evaluation.batch_speed import BatchReport
from dspine.evaluation.breakdown import BreakdownReport
from dspine.evaluation.quality import QualityReport
from dspine.evaluation.speed import SpeedReport
from dspine.evaluation.studies.predecessor import PredecessorResult
from dspine.evaluation.studies.readout import ReadoutResult
from dspine.evaluation.studies.timing import TimingResult
from dspine.evaluation.throughput_report import ThroughputReport

Value = Union[str, float, int, None]  # noqa: UP007 - pydantic reads it at run time


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One line of a training run's curve.jsonl."""

    step: int
    acceptance_length: float
    slot_accuracy: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out results of one training run; `drafter` is the kind that its checkpoint names, if there is one."""

    points: tuple[CurvePoint, ...]
    drafter: str


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """table.json of `dspine compare`: one dictionary a row, by the heads of its table, and the reference's gains."""

    rows: tuple[dict[str, Value], ...]
    gains: tuple[dict[str, Value], ...]


KINDS: tuple[type[Any], ...] = (
    AcceptanceReport,
    QualityReport,
    SpeedReport,
    BatchReport,
    BreakdownReport,
    ThroughputReport,
    ReadoutResult,
    TimingResult,
    PredecessorResult,
    ComparisonTable,
)


def read_result(text: str) -> object:
    """The result in JSON `text`, as the class that wrote it. Raises UserError (without the file's name) for anything else."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"is no JSON: {error.msg} in line {error.lineno}") from error
    if not isinstance(data, dict):
        raise UserError("is no result: a JSON object is expected")
    kinds = [kind for kind in KINDS if required_fields(kind) <= data.keys()]
    if not kinds:
        raise UserError("is no result that the report knows")
    kind = max(kinds, key=lambda kind: len(required_fields(kind)))
    return _validated(TypeAdapter(kind), text)


def read_points(text: str) -> tuple[CurvePoint, ...]:
    """The lines of a curve.jsonl. Raises UserError (without the file's name) for anything else."""
    points: list[CurvePoint] = [_validated(TypeAdapter(CurvePoint), line) for line in text.splitlines() if line.strip()]
    if not points:
        raise UserError("is empty")
    return tuple(points)


def required_fields(kind: type[Any]) -> set[str]:
    return {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}


def _validated(adapter: TypeAdapter[Any], text: str) -> Any:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"is no valid result: {f'{where}: ' if where else ''}{first['msg']}") from error


def rebuilt_command(result: object) -> str | None:
    """The command line that gives `result`, from the settings it records; None where they are not enough."""
    if isinstance(result, AcceptanceReport):
        chat = "" if result.chat else " --no-chat"
        return (
            f"dspine eval acceptance --prompts {result.benchmark}.jsonl --limit {result.prompts} --target {result.target} "
            f"--drafter {result.drafter} --width {result.width} --max-new-tokens {result.max_new_tokens} "
            f"--temperature {result.temperature:g} --seed {result.seed}{chat}"
        )
    if isinstance(result, SpeedReport):
        reference = " --reference" if result.transformers_tok_per_s is not None else ""
        return (
            f"dspine bench speed --prompts FILE --limit {result.prompts} --target {result.target} --drafter {result.drafter} "
            f"--width {result.width} --max-new-tokens {result.max_new_tokens} --repeats {result.repeats} "
            f"--temperature {result.temperature:g}{reference}"
        )
    if isinstance(result, BatchReport):
        return (
            f"dspine bench batch --prompts FILE --rows {result.batch} --target {result.target} "
            f"--max-new-tokens {result.max_new_tokens} --repeats {result.repeats}"
        )
    return None
