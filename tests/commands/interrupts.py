"""For programs that a test interrupts."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and its children inherit that: give a child the signal back before it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
