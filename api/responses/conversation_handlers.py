"""`/v1/conversations`: conversations that are stored under an id of their own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from api.http.body import HttpRequest
from api.http.caller import tenant_of
from api.http.errors import documented
from api.http.hearth_info import ignored_info
from api.openai.fields import Body, Raws
from api.openai.response_schemas import ITEMS
from api.responses.archive import given_rows
from api.responses.conversations import Conversation
from api.responses.items import Item
from api.responses.output import ItemList
from api.responses.pages import Order, list_of
from api.responses.repeated import check_metadata
from api.responses.service import ResponseService
from runtime.keys import owned
from store.history.response_rows import ItemPage, ItemRow, PageWish

_ADD_REST = "add the rest with further requests"


class NewConversation(Body):
    """The body of `POST /v1/conversations`: items that it begins with, as in `input`."""

    ENTRIES = "items"
    REMEDY = _ADD_REST
    INNER: ClassVar[dict[str, object]] = {"items": [ITEMS]}

    items: list[msgspec.Raw] | None = None
    metadata: Raws | None = None


class ConversationChange(Body):
    """The body of `POST /v1/conversations/{id}`."""

    metadata: Raws


class NewItems(Body):
    """The body of `POST /v1/conversations/{id}/items`, as in `input`."""

    ENTRIES = "items"
    REMEDY = _ADD_REST
    INNER: ClassVar[dict[str, object]] = {"items": [ITEMS]}

    items: list[msgspec.Raw]


class StoredItem(Body):
    """An item, beside these with the fields of its type."""

    id: str
    type: str


class DeletedConversation(Body):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


_ONE = ["/v1/conversations/{conversation_id:str}", "/conversations/{conversation_id:str}"]
_ITEMS = [f"{path}/items" for path in _ONE]
_ITEM = [f"{path}/{{item_id:str}}" for path in _ITEMS]


@post(
    ["/v1/conversations", "/conversations"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(Conversation),
)
async def create_conversation(
    data: JSONBody[NewConversation],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[Conversation]:
    """Store a conversation, to be named by `conversation` in responses."""
    check_metadata(data.metadata)
    rows = await _rows(request, data.items or [])
    tenant = tenant_of(request.scope)
    made = await responses.archive.conversations.begin(tenant, data.metadata or {}, rows)
    made.hearth = ignored_info(await request.unused_fields(NewConversation))
    return Response(made)


@get(_ONE, tags=["OpenAI"], responses=documented(Conversation))
async def get_conversation(
    conversation_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[Conversation]:
    """A stored conversation, without its items."""
    return Response(await responses.archive.conversations.find(_mine(request, conversation_id)))


@post(_ONE, status_code=200, tags=["OpenAI"], responses=documented(Conversation))
async def change_conversation(
    conversation_id: FromPath[str],
    data: JSONBody[ConversationChange],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[Conversation]:
    """Replace the metadata of a stored conversation."""
    check_metadata(data.metadata)
    conversations = responses.archive.conversations
    changed = await conversations.change(_mine(request, conversation_id), data.metadata)
    changed.hearth = ignored_info(await request.unused_fields(ConversationChange))
    return Response(changed)


@delete(_ONE, status_code=200, tags=["OpenAI"], responses=documented(DeletedConversation))
async def delete_conversation(
    conversation_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> DeletedConversation:
    """Delete a stored conversation with its items. Responses that belong to it stay."""
    await responses.archive.conversations.remove(_mine(request, conversation_id))
    return DeletedConversation(conversation_id)


@post(_ITEMS, status_code=200, tags=["OpenAI"], responses=documented(ItemList))
async def add_items(
    conversation_id: FromPath[str],
    data: JSONBody[NewItems],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[ItemList]:
    """Store more items behind those that a conversation has; they are the answer."""
    rows = await _rows(request, data.items)
    await responses.archive.conversations.add(_mine(request, conversation_id), rows)
    page = list_of(ItemPage(rows, has_more=False))
    page.hearth = ignored_info(await request.unused_fields(NewItems))
    return Response(page)


@get(_ITEMS, tags=["OpenAI"], responses=documented(ItemList))
async def list_items(
    conversation_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
    limit: Annotated[int, QueryParameter(ge=1, le=100)] = 20,
    order: FromQuery[Order] = "desc",
    after: FromQuery[str | None] = None,
) -> ItemList:
    """The items of a conversation, a page at a time."""
    key, wish = _mine(request, conversation_id), PageWish(limit, order == "desc", after)
    return list_of(await responses.archive.conversations.page(key, wish), after)


@get(_ITEM, tags=["OpenAI"], responses=documented(StoredItem))
async def get_item(
    conversation_id: FromPath[str],
    item_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[msgspec.Raw]:
    """One item of a conversation."""
    key = _mine(request, conversation_id)
    return Response(msgspec.Raw(await responses.archive.conversations.item(key, item_id)))


@delete(_ITEM, status_code=200, tags=["OpenAI"], responses=documented(Conversation))
async def delete_item(
    conversation_id: FromPath[str],
    item_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
) -> Response[Conversation]:
    """Delete one item of a conversation, which is the answer."""
    key, conversations = _mine(request, conversation_id), responses.archive.conversations
    found = await conversations.find(key)
    await conversations.remove_item(key, item_id)
    return Response(found)


async def _rows(request: HttpRequest, raws: list[msgspec.Raw]) -> list[ItemRow]:
    """The items of a body as they are stored. Raises InvalidRequest."""

    def rows() -> list[ItemRow]:
        return given_rows([Item(raw, f"items[{i}]") for i, raw in enumerate(raws)])

    return await request.apart(rows)


def _mine(request: HttpRequest, conversation_id: str) -> str:
    return owned(tenant_of(request.scope), conversation_id)


KEEPING = (
    create_conversation,
    get_conversation,
    change_conversation,
    delete_conversation,
    add_items,
    list_items,
    get_item,
    delete_item,
)
