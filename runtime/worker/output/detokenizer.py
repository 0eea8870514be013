"""Token ids to stable text: nothing is said until it cannot change any more.

Knows `tokenizers.decoders.DecodeStream` and the byte-level alphabet of BPE vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text, piece by piece."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often empty inside a character."""
        ...

    def finish(self) -> str:
        """What was held back: an unfinished character becomes U+FFFD."""
        ...


class StreamDetokenizer:
    """For every tokenizer with a fast (Rust) implementation.

    `context` are the ids right before the first token; word-initial spaces depend on them.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        before = list(context[-_CONTEXT_TOKENS:])
        # A character that the context leaves unfinished would have its text said again.
        if tokenizer.decode(before, skip_special_tokens=False).endswith("\ufffd"):
            before = []
        self._stream = DecodeStream(ids=before, skip_special_tokens=False)
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            return self._restart(error)
        if text is None:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=False) if held else ""

    def _restart(self, error: Exception) -> str:
        if "prefix" not in str(error).lower():
            raise error
        self._stream = DecodeStream(ids=[], skip_special_tokens=False)
        return self.finish()


class PlainTokenizer(Protocol):
    """The part of a slow tokenizer that the fallback needs."""

    def decode(self, token_ids: list[int]) -> str: ...


class PlainDetokenizer:
    """For tokenizers without a Rust implementation: decode the current line again each time."""

    def __init__(self, tokenizer: PlainTokenizer) -> None:
        self._tokenizer = tokenizer
        self._line: list[int] = []
        self._said = 0

    def add(self, token_id: int) -> str:
        self._line.append(token_id)
        text = self._tokenizer.decode(self._line)
        if text.endswith("\ufffd"):
            return ""
        new = text[self._said :]
        self._said = len(text)
        if text.endswith("\n"):
            self._line.clear()
            self._said = 0
        return new

    def finish(self) -> str:
        text = self._tokenizer.decode(self._line) if self._line else ""
        new = text[self._said :]
        self._line.clear()
        self._said = 0
        return new


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE writes for raw bytes (GPT-2's alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(piece: str, *, is_byte_level: bool) -> bytes:
    """The raw bytes of a vocabulary entry, also when they are no whole characters."""
    if is_byte_level:
        table = _bytes_of_characters()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
    elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()
