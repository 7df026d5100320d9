"""JSONL files that survive a crash: rows appended one by one and resumed, or a whole file replaced at once.

    journal = Journal(Path("work.jsonl.partial"), {"seed": 0}, check)
    journal.append({"answer": 42})

One writer per file. A row counts once its newline is written, so a killed run loses at most the row it was writing.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dspine.errors import UserError

Row = dict[str, Any]


class Journal:
    """An append-only file: a {"header": ...} line, then `rows`, those that were there included.

    `check` gets the header of a file to be continued and raises UserError where it is another run's; `header` is then that
    file's. Raises UserError for a damaged file and for one that cannot be written.
    """

    def __init__(self, file: Path, header: Row, check: Callable[[Row], None]) -> None:
        self.file, self.header = file, header
        self.rows: list[Row] = []
        with storage_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(file)
            found = read_rows(file) if file.is_file() else []
            if found:
                self.header, self.rows = header_of(found[0], file), found[1:]
                check(self.header)
            self._stream = file.open("ab")
        if not found:
            try:
                self._write({"header": header})
            except UserError:
                self.close()
                raise

    def append(self, row: Row) -> None:
        self._write(row)
        self.rows.append(row)

    def _write(self, row: Row) -> None:
        with storage_errors(self.file):
            self._stream.write((to_line(row) + "\n").encode())
            self._stream.flush()

    def close(self) -> None:
        """Close the file; one without rows is removed."""
        # Closing flushes; whatever a full disk refuses here has been reported by the write before.
        with suppress(OSError):
            self._stream.close()
        if not self.rows:
            self.file.unlink(missing_ok=True)

    def delete(self) -> None:
        """Remove the file: its rows have gone into a finished one."""
        self.rows = []
        self.close()


def partial_file(output: Path) -> Path:
    """Where a run keeps its journal until `output` is complete."""
    return output.with_name(output.name + ".partial")


def to_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def header_of(row: Row, file: Path) -> Row:
    """The content of a header line; UserError for any other line."""
    header = row.get("header")
    if not isinstance(header, dict):
        raise UserError(f"{file} does not start with a header line, so it was not written by this command; choose another file")
    return header


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write a whole file, gzipped if its name ends in .gz, and put it in place by one rename. Same rows, same bytes."""
    work = file.with_name(f".{file.name}.tmp")
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with work.open("wb") as raw:
                with _encoder(raw, file) as stream:
                    for row in rows:
                        stream.write((to_line(row) + "\n").encode())
                raw.flush()
                os.fsync(raw.fileno())
            work.replace(file)
        except BaseException:
            work.unlink(missing_ok=True)
            raise


@contextmanager
def _encoder(raw: BinaryIO, file: Path) -> Iterator[Any]:
    if file.suffix != ".gz":
        yield raw
        return
    # No file name and no time inside: they would make equal files differ.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=raw, mtime=0) as stream:
        yield stream


def read_rows(file: Path) -> list[Row]:
    """The JSON objects of a JSONL file, gzipped if its name ends in .gz. UserError names the line that is none."""
    return [row for _, row in numbered_rows(file)]


def numbered_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """(line index from 0, object) of each line that is not blank."""
    # Not splitlines(): JSON strings may hold the other line separators of Unicode.
    for index, line in enumerate(_read_text(file).split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {index + 1} is no JSON ({error}); the file is damaged or of another kind") from error
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {index + 1} is no JSON object; every line has to be one")
        yield index, row


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {file}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file} is no complete gzip file ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _cut_torn_line(file: Path) -> None:
    """Drop what follows the last newline: a killed run was inside that row."""
    if not file.is_file():
        return
    data = file.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep < len(data):
        with file.open("r+b") as stream:
            stream.truncate(keep)


@contextmanager
def storage_errors(file: Path) -> Iterator[None]:
    """Turn what a disk refuses into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write {file}: {reason}; make room or choose another place, then run the same command again"
        ) from error
