"""Token ids to text while they arrive: incremental detokenisation and stop strings. No model here."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_LONGEST_CONTEXT = 8  # tokens


class TextStream:
    """Turns one request's tokens into text that never takes a character back.

    A token may end in the middle of a character or depend on its left neighbour's spacing, so each step decodes from a
    few tokens back; text that could be the beginning of a stop string is held until it cannot.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._settled = 0  # tokens before this are decoded no more
        self._read = 0  # tokens before this are in `text`
        self._context = ""  # what the tokens between the two say
        self.text = ""
        self._emitted = 0
        self.stopped = False

    def push(self, token: int) -> None:
        """Add a token; sets `stopped` (and cuts `text` before the stop string) when one is complete."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < 8:  # an unfinished character
            return
        self._add(text)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids[self._settled :], skip_special_tokens=True))

    def _add(self, text: str) -> None:
        """Take what the tokens from the first unsettled one on say."""
        start = len(self.text)
        self.text += text[len(self._context) :]
        if self._read - self._settled < _LONGEST_CONTEXT:
            self._context = text
        else:  # rarely: it takes a decoding of its own
            self._settled = self._read
            self._context = self._decode()
        self._read = len(self._ids)
        self._find_stop(start)

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
            self._add(self._decode())
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
