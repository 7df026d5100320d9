"""What a measurement ran on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspine import __version__
from dspine.evaluation.machine import command_line, cpu_name, machine_facts, peak_memory_bytes, source_revision


def test_facts_name_versions_and_threads() -> None:
    facts = machine_facts(torch.device("cpu"))
    assert (facts["dspine"], facts["torch"], facts["device"]) == (__version__, torch.__version__, "cpu")
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]


def test_facts_name_the_command_and_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/tools/bin/dspine", "bench", "--prompts", "/home/me/my prompts.jsonl", "-n", "3"])
    facts = machine_facts(torch.device("cpu"))
    assert facts["command"] == "dspine bench --prompts 'my prompts.jsonl' -n 3"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", str(facts["date"]))


def test_relative_paths_stay_in_the_command() -> None:
    assert command_line(["dspine", "bench", "--prompts", "data/gsm8k.jsonl"]) == "dspine bench --prompts data/gsm8k.jsonl"


def test_the_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert source_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "code.py").write_text("1\n")
    for arguments in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    source_revision.cache_clear()
    clean = source_revision(tmp_path)
    assert clean is not None
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    (tmp_path / "code.py").write_text("2\n")
    source_revision.cache_clear()
    assert source_revision(tmp_path) == f"{clean}-dirty"


def test_the_processors_name_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick Chip 9000: Pro\n", encoding="utf-8")
    assert cpu_name(tmp_path / "cpuinfo") == "Quick Chip 9000: Pro"
    assert cpu_name(tmp_path / "none")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count it")
def test_peak_memory_is_in_bytes() -> None:
    peak = peak_memory_bytes()
    assert peak is not None
    assert 50e6 < peak < 1e12, "torch alone takes more than 50 MB"
