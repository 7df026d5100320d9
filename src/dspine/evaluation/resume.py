"""Result files that a second call of the same command finds: a finished one is read, one under way goes on.

While a result is measured, its conversations lie in a journal beside it (`NAME.json.partial`); the whole result replaces it
by one rename. A file that was measured otherwise is refused, not overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from dspine.errors import UserError
from dspine.evaluation.settings import RunSettings
from dspine.files import write_text
from dspine.journal import Journal, partial_file, storage_errors


@dataclass(frozen=True, kw_only=True)
class RunReport(RunSettings):
    """A result: its settings, what was measured, and a record of every conversation."""

    def summary(self) -> dict[str, Any]:
        """Everything but the single conversations."""
        return {key: value for key, value in asdict(self).items() if key != "conversations"}

    def write(self, file: Path) -> None:
        """Write JSON by one rename: readers see the old file or the whole new one."""
        write_text(file, json.dumps(asdict(self), indent=2) + "\n")


Report = TypeVar("Report", bound=RunReport)
Row = TypeVar("Row")


def resumed(
    file: Path,
    kind: type[Report],
    row: type[Row],
    settings: RunSettings,
    run: Callable[[list[Row], Callable[[Row], None]], Report],
    on_result: Callable[[Row], None],
) -> Report:
    """The result in `file`: read if it is there, continued if it is under way, measured if not.

    `run(done, keep)` measures what is not in `done` (dataclasses of type `row`), hands each new one to `keep`, and returns the
    report. `on_result` hears of them all, those of a call before included. Raises UserError for another measurement's file.
    """
    found = finished(file, kind, settings)
    if found is not None:
        return found
    partial = partial_file(file)
    journal = Journal(partial, asdict(settings), lambda header: settings.check_same(header, partial))
    try:
        adapter: TypeAdapter[Row] = TypeAdapter(row)
        done = [adapter.validate_python(values) for values in journal.rows]
        for result in done:
            on_result(result)

        def keep(result: Row) -> None:
            journal.append(adapter.dump_python(result))
            on_result(result)

        report = run(done, keep)
        report.write(file)
        journal.delete()
        return report
    finally:
        journal.close()


def finished(file: Path, kind: type[Report], settings: RunSettings) -> Report | None:
    """The result in `file`, None where there is no such file. Raises UserError for another measurement's, and a damaged one."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
        settings.check_same(data, file)
        return TypeAdapter(kind).validate_python(data)
    except UserError:
        raise
    except (ValueError, AttributeError) as error:  # no JSON, no object, or one whose fields are another kind's
        raise UserError(f"{file} is no result of this command; choose another output, or remove that file") from error


def result_name(benchmark: str, temperature: float) -> str:
    """The file of one benchmark at one temperature in a folder of results."""
    return f"{benchmark}-T{temperature:g}.json"


def result_files(output: Path | None, benchmarks: Sequence[str], temperatures: Sequence[float]) -> dict[tuple[str, float], Path]:
    """Where each (benchmark, temperature) goes: into folder `output`, made if need be, or, a single one, into a .json file.

    Empty without `output`. Raises UserError where nothing can be written.
    """
    if output is None:
        return {}
    wanted = [(benchmark, temperature) for benchmark in benchmarks for temperature in temperatures]
    if len(set(wanted)) < len(wanted):
        raise UserError("a temperature is given twice; its results would be the same")
    if output.suffix != ".json":
        with storage_errors(output):
            output.mkdir(parents=True, exist_ok=True)
        return {(benchmark, temperature): output / result_name(benchmark, temperature) for benchmark, temperature in wanted}
    if output.is_dir() or not output.parent.is_dir():
        raise UserError(f"cannot write {output}: it is a folder or its folder does not exist")
    if len(wanted) > 1:
        raise UserError(f"{len(wanted)} results do not go into the one file {output}; give a folder")
    return {wanted[0]: output}
