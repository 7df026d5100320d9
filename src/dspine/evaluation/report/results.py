"""Results from files and folders, each with its source and, for rows of a comparison, the row's name.

    results = read_results([Path("benchmarks/results/2026-11-30")])
    for result in results.of(AcceptanceReport): result.data.acceptance_length, result.source.file

A file that was named and is no result is an error; one that merely lies in a named folder is left out with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dspine.errors import UserError
from dspine.evaluation.report.kinds import Curve, read_points, read_result, rebuilt_command
from dspine.evaluation.report.provenance import Source, trace

T = TypeVar("T")
CURVE = "curve.jsonl"
NOT_RESULTS = {"config.json", "calibration.json", "plan.json", "step_seconds.json"}  # what dspine writes beside its results


@dataclass(frozen=True)
class Result(Generic[T]):
    """One result. `collection` is the comparison it belongs to ("" for none), `row` its row there (or the run's name)."""

    data: T
    source: Source
    collection: str
    row: str


@dataclass(frozen=True)
class Results:
    """Everything that was read, in the order of the files, and one line for every file that was left out."""

    all: tuple[Result[Any], ...]
    warnings: tuple[str, ...]

    def of(self, kind: type[T]) -> list[Result[T]]:
        return [result for result in self.all if isinstance(result.data, kind)]


def read_results(paths: Sequence[Path]) -> Results:
    """Read files, and folders with all below them. Raises UserError for a missing or foreign file that is named itself, and
    when there is no result at all."""
    found: list[Result[Any]] = []
    warnings: list[str] = []
    seen: set[Path] = set()
    for file, shown, named in _files(paths):
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        try:
            found.append(_read(file, shown, len(found) + 1))
        except (UserError, OSError, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, UserError) else "cannot be read as text"
            if named:
                raise UserError(f"{shown} {reason}; name result files, or folders with them") from error
            warnings.append(f"left out: {shown} {reason}")
    if not found:
        raise UserError(f"no results in {', '.join(map(str, paths))}; give files that `dspine eval`, `bench` or `compare` wrote")
    return Results(tuple(found), tuple(warnings))


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, str, bool]]:
    """(file, how it is shown, whether it was named itself); an absolute path is shown from its last folder on."""
    for path in paths:
        base = path.parent if path.is_absolute() else Path()
        if path.is_dir():
            for file in sorted(path.rglob("*.json*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if (
                    file.is_file()
                    and not hidden
                    and file.name not in NOT_RESULTS
                    and (file.suffix == ".json" or file.name == CURVE)
                ):
                    yield file, file.relative_to(base).as_posix(), False
        elif path.is_file():
            yield path, path.relative_to(base).as_posix(), True
        else:
            raise UserError(f"{path} does not exist")


def _read(file: Path, shown: str, number: int) -> Result[Any]:
    collection, row = _place(file.resolve())
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        data: Any = Curve(points=read_points(text), drafter=_drafter_of_run(file.parent))
        row = row or (file.parent.name if file.parent.name != "training" else file.parent.parent.name)
    else:
        data = read_result(text)
    machine: Mapping[str, str | int] = json.loads(text).get("machine", {}) if file.suffix == ".json" else {}
    return Result(data, trace(number, file, shown, machine, rebuilt_command(data)), collection, row)


def _place(file: Path) -> tuple[str, str]:
    """(comparison, row) of a file in the folder of `dspine compare` (see comparison.run); empty names elsewhere."""
    for folder in file.parents:
        if (folder / "plan.json").is_file():
            inside = file.relative_to(folder).parts
            return folder.name, inside[1] if inside[0] == "rows" and len(inside) > 2 else ""
    return "", ""


def _drafter_of_run(folder: Path) -> str:
    """The kind of the drafter that a run in `folder` trained, from its checkpoint; "" before there is one."""
    for config in (folder / "config.json", folder / "checkpoint" / "config.json"):
        if config.is_file():
            return str(json.loads(config.read_text(encoding="utf-8")).get("drafter", ""))
    return ""
