"""Stored responses as the protocol knows them: kept whole, found again, gone on from."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import msgspec
from sqlalchemy import Connection

from api.http.body import LARGE_BYTES, apart, decoded_at
from api.http.chains import Chains, Owner
from api.http.expansion import Expansion
from api.http.refusal import refuse
from api.openai.fields import Raws
from api.openai.response_schemas import ItemHead
from api.responses import conversations
from api.responses.items import Item, head_of
from api.responses.output import ResponseResource
from runtime.errors import UnknownPrevious, UnknownResponse
from runtime.keys import owned, plain
from store.history import response_rows
from store.history.response_rows import ItemPage, ItemRow, PageWish, ResponseRow

Found = TypeVar("Found")

KIND = "resp_"

_MANY = 64
NULL = msgspec.Raw(b"null")
ID_KINDS = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
    "compaction": "cmp",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "local_shell_call": "lsh",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apo",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


class Archive:
    """The stored responses of a server.

    Ids of responses are as `runtime.keys.owned` makes them: nobody finds another tenant's.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._history = chains.history
        self.comparisons = chains.comparisons
        self.conversations = conversations.Conversations(chains)

    async def past(self, previous_id: str | None, expansion: Expansion) -> list[Item]:
        """All items that went into and came out of the responses up to that one.

        Raises:
            InvalidRequest: they are more than the request may still come to.
            UnknownPrevious: it, or one that it goes on from, is not stored.
            StoreUnavailable: the history cannot be read.
        """
        if previous_id is None:
            return []
        chain = await self._chains.past(previous_id, KIND, expansion, "previous_response_id")
        if chain.missing is not None:
            raise UnknownPrevious(plain(chain.missing), self._history.note)
        return [
            Item(msgspec.Raw(row.body), f"previous_response_id: item {i}", is_stored=True)
            for i, row in enumerate(chain.items)
        ]

    async def resolved(
        self, items: Sequence[Item], tenant: str, expansion: Expansion
    ) -> list[Item]:
        """The items, each reference replaced by what of the tenant it refers to.

        Raises:
            InvalidRequest: an item is malformed, refers to nothing that is stored, wherever it
                stands, or to more than the request may still come to.
            StoreUnavailable: the history cannot be read.
        """
        references = await apart(_num_bytes(items), lambda: _references(items))
        if not references:
            return list(items)
        kinds = (KIND, conversations.KIND)
        bodies = await self._chains.found_items(kinds, tenant, references, expansion)
        for path, item_id in references.items():
            if item_id not in bodies:
                self._refuse_unknown(path, item_id)

        def found(item: Item) -> Item:
            body = bodies.get(references.get(item.path, ""))
            return item if body is None else item._replace(raw=msgspec.Raw(body), is_stored=True)

        return [found(item) for item in items]

    def _refuse_unknown(self, path: str, item_id: str) -> NoReturn:
        refuse(
            path,
            f"refers to the item {item_id[:80]!r}, which is not stored: it was not kept, was "
            f"deleted, or was not used for too long. Send the item itself.{self._history.note}",
        )

    async def keep(
        self, resource: ResponseResource, items: Sequence[Item], asker: Owner, events: bytes = b""
    ) -> None:
        """Store a response whole, with its own input and the events that told it. Once it is made,
        the conversation that it belongs to has what was said as well.

        Raises:
            StoreUnavailable: it was not stored.
        """
        packed = await asyncio.to_thread(zlib.compress, events) if events else b""
        row, rows = await apart(_num_bytes(items), lambda: _rows(resource, items, asker))
        conversation = _conversation_of(resource, asker)
        await self._chains.keep(row, rows, asker.received, packed, conversation)

    async def add_to_conversation(
        self, resource: ResponseResource, items: Sequence[Item], asker: Owner
    ) -> None:
        """Store what was said in the conversation that a response belongs to, if it does; the
        response itself is not stored.

        Raises:
            StoreUnavailable: it was not stored.
        """
        if (conversation := _conversation_of(resource, asker)) is not None:
            row, rows = await apart(_num_bytes(items), lambda: _rows(resource, items, asker))
            await self._chains.add(conversation, rows, row.session, asker.received)

    async def find(self, response_id: str) -> ResponseResource:
        """A response.

        Raises:
            UnknownResponse: it is not stored.
            StoreUnavailable: the history cannot be read.
        """
        row, items = await self._stored(response_id, response_rows.get)
        resource = await apart(
            len(row.body), lambda: msgspec.json.decode(row.body, type=ResponseResource)
        )
        output = [msgspec.Raw(item.body) for item in items if item.is_output]
        return msgspec.structs.replace(resource, output=output)

    async def input_page(self, response_id: str, wish: PageWish) -> ItemPage | None:
        """Some of a response's own input; None for no item `after`.

        Raises:
            UnknownResponse: it is not stored.
            StoreUnavailable: the history cannot be read.
        """
        await self._stored(response_id, response_rows.head)
        wish = wish._replace(is_of_input=True)
        return await self._history.read(lambda c: response_rows.page(c, response_id, wish))

    async def _stored(
        self, response_id: str, read: Callable[[Connection, str], Found | None]
    ) -> Found:
        found = None
        if plain(response_id).startswith(KIND):
            found = await self._history.read(lambda connection: read(connection, response_id))
        if found is None:
            raise UnknownResponse(plain(response_id), self._history.note)
        return found

    async def events(self, response_id: str) -> bytes | None:
        """The events of a response that was made in the background, as they were told.

        Raises:
            StoreUnavailable: the history cannot be read.
        """
        packed = await self._history.read(lambda c: response_rows.events(c, response_id))
        return None if packed is None else await asyncio.to_thread(zlib.decompress, packed)

    async def remove(self, response_id: str) -> None:
        """Delete a response; no byte of it is left.

        Raises:
            UnknownResponse: it is not stored.
            StoreUnavailable: it could not be deleted.
        """
        if not await self._chains.remove(response_id, KIND):
            raise UnknownResponse(plain(response_id), self._history.note)


