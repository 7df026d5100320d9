"""What a measurement ran on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dspine import __version__
from dspine.evaluation.machine import cpu_name, machine_facts, peak_memory_bytes


def test_facts_name_versions_and_threads() -> None:
    facts = machine_facts(torch.device("cpu"))
    assert (facts["dspine"], facts["torch"], facts["device"]) == (__version__, torch.__version__, "cpu")
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]


def test_the_processors_name_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick Chip 9000: Pro\n", encoding="utf-8")
    assert cpu_name(tmp_path / "cpuinfo") == "Quick Chip 9000: Pro"
    assert cpu_name(tmp_path / "none")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count it")
def test_peak_memory_is_in_bytes() -> None:
    peak = peak_memory_bytes()
    assert peak is not None
    assert 50e6 < peak < 1e12, "torch alone takes more than 50 MB"
