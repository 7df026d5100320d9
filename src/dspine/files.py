"""Writing files so that readers see the old one or the whole new one, whatever happens in between."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 `text` under a temporary name, then rename it into place."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).chmod(0o644)  # mkstemp makes it the owner's alone
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
