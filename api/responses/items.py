"""Items of the Responses API as they are written, and texts that clients keep without reading."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from api.http.body import LARGE_BYTES, decoded_at
from api.http.expansion import Expansion, may_expand
from api.openai.response_schemas import ItemHead
from runtime.prompt.past import line_for

SEAL = "hearth1:"
"""Begins the `encrypted_content` that we can read; it is encoded and not secret."""

MAX_SEALED_BYTES = 64 * 1024 * 1024


class Item(NamedTuple):
    """An input item as it is written, and where it stands; one from the history says so."""

    raw: msgspec.Raw
    path: str
    is_stored: bool = False
    """It was not sent with the request."""
    lost: str = ""
    """Why this stands in place of an item that cannot be read."""


def lost_item(item: Item, kind: str, why: str) -> Item:
    """A line of text in its place."""
    message = {"type": "message", "role": "user", "content": line_for(kind)}
    return item._replace(raw=msgspec.Raw(msgspec.json.encode(message)), lost=why)


def head_of(item: Item) -> ItemHead:
    """Type, role and id of an item; its type is told where the client left it out.

    Raises:
        InvalidRequest: it is no item.
    """
    head = decoded_at(item.raw, ItemHead, item.path)
    if head.type is None:
        head.type = "item_reference" if head.role is None and head.id is not None else "message"
    return head


def stored_weight(items: Iterable[Item]) -> int:
    """Bytes that take as long to read as those of the items that were not sent."""
    return sum(
        LARGE_BYTES if may_expand(item.raw) else len(item.raw) for item in items if item.is_stored
    )


def seal(text: str, mark: str = SEAL) -> str:
    """A text as `encrypted_content`, which a client sends back without reading it."""
    return mark + base64.b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def unseal(sealed: str, expansion: Expansion, path: str, mark: str = SEAL) -> str | None:
    """The text inside; None when it is not ours or damaged.

    Raises:
        InvalidRequest: it is more than the request may still come to; `path` is where it stands.
    """
    if not sealed.startswith(mark):
        return None
    return expansion.unpacked(sealed.removeprefix(mark), path, MAX_SEALED_BYTES)
