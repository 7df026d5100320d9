"""What a measurement ran on, when, and by which command: without these a number cannot be compared with another."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch
import transformers

from dspine import __version__


def machine_facts(device: torch.device) -> dict[str, str | int]:
    """Versions, processor, threads, device, command, day (UTC) and git revision, ready for JSON.

    `revision` stands there only where the package runs from a checkout.
    """
    revision = source_revision()
    return {
        "dspine": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "command": command_line(sys.argv),
        "date": datetime.now(timezone.utc).date().isoformat(),
        **({"revision": revision} if revision else {}),
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command that runs, for a shell. Absolute paths are cut to their last part: results are shared, folders are not."""
    return shlex.join(Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments)


@cache
def source_revision(root: Path = Path(__file__).parents[3]) -> str | None:
    """Short git revision of the checkout at `root`, with "-dirty" where tracked files differ from it; None without one."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():  # an installed package may lie inside somebody else's repository
        return None
    done = subprocess.run([git, "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


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
