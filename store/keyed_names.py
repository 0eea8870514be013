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


class Asker(msgspec.Struct, frozen=True):
    """Who says something: the name of the model that is asked, and the conversation if it has one.

    What has no name (`model` is empty) belongs to whatever its weights are called.
    """

    model: str = ""
    session_id: str | None = None


NOBODY = Asker()


class Chain(msgspec.Struct, frozen=True):
    """A conversation without a session id: its tokens, in four bytes each.

    Others have the first `num_shared` of them as well. `root` is what the names of its blocks of
    `block_size` tokens begin with, and `beginning` names how it began, as far as that is known.
    `turns` are the ids of the generated turns that its head has.
    """

    token_ids: bytes
    num_shared: int = 0
    root: bytes = b""
    block_size: int = 1
    beginning: bytes = b""
    turns: tuple[bytes, ...] = ()


class Whom(msgspec.Struct, frozen=True):
    """A conversation by its session id, or by the key that stands for it; without either, all.

    With a `model` only what was asked under that name. With a `chain` nobody is meant but what is
    recognised by these tokens.
    """

    session_id: str | None = None
    key: bytes | None = None
    model: str | None = None
    chain: Chain | None = None

    @property
    def names_one(self) -> bool:
        """Whether one conversation is meant by its session id, and not all of a model or server."""
        return self.session_id is not None or self.key is not None

    def means(self, asker: Asker, secret: bytes) -> bool:
        """Whether this is meant; a conversation without a session id is with all others only."""
        if self.model is not None and asker.model != self.model:
            return False
        if self.chain is not None:
            return False
        if self.session_id is None and self.key is None:
            return True
        session_id = asker.session_id
        if session_id is None:
            return False
        return session_id == self.session_id or conversation_key(secret, session_id) == self.key
