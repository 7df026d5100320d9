"""Files are the old ones or the whole new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine.files import write_text


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    write_text(file, "one\n")
    write_text(file, "zwei äöü\n")
    assert file.read_text(encoding="utf-8") == "zwei äöü\n"
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    write_text(file, "old")

    def refuse(self: Path, other: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]
