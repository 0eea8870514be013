"""What a request comes to with all that its parts stand for, whatever its protocol.

A part may be small in a body and large in memory: a sealed text, a reference to a tool or to what
is stored, all that a response goes on from. What they stand for counts as if it had been sent.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from api.http.refusal import refuse
from runtime.config.settings import Settings
from runtime.types import ModelSpec

_STEP_BYTES = 1 << 16
_SEALED_FIELDS = (b"encrypted_content", b"signature")


class Expansion:
    """How much one request may still come to. There is one for each request, for all its parts."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left_bytes = most_bytes

    @classmethod
    def allowed(cls, spec: ModelSpec, settings: Settings) -> Expansion:
        """For a request to that model: as much as a body may have."""
        return cls(settings.max_image_body_bytes if spec.sees else settings.max_body_bytes)

    def count(self, num_bytes: int, path: str) -> None:
        """The part at `path` stands for so much.

        Raises:
            InvalidRequest: that is more than is left.
        """
        if num_bytes > self._left_bytes:
            refuse(
                path,
                f"is too much: what a request's sealed items, references and previous responses "
                f"stand for may have {self._most_bytes} bytes in all (max_body_bytes). Leave "
                "older items out, or sum the conversation up.",
            )
        self._left_bytes -= num_bytes

    def unpacked(self, sealed: str, path: str, most_bytes: int) -> str | None:
        """The text that was compressed and encoded; None where it is damaged or too long for one.

        Raises:
            InvalidRequest: there is more of it than is left. What a damaged part unpacks to until
                its end counts too, as that takes as long.
        """
        unpacker, data = zlib.decompressobj(), bytearray()
        try:
            packed = base64.b64decode(sealed, validate=True)
            while not unpacker.eof and len(data) <= most_bytes:
                piece = unpacker.decompress(packed, _STEP_BYTES)
                packed = unpacker.unconsumed_tail
                if not piece and not packed and not unpacker.eof:
                    return None
                self.count(len(piece), path)
                data += piece
            return data.decode() if len(data) <= most_bytes else None
        except zlib.error:
            self.count(_STEP_BYTES, path)
        except (binascii.Error, ValueError):
            pass
        return None


def may_expand(body: bytes | memoryview) -> bool:
    """Whether JSON may have sealed parts; the names of their fields may be written with escapes."""
    raw = bytes(body)
    if any(name in raw for name in _SEALED_FIELDS):
        return True
    return b"\\" in raw and rb"\u" in raw  # one character is found ten times as fast as two
