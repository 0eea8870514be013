"""Seals: what marks a system text that had to be put into a user's turn, and cannot be typed.

A code covers the text and everything before it, and is keyed with the store's secret: the same
request always gives the same one, and nobody can know it who only writes into a conversation. One
that was seen says nothing about any other text or place.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from runtime.prompt.canonical import chain, digest, forms
from runtime.types import Message
from store.keyed_names import keyed_hash

_CODE_BYTES = 8
_PURPOSE = "system text"


class Sealed(NamedTuple):
    """A text in its envelope, and where it begins there."""

    text: str
    start: int


def sealed(text: str, code: str) -> Sealed:
    """The text as a model is shown it in a user's turn."""
    opening = f'<system-message code="{code}">\n'
    return Sealed(f"{opening}{text}\n</system-message>", len(opening))


class Seal:
    """Gives codes. Without a secret they are those of this process alone."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or secrets.token_bytes(32)

    def know(self, secret: bytes) -> None:
        """From now on the codes are those of the store with this secret."""
        self._secret = secret or self._secret

    def codes(self, messages: Sequence[Message], tenant: str = "") -> list[str]:
        """One for each message of a conversation. What clients change in answers does not count."""
        links = chain(digest(tenant), forms(messages))
        names = (keyed_hash(self._secret, _PURPOSE, link) for link in links)
        return [name[:_CODE_BYTES].hex() for name in names]
