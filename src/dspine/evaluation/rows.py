"""Rows of data files: JSON lines (plain or gzipped) and Parquet, read one by one, from this machine or from the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspine.errors import UserError

Row = dict[str, Any]
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


def read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of every row, as it is needed. Raises UserError for what cannot be read."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            offset = 0
            for number, line in enumerate(stream, 1):  # bytes: JSON strings may hold Unicode's other line separators
                if line.strip():
                    yield f"{file}, line {number}", _parse(line, file, number, offset)
                offset += len(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file} is no complete gzip file ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read prompts from {file}: {error.strerror or error}") from error


def _parse(line: bytes, file: Path, number: int, offset: int) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {offset + error.start}); convert it first") from error
    except json.JSONDecodeError as error:
        raise UserError(f'{file}, line {number} is no JSON ({error.msg}); write one {{"turns": ["..."]}} per line') from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError('reading Parquet files needs the extra: pip install -e ".[eval]"') from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {file} ({str(error).splitlines()[0]}); copy it again") from error


def download(repo: str, file: str, revision: str) -> tuple[Path, str]:
    """One file of a data set on the hub at `revision`, from the hub's own cache where it lies there: (path, commit).

    Raises UserError where it can be had from neither.
    """
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except (OSError, ValueError) as error:  # no network, no such file, a malformed name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot fetch {file} of the data set {repo} at revision {revision} ({reason}); check the network, or give a folder "
            "that holds the benchmarks with --data"
        ) from error
    # The cache keeps a commit's files in snapshots/COMMIT/, whatever branch or tag named it.
    return path, path.parents[len(Path(file).parts) - 1].name
