"""Where a number comes from: file, command, machine, day and git revision of the result it stands in.

Results written before their command, day and revision were recorded are traced as far as it goes: the command is rebuilt
from the recorded settings, day and revision are those of the commit that brought the file. The page says so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Source:
    """One result file, as the page names it. `number` is its place in the list of sources."""

    number: int
    file: str
    command: str
    machine: str
    date: str
    revision: str


def trace(number: int, file: Path, shown: str, machine: Mapping[str, str | int], rebuilt_command: str | None) -> Source:
    """The source of `file`, shown as `shown`; `machine` is what the result recorded, perhaps nothing."""
    command = machine.get("command") or (f"{rebuilt_command} (rebuilt from its settings)" if rebuilt_command else UNKNOWN)
    date, revision = machine.get("date"), machine.get("revision")
    if not (date and revision):
        commit = last_commit(file)
        if commit is not None:
            date = date or f"{commit[0]} (committed)"
            revision = revision or f"{commit[1]} (committed)"
    return Source(number, shown, str(command), describe_machine(machine), str(date or UNKNOWN), str(revision or UNKNOWN))


def describe_machine(machine: Mapping[str, str | int]) -> str:
    """Device, threads, system and versions in one line."""
    if not machine:
        return UNKNOWN
    device = machine.get("device", "cpu")
    parts = [str(machine["cpu"]) if device == "cpu" and "cpu" in machine else str(device)]
    if "threads" in machine and device == "cpu":
        parts.append(f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}")
    if "system" in machine:
        parts.append(str(machine["system"]))
    parts += [f"{name} {machine[name]}" for name in ("dspine", "torch", "transformers") if name in machine]
    return ", ".join(parts)


def last_commit(file: Path) -> tuple[str, str] | None:
    """(day, short revision) of the last commit that touched `file`; None outside a repository, or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(file.parent), "log", "-1", "--format=%cs %h", "--", file.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    day, _, revision = done.stdout.strip().partition(" ")
    return (day, revision) if revision else None
