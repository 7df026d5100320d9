"""`dspine export`: what it prints for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_an_export_says_how_to_start_the_engine(cli: Any, folders: Any, tmp_path: Path) -> None:
    outcome = cli("export", folders.dspine, "--target", folders.target, "--output", tmp_path / "draft")
    assert outcome.code == 0
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    assert outcome.data["needs_plugin"] is True
    assert outcome.data["speculative_config"] == {
        "method": "dflash",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 5,
    }
    assert "--speculative-config" in outcome.err


def test_a_folder_of_something_else_is_left_alone(cli: Any, folders: Any) -> None:
    outcome = cli("export", folders.dspine, "--target", folders.target, "--output", folders.target)
    assert outcome.code == 2
    assert "is no export of a drafter" in outcome.error
