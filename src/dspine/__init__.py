"""dspine: make an LLM decode faster with a parallel drafter; the output stays exactly the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.api import LLM, GenerationResult, StreamChunk, load
    from dspine.decoding.sampling import SamplingParams
    from dspine.targets.model import Target

__version__ = "0.1.0"
__all__ = ["LLM", "GenerationResult", "SamplingParams", "StreamChunk", "Target", "UserError", "__version__", "load"]

_LAZY = {
    "LLM": "dspine.api",
    "GenerationResult": "dspine.api",
    "StreamChunk": "dspine.api",
    "load": "dspine.api",
    "SamplingParams": "dspine.decoding.sampling",
    "Target": "dspine.targets.model",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is used: `dspine --help` stays quick."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dspine' has no attribute {name!r}")
