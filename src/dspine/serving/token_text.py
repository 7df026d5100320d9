"""The bytes of a single token, which its decoded text loses where a character spans several tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The inverse of byte-level BPE's alphabet (GPT-2): printable Latin-1 stands for itself, other bytes for 256, 257, ..."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Bytes of a tokenizer's tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name's."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # models pad their vocabulary
            return b""
        piece = str(piece)
        if token in self._special:
            return piece.encode()
        match = _BYTE_PIECE.fullmatch(piece)
        if match is not None:
            return bytes([int(match.group(1), 16)])
        alphabet = _byte_of_character()
        if all(character in alphabet for character in piece):
            raw = bytes(alphabet[character] for character in piece)
            # Only byte-level pieces decode to these bytes; another tokenizer's "é" is no byte 0xE9.
            if shown(raw).strip() == str(self._tokenizer.decode([token])).strip():
                return raw
        return piece.replace("\u2581", " ").encode("utf-8", "replace")


def shown(raw: bytes) -> str:
    """A token's bytes as text, with replacement characters for parts of characters."""
    return raw.decode("utf-8", "replace")


def named(raw: bytes) -> str:
    """The same, but different for different bytes: OpenAI writes parts of characters as bytes:\\xe2\\x82."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