def _conversation_of(resource: ResponseResource, asker: Owner) -> str | None:
    """The id of the conversation that gets what was said; none while it is still being made, or
    when it failed.
    """
    if resource.conversation is None or resource.status not in ("completed", "incomplete"):
        return None
    return owned(asker.tenant, resource.conversation.id)


def _references(items: Sequence[Item]) -> dict[str, str]:
    """The ids that items refer to, by the paths of these."""
    heads = zip(items, map(head_of, items), strict=True)
    return {item.path: head.id for item, head in heads if head.type == "item_reference" and head.id}


def _num_bytes(items: Sequence[Item]) -> int:
    return LARGE_BYTES if len(items) > _MANY else sum(len(item.raw) for item in items)


def _rows(
    resource: ResponseResource, items: Sequence[Item], asker: Owner
) -> tuple[ResponseRow, list[ItemRow]]:
    body = msgspec.json.encode(msgspec.structs.replace(resource, output=[]))
    previous_id = resource.previous_response_id
    row = ResponseRow(
        id=owned(asker.tenant, resource.id),
        previous_id=owned(asker.tenant, previous_id) if previous_id is not None else None,
        body=body,
        created_s=float(resource.created_at),
        session=asker.session,
    )
    made = [
        ItemRow(msgspec.json.decode(raw, type=ItemHead).id or "", bytes(raw), is_output=True)
        for raw in resource.output
    ]
    return row, [*given_rows(items), *made]


def in_full(items: Sequence[Item]) -> list[msgspec.Raw]:
    """Items in their full form, as they are stored: with ids and types, texts as parts."""
    return [msgspec.Raw(row.body) for row in given_rows(items)]


def given_rows(items: Sequence[Item]) -> list[ItemRow]:
    """Items as they are stored."""
    taken: set[str] = set()
    return [_row_of(item, taken) for item in items]


def _row_of(item: Item, taken: set[str]) -> ItemRow:
    """An item of the input in its full form: with an id and a type, a message's text as a part.

    Whoever sends an item twice gets two: pages of them are asked for by their ids.
    """
    head = head_of(item)
    kind = head.type or "message"
    given_id = head.id if head.id not in taken else None
    item_id = given_id or f"{ID_KINDS.get(kind, 'item')}_{secrets.token_hex(16)}"
    taken.add(item_id)
    fields = decoded_at(item.raw, Raws, item.path)
    fields["type"], fields["id"] = _raw(kind), _raw(item_id)
    if kind in ID_KINDS and kind not in ("reasoning", "compaction"):
        fields.setdefault("status", _raw("completed"))
    if kind == "message" and bytes(fields.get("content", NULL)).startswith(b'"'):
        fields["content"] = _text_part(fields["content"], head.role)
    return ItemRow(item_id, msgspec.json.encode(fields), is_output=False)


def _text_part(text: msgspec.Raw, role: str | None) -> msgspec.Raw:
    kind = "output_text" if role == "assistant" else "input_text"
    return _raw([{"type": kind, "text": text}])


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
