"""What a measurement ran on: without these a number cannot be compared with another."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
import transformers

from dspine import __version__


def machine_facts(device: torch.device) -> dict[str, str | int]:
    """Versions, processor, threads and device, ready for JSON."""
    return {
        "dspine": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def peak_memory_bytes() -> int | None:
    """The most resident memory this process has had; None where the system does not count it (Windows)."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
