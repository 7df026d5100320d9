"""Build hook: a wheel carries the trained drafters of `checkpoints/` as `dspine/checkpoints/`.

An editable install needs no copy: there the package finds the folder of the source checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGED_SUFFIXES = {".json", ".md", ".safetensors"}


class CheckpointsHook(BuildHookInterface):
    """Adds every checkpoint file to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        for file in sorted((root / "checkpoints").rglob("*")):
            if file.is_file() and file.suffix in PACKAGED_SUFFIXES:
                build_data["force_include"][str(file)] = f"dspine/{file.relative_to(root).as_posix()}"
