"""`dspine info` and `dspine drafters`: what a checkpoint is, told without loading its target."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dspine.drafters.registry import DRAFTERS
from dspine.targets.model import Target


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of shipped checkpoints and an empty cache."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr("dspine.drafters.checkpoint.shipped_folder", lambda: folder)
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_checkpoint_is_described_without_its_target(cli: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load", lambda *arguments, **options: pytest.fail("info loaded the target"))
    data = cli("info", folders.dspine, "--json").data
    weights = load_file(folders.dspine / "model.safetensors")
    assert data["parameters"] == sum(tensor.numel() for name, tensor in weights.items() if name != "draft_ids")
    assert data["parameters"] == sum(data["parameters_by_part"].values())
    assert data["parameters_by_part"]["injection readouts"] == 2 * 6 * 32
    assert data["dtype"] == "F32"
    assert data["config"]["target"]["name"] == "tiny-llama"
    assert data["file_bytes"]["model.safetensors"] == (folders.dspine / "model.safetensors").stat().st_size


def test_a_checkpoint_is_shown_as_a_table(cli: Any, folders: Any) -> None:
    outcome = cli("info", folders.dspine)
    assert outcome.code == 0
    for part in (
        "dspine",
        "tiny-llama (llama, 3 layers of 32, 260 tokens)",
        "6 slots: the anchor and 5 drafted tokens",
        "rank 6",
        "50%, 25%",
    ):
        assert part in outcome.out
    assert "injection" not in cli("info", folders.dflash).out


def test_fitting_is_checked_on_request(cli: Any, folders: Any, tmp_path: Path, make_model: Any) -> None:
    assert cli("info", folders.dspine, "--target", folders.target, "--json").data["fits"] == str(folders.target)
    shutil.copytree(folders.target, tmp_path / "other")
    make_model("llama", seed=5).save_pretrained(tmp_path / "other")
    outcome = cli("info", folders.dspine, "--target", tmp_path / "other")
    assert outcome.code == 2
    assert "this drafter was trained for tiny-llama with head_norms =" in outcome.error


def test_alone_it_lists_what_ships_and_what_is_bundled(cli: Any, folders: Any, shipped: Path, tmp_path: Path) -> None:
    assert "no checkpoints ship with this copy" in cli("info").out
    shutil.copytree(folders.dspine, shipped / "tiny-llama-dspine")
    shutil.copytree(folders.dflash, shipped / "tiny-llama-dflash")
    out = cli("info").out
    for part in ("tiny-llama-dspine", "tiny-llama-dflash", "smollm2-135m", "fetched on first use", str(tmp_path / "cache")):
        assert part in out
    data = cli("info", "--json").data
    assert [c["name"] for c in data["checkpoints"]] == ["tiny-llama-dflash", "tiny-llama-dspine"]
    assert data["targets"][0]["ready"] is False
    assert data["cache"] == str(tmp_path / "cache")
    assert cli("info", "tiny-llama-dspine", "--json").data["folder"] == str(shipped / "tiny-llama-dspine")


def test_drafters_are_listed_with_their_papers(cli: Any) -> None:
    out = cli("drafters").out
    assert "dflash" in out
    assert "Draft in Parallel, Condition Through Depth" in out


def test_bad_checkpoints_are_explained(cli: Any, folders: Any, tmp_path: Path) -> None:
    assert cli("info", "nothing").error == (
        "no draft checkpoint 'nothing'; give a checkpoint's folder or the name of a shipped one: none yet"
    )
    assert cli("info", tmp_path).error == f"{tmp_path} is no draft checkpoint: it has no config.json"
    assert cli("info", "--target", "x").error == "--target needs a checkpoint to hold against it"
    shutil.copytree(folders.dspine, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    assert cli("info", tmp_path / "damaged").error.startswith(f"{weights} is missing or damaged (")
    config = tmp_path / "damaged" / "config.json"
    config.write_text(config.read_text().replace('"drafter": "dspine"', '"drafter": "magic"'))
    assert cli("info", tmp_path / "damaged").error == f"unknown drafter 'magic'; choose one of: {', '.join(DRAFTERS)}"
