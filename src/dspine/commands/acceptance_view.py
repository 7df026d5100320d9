"""Text in two colours: what was drafted and accepted, and what the target wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dspine.decoding.text import TextStream

ACCEPTED_STYLE = "green"
OWN_STYLE = "bold yellow"


class AcceptanceView:
    """Prints tokens as they come. Without colours the target's own tokens stand in [brackets]."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], console: Console) -> None:
        self._text = TextStream(tokenizer, tuple(stop))
        self._console = console
        self._plain = console.color_system is None
        self._counts = {True: 0, False: 0}

    def push(self, token_ids: Sequence[int], accepted: Sequence[bool]) -> None:
        """Print tokens, each in the colour of where it came from."""
        for token, drafted in zip(token_ids, accepted, strict=True):
            self._counts[drafted] += 1
            self._text.push(token)
            self._print(self._text.take(), drafted)
        self._console.file.flush()

    def finish(self) -> None:
        """Print what was held back, and the legend."""
        self._print(self._text.take(final=True), False)
        self._console.print()
        legend = Text()
        legend.append("drafted and accepted", ACCEPTED_STYLE).append(f" {self._counts[True]}, ")
        name = "[the target's own]" if self._plain else "the target's own"
        legend.append(name, OWN_STYLE).append(f" {self._counts[False]} tokens")
        self._console.print(legend)

    def _print(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if self._plain and not drafted:
            text = f"[{text}]"
        styled = Text(text, ACCEPTED_STYLE if drafted else OWN_STYLE)
        self._console.print(styled, end="", soft_wrap=True)
