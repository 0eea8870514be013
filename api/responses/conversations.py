"""Stored conversations: items under one id, to which responses add what was said.

A conversation is kept as a response is, in the same room and for the same time; its items are its
own, so it stays whole when a response is deleted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal, NoReturn

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import Connection

from api.http.chains import Chains
from api.http.expansion import Expansion
from api.http.hearth_info import IgnoredInfo
from api.openai.fields import Body, Raws
from api.responses.items import Item
from runtime.errors import UnknownConversation
from runtime.keys import owned, plain
from store.history import response_rows
from store.history.response_rows import Chain, ItemPage, ItemRow, PageWish, ResponseRow

KIND = "conv_"


class Conversation(Body):
    """What is told of a stored conversation."""

    id: str
    created_at: int
    metadata: msgspec.Raw
    object: Literal["conversation"] = "conversation"
    hearth: IgnoredInfo | UnsetType = UNSET


class Conversations:
    """The stored conversations of a server; ids are as `runtime.keys.owned` makes them.

    Every call may raise StoreUnavailable: the history cannot be read or written.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._history = chains.history

    async def begin(self, tenant: str, metadata: Raws, rows: Sequence[ItemRow]) -> Conversation:
        """Store a new one with these items."""
        made = Conversation(
            id=f"{KIND}{secrets.token_hex(24)}",
            created_at=int(time.time()),
            metadata=msgspec.Raw(msgspec.json.encode(metadata)),
        )
        key, body = owned(tenant, made.id), msgspec.json.encode(made)
        await self._chains.keep(ResponseRow(key, None, body, float(made.created_at)), rows, None)
        return made

    async def find(self, key: str) -> Conversation:
        """A stored one, without its items. Raises UnknownConversation."""
        self._check_kind(key)
        found = await self._history.read(lambda connection: response_rows.head(connection, key))
        if found is None:
            self._refuse_unknown(key)
        return msgspec.json.decode(found.body, type=Conversation)

    async def page(self, key: str, wish: PageWish) -> ItemPage | None:
        """Some items of a stored one; None for no item `after`. Raises UnknownConversation."""
        await self.find(key)
        return await self._history.read(
            lambda connection: response_rows.page(connection, key, wish)
        )

    async def item(self, key: str, item_id: str) -> bytes:
        """The JSON of an item of a stored one. Raises UnknownConversation."""
        await self.find(key)
        found = await self._history.read(lambda c: response_rows.own_item(c, key, item_id))
        if found is None:
            self._refuse_unknown(key, item_id)
        return found

    async def past(self, key: str, expansion: Expansion) -> list[Item]:
        """The items of a stored one, to be gone on from.

        Raises:
            InvalidRequest: they are more than the request may still come to.
            UnknownConversation: it is not stored.
        """
        chain: Chain = await self._chains.past(key, KIND, expansion, "conversation")
        if chain.missing is not None:
            self._refuse_unknown(key)
        return [
            Item(msgspec.Raw(row.body), f"conversation: item {i}", is_stored=True)
            for i, row in enumerate(chain.items)
        ]

    async def change(self, key: str, metadata: Raws) -> Conversation:
        """Give a stored one other metadata. Raises UnknownConversation."""
        found = await self.find(key)
        found.metadata = msgspec.Raw(msgspec.json.encode(metadata))
        body = msgspec.json.encode(found)

        def rewrite(connection: Connection) -> bool:
            return response_rows.rewrite(connection, key, body, self._history.now_s())

        if not await self._history.write(rewrite):
            self._refuse_unknown(key)
        return found

    async def add(self, key: str, rows: Sequence[ItemRow]) -> None:
        """Store more items behind those of a stored one. Raises UnknownConversation."""
        self._check_kind(key)
        if not await self._chains.add(key, rows, "", None):
            self._refuse_unknown(key)

    async def remove_item(self, key: str, item_id: str) -> None:
        """Delete an item; no byte of it is left in the conversation. Raises UnknownConversation."""
        self._check_kind(key)
        if not await self._chains.remove_item(key, item_id):
            self._refuse_unknown(key, item_id)

    async def remove(self, key: str) -> None:
        """Delete a stored one with its items. Raises UnknownConversation."""
        if not await self._chains.remove(key, KIND):
            self._refuse_unknown(key)

    def _check_kind(self, key: str) -> None:
        if not plain(key).startswith(KIND):
            self._refuse_unknown(key)

    def _refuse_unknown(self, key: str, item_id: str | None = None) -> NoReturn:
        if item_id is not None:
            message = f"The conversation {plain(key)[:80]!r} has no item {item_id[:80]!r}."
            raise UnknownConversation(message, "item_id")
        raise UnknownConversation(
            f"Conversation with id {plain(key)[:80]!r} not found: it was not stored, was deleted, "
            f"or was not used for too long.{self._history.note}",
            "conversation",
        )
