"""Names that are keyed with the store's secret: without it nobody can tell what they stand for."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

HASH_BYTES = 16


def keyed_hash(secret: bytes, purpose: str, data: bytes) -> bytes:
    """16 bytes that name `data` within a store and tell nothing about it outside."""
    person = purpose.encode()[:16]
    return blake2b(data, digest_size=HASH_BYTES, key=secret, person=person).digest()


def conversation_key(secret: bytes, session_id: str) -> bytes:
    """What stands for a session id in rows and in the names of files."""
    return keyed_hash(secret, "conversation", session_id.encode())


class Whom(msgspec.Struct, frozen=True):
    """A conversation by its session id, or by the key that stands for it; without either, all."""

    session_id: str | None = None
    key: bytes | None = None

    def means(self, session_id: str | None, secret: bytes) -> bool:
        """Whether this conversation is meant; None are those without a name."""
        if self.session_id is None and self.key is None:
            return True
        if session_id is None:
            return False
        return session_id == self.session_id or conversation_key(secret, session_id) == self.key
