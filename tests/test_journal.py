"""Crash-safe JSONL: torn lines, foreign and damaged files, a full disk, atomic replacement."""

from __future__ import annotations

import errno
import gzip
from pathlib import Path
from typing import Any

import pytest

from dspine.errors import UserError
from dspine.journal import Journal, partial_file, read_rows, write_rows


def accept(found: dict[str, Any]) -> None:
    assert found == {"seed": 0}


class FullDisk:
    """A stream on a disk that takes a few bytes of a write and then no more."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, data: bytes) -> int:
        self.stream.write(data[:5])
        self.stream.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.stream.close()


def test_append_and_resume(tmp_path: Path) -> None:
    file = tmp_path / "new" / "work.partial"
    journal = Journal(file, {"seed": 0}, accept)
    journal.append({"n": 1, "text": "ü\u2028\n"})
    journal.close()
    journal = Journal(file, {"seed": 0}, accept)
    assert journal.rows == [{"n": 1, "text": "ü\u2028\n"}]
    journal.append({"n": 2})
    journal.close()
    assert read_rows(file) == [{"header": {"seed": 0}}, {"n": 1, "text": "ü\u2028\n"}, {"n": 2}]


@pytest.mark.parametrize("keep", range(1, 40))
def test_every_cut_resumes_to_the_same_rows(tmp_path: Path, keep: int) -> None:
    """A run killed after any number of bytes goes on as if it had not begun the row it was writing."""
    file = tmp_path / "work.partial"
    journal = Journal(file, {"seed": 0}, accept)
    journal.append({"n": 1})
    journal.append({"n": 2})
    journal.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    complete = whole[:keep].count(b"\n")
    journal = Journal(file, {"seed": 0}, accept)
    assert journal.rows == [{"n": i} for i in range(1, complete)]
    for n in range(max(complete, 1), 3):
        journal.append({"n": n})
    journal.close()
    assert file.read_bytes() == whole


def test_header_of_a_continued_file_is_checked_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "work.partial"
    journal = Journal(file, {"seed": 0, "version": 1}, lambda found: None)
    journal.append({})
    journal.close()
    again = Journal(file, {"seed": 0, "version": 2}, lambda found: None)
    again.close()
    assert again.header == {"seed": 0, "version": 1}

    def refuse(found: dict[str, Any]) -> None:
        raise UserError(f"seed {found['seed']}")

    with pytest.raises(UserError, match="seed 0"):
        Journal(file, {"seed": 1}, refuse)
    assert len(read_rows(file)) == 2


def test_foreign_and_damaged_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "work.partial"
    for content, sentence in (
        ('{"turns": ["a"]}\n', "does not start with a header line"),
        ('{"header": {"seed": 0}}\n{"n": \n{"n": 2}\n', "line 2 is no JSON"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=sentence):
            Journal(file, {"seed": 0}, accept)
        assert file.read_text() == content


def test_a_journal_without_rows_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "work.partial", {"seed": 0}, accept)
    assert (tmp_path / "work.partial").is_file()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_sentence_and_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "work.partial"
    journal = Journal(file, {"seed": 0}, accept)
    journal.append({"n": 1})
    monkeypatch.setattr(journal, "_stream", FullDisk(journal._stream))
    with pytest.raises(UserError, match=r"cannot write .*work.partial: No space left on device; make room"):
        journal.append({"n": 2})
    journal.close()
    assert file.read_bytes().endswith(b'{"n":')  # torn
    journal = Journal(file, {"seed": 0}, accept)
    assert journal.rows == [{"n": 1}]
    journal.close()


def test_whole_files_are_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.jsonl.gz"
    write_rows(file, [{"n": 1}])
    before = file.read_bytes()
    assert gzip.decompress(before) == b'{"n":1}\n'
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1e9)
        write_rows(file, [{"n": 1}])
    assert file.read_bytes() == before  # no time stamp inside

    def rows() -> Any:
        yield {"n": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(file, rows())

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"cannot write .*out.jsonl.gz: No space left"):
        write_rows(file, [{"n": 3}])
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*: (Not a directory|File exists)"):
        Journal(tmp_path / "file" / "work.partial", {}, accept)
    with pytest.raises(UserError, match=r"cannot write .*: (Not a directory|File exists)"):
        write_rows(tmp_path / "file" / "out.jsonl", [])


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_damaged_gzip(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "out.jsonl.gz"
    write_rows(file, [{"n": i} for i in range(100)])
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(UserError, match="no complete gzip file"):
        read_rows(file)
    file.write_bytes(b'{"n": 1}\n')
    with pytest.raises(UserError, match="no complete gzip file"):
        read_rows(file)


def test_partial_file_stands_beside_the_output() -> None:
    assert partial_file(Path("a/out.jsonl.gz")) == Path("a/out.jsonl.gz.partial")
