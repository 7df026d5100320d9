"""Token ids to text while they arrive: incremental detokenisation and stop strings. No model here."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one request's tokens into text that never takes a character back.

    A token may end in the middle of a character or depend on its left neighbour's spacing, so each step decodes from a
    few tokens back; text that could be the beginning of a stop string is held until it cannot.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._settled = 0  # tokens before this are decoded for context only
        self._read = 0  # tokens before this are in `text`
        self.text = ""
        self._emitted = 0
        self.stopped = False

    def push(self, token: int) -> None:
        """Add a token; sets `stopped` (and cuts `text` before the stop string) when one is complete."""
        self._ids.append(token)
        context = self._decode(self._settled, self._read)
        text = self._decode(self._settled, len(self._ids))
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < 8:  # an unfinished character
            return
        start = len(self.text)
        self.text += text[len(context) :]
        self._settled, self._read = self._read, len(self._ids)
        self._find_stop(start)

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True)) if end > start else ""

    def _find_stop(self, start: int) -> None:
        """Look for stop strings that end in the text added since `start`."""
        found = [self.text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True

    def take(self, final: bool = False) -> str:
        """The text that became certain since the last call; `final` releases what was held back."""
        if final and not self.stopped and self._read < len(self._ids):
            context, start = self._decode(self._settled, self._read), len(self.text)
            self.text += self._decode(self._settled, len(self._ids))[len(context) :]
            self._read = len(self._ids)
            self._find_stop(start)
        end = len(self.text) if final or self.stopped else len(self.text) - self._held()
        new = self.text[self._emitted : max(end, self._emitted)]
        self._emitted = max(end, self._emitted)
        return new

    @property
    def certain(self) -> str:
        """All text that `take` has handed out."""
        return self.text[: self._emitted]

    def _held(self) -> int:
        """Length of the longest tail that may still grow into a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0
