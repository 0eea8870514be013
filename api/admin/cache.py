"""`/admin`: what lies in the cache; pinning, deleting, verifying, adding to it. For operators only.

Names of conversations are in the query, never in the path: paths may be logged.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
from litestar import Response, delete, get, post
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.handlers import BaseRouteHandler
from litestar.params import FromQuery, JSONBody

from api.admin.progress import Wanted, told, until_left
from api.http.body import HttpRequest
from api.http.errors import documented
from api.http.gate import Gate
from api.http.kv_access import KvAccess
from runtime.cache.conversations import Exchanged, ImportRequest, Pinned
from runtime.cache.views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    StatsView,
    VerifyView,
)
from runtime.errors import Forbidden, NotLocal
from runtime.keys import Principal


class CacheListing(msgspec.Struct, gc=False):
    """All conversations of the store at `root`, the latest used first."""

    root: str
    conversations: list[ConversationView]


def operator_only(connection: ASGIConnection[Any, Any, Any, Any], route: BaseRouteHandler) -> None:
    """Let in who has the admin key, from wherever; without one, programs on this machine.

    Raises:
        Forbidden: it has a tenant's key.
        NotLocal: the request comes from elsewhere and has no admin key.
    """
    caller: Principal = connection.scope["state"]["caller"]
    if caller.tenant:  # the guard says so before; nothing must depend on one place
        raise Forbidden("That needs the admin key.", "admin_key_needed")
    if not caller.is_admin:
        local_only(connection, route)


def local_only(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Refuse other machines, and web pages that made their name resolve to this one.

    Raises:
        NotLocal: the request does not come from a program on this machine.
    """
    peer = connection.client.host if connection.client is not None else ""
    host = connection.headers.get("host", "").rpartition("]")[0].lstrip("[")
    host = host or connection.headers.get("host", "").partition(":")[0]
    if not _is_loopback(peer) or not (host == "localhost" or _is_loopback(host)):
        raise NotLocal(
            "/admin answers programs on this machine, at 127.0.0.1, and who has the admin key."
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@get("/admin/cache", tags=["Admin"], guards=[operator_only])
async def list_cache(
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    model: FromQuery[str | None] = None,
) -> CacheListing:
    """Every conversation and nameless chain on disk; of one model, by its name or hash.

    The `tier` of what ends in the memory of a worker is `hot`.
    """
    meant = await cache.meant(model) if model is not None else None
    found = await cache.contents.kept()
    wanted = [one for one in found if meant is None or meant.has(one.view)]
    return CacheListing(str(gate.settings.kv_root), await cache.contents.seen(wanted))


@get("/admin/cache/stats", tags=["Admin"], guards=[operator_only])
async def cache_stats(cache: NamedDependency[KvAccess]) -> StatsView:
    """Sums by model and tier, and counters."""
    return await cache.contents.stats()


@get("/admin/cache/chain", tags=["Admin"], guards=[operator_only])
async def cache_chain(cache: NamedDependency[KvAccess], conversation: FromQuery[str]) -> ChainView:
    """Where a conversation's slots are: by session id, the beginning of its id, or a slot's id."""
    return await cache.contents.chain(conversation)


@delete("/admin/cache/conversations", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_conversation(
    cache: NamedDependency[KvAccess], conversation: FromQuery[str]
) -> RemovalView:
    """Delete a conversation, on disk and in memory, with what only it used."""
    return await cache.remove_conversation(conversation)


@delete("/admin/cache/models", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_model(cache: NamedDependency[KvAccess], model: FromQuery[str]) -> RemovalView:
    """Delete everything that was asked by a model's name, or of weights by their hash.

    What names that share the weights were asked stays.
    """
    return await cache.remove_model(model)


@delete("/admin/cache/all", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_all(cache: NamedDependency[KvAccess]) -> RemovalView:
    """Delete everything."""
    return await cache.remove_all()


@get("/admin/cache/conversation", tags=["Admin"], guards=[operator_only])
async def show_conversation(
    cache: NamedDependency[KvAccess], conversation: FromQuery[str]
) -> ShownView:
    """One conversation with its slots, and where they lie on disk; named as for `chain`."""
    return await cache.contents.shown(conversation)


@post("/admin/cache/pin", tags=["Admin"], guards=[operator_only], status_code=200)
async def pin_conversation(
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    conversation: FromQuery[str],
    pinned: FromQuery[bool] = True,
    model: FromQuery[str | None] = None,
) -> Pinned:
    """Keep a conversation and what it becomes, until that is taken back with `pinned=false`.

    With a `model` also one of which nothing is on disk yet, by its session id.
    """
    if not pinned:
        return await cache.contents.unpin(conversation)
    if model is None:
        return await cache.contents.pin(conversation)
    return await cache.contents.pin_ahead(conversation, gate.spec(model))


@post(
    "/admin/cache/verify",
    tags=["Admin"],
    guards=[operator_only],
    status_code=200,
    responses=documented(VerifyView),
)
async def verify_cache(request: HttpRequest, cache: NamedDependency[KvAccess]) -> Response[Any]:
    """Read every slot now; what is not as it was written goes. Events say how far it is."""

    async def work(wanted: Wanted) -> VerifyView:
        return await cache.contents.verify(wanted.watch, wanted.should_stop)

    return await told(request, work)


@post(
    "/admin/cache/gc",
    tags=["Admin"],
    guards=[operator_only],
    status_code=200,
    responses=documented(CollectedView),
)
async def collect_garbage(request: HttpRequest, cache: NamedDependency[KvAccess]) -> Response[Any]:
    """Do now what is done now and then: expiry, merging, order, caps. Events say how far it is."""

    async def work(wanted: Wanted) -> CollectedView:
        return await cache.contents.collect(wanted.watch, wanted.should_stop)

    return await told(request, work)


@post(
    "/admin/cache/import",
    tags=["Admin"],
    guards=[operator_only, local_only],
    status_code=200,
    responses=documented(Exchanged),
)
async def import_file(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    data: JSONBody[ImportRequest],
) -> Response[Any]:
    """Take in a prompt-cache file of stock mlx-lm. Events say how far it is."""

    async def work(wanted: Wanted) -> Exchanged:
        return await cache.contents.take_in(gate.spec(data.model), data, until_left(wanted))

    return await told(request, work)


HANDLERS = [
    list_cache,
    cache_stats,
    cache_chain,
    show_conversation,
    pin_conversation,
    delete_conversation,
    delete_model,
    delete_all,
    verify_cache,
    collect_garbage,
    import_file,
]
