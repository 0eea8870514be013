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

from api.body import HttpRequest
from api.deps import Gate
from api.errors import documented
from api.long_work import Wanted, told
from runtime.errors import Forbidden, NotLocal
from runtime.inventory_pins import Pinned, kept, pin, pin_ahead, shown, unpin
from runtime.inventory_views import (
    ChainView,
    CollectedView,
    ConversationView,
    PublishedView,
    RemovalView,
    ShownView,
    StatsView,
    VerifyView,
)
from runtime.keys import Caller
from runtime.wire import SlotStaged


class CacheListing(msgspec.Struct, gc=False):
    """All conversations of the store at `root`, the latest used first."""

    root: str
    conversations: list[ConversationView]


class StagedSlots(msgspec.Struct, gc=False):
    """Slot files that were staged inside the store, to be published; parents first."""

    slots: list[SlotStaged]


def operator_only(connection: ASGIConnection[Any, Any, Any, Any], route: BaseRouteHandler) -> None:
    """Let in who has the admin key, from wherever; without one, programs on this machine.

    Raises:
        Forbidden: it has a tenant's key.
        NotLocal: the request comes from elsewhere and has no admin key.
    """
    caller: Caller = connection.scope["state"]["caller"]
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
    gate: NamedDependency[Gate], model: FromQuery[str | None] = None
) -> CacheListing:
    """Every conversation and nameless chain on disk; of one model, by its name or hash.

    The `tier` of what ends in the memory of a worker is `hot`.
    """
    meant = await gate.meant(model) if model is not None else None
    root, found = await gate.tend(lambda one: (str(one.store.root), kept(one)))
    wanted = [one for one in found if meant is None or meant.has(one.view)]
    hot = await gate.hot_ends((one.model, one.leaf) for one in wanted)
    return CacheListing(root, [_seen(one.view, is_hot=one.leaf in hot) for one in wanted])


def _seen(view: ConversationView, *, is_hot: bool) -> ConversationView:
    return msgspec.structs.replace(view, tier="hot") if is_hot else view


@get("/admin/cache/stats", tags=["Admin"], guards=[operator_only])
async def cache_stats(gate: NamedDependency[Gate]) -> StatsView:
    """Sums by model and tier, and counters."""
    return await gate.tend(lambda inventory: inventory.stats())


@get("/admin/cache/chain", tags=["Admin"], guards=[operator_only])
async def cache_chain(gate: NamedDependency[Gate], conversation: FromQuery[str]) -> ChainView:
    """Where a conversation's slots are: by session id, the beginning of its id, or a slot's id."""
    return await gate.tend(lambda inventory: inventory.chain(conversation))


@delete("/admin/cache/conversations", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_conversation(
    gate: NamedDependency[Gate], conversation: FromQuery[str]
) -> RemovalView:
    """Delete a conversation, on disk and in memory, with what only it used."""
    return await gate.remove_conversation(conversation)


@delete("/admin/cache/models", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_model(gate: NamedDependency[Gate], model: FromQuery[str]) -> RemovalView:
    """Delete everything that was asked by a model's name, or of weights by their hash.

    What names that share the weights were asked stays.
    """
    return await gate.remove_model(model)


@delete("/admin/cache/all", tags=["Admin"], guards=[operator_only], status_code=200)
async def delete_all(gate: NamedDependency[Gate]) -> RemovalView:
    """Delete everything."""
    return await gate.remove_all()


@get("/admin/cache/conversation", tags=["Admin"], guards=[operator_only])
async def show_conversation(gate: NamedDependency[Gate], conversation: FromQuery[str]) -> ShownView:
    """One conversation with its slots, and where they lie on disk; named as for `chain`."""
    found = await gate.tend(lambda inventory: shown(inventory, conversation))
    view, leaf = found.conversation, found.slots[-1].id if found.slots else None
    hot = await gate.hot_ends([(bytes.fromhex(view.model_hash), leaf)])
    return msgspec.structs.replace(found, conversation=_seen(view, is_hot=leaf in hot))


@post("/admin/cache/pin", tags=["Admin"], guards=[operator_only], status_code=200)
async def pin_conversation(
    gate: NamedDependency[Gate],
    conversation: FromQuery[str],
    pinned: FromQuery[bool] = True,
    model: FromQuery[str | None] = None,
) -> Pinned:
    """Keep a conversation and what it becomes, until that is taken back with `pinned=false`.

    With a `model` also one of which nothing is on disk yet, by its session id.
    """
    if not pinned:
        return await gate.tend(lambda inventory: unpin(inventory, conversation))
    if model is None:
        return await gate.tend(lambda inventory: pin(inventory, conversation))
    spec = gate.spec(model)
    model_hash = await gate.identify(spec)
    return await gate.tend(
        lambda inventory: pin_ahead(inventory, conversation, model_hash, spec.id)
    )


@post(
    "/admin/cache/verify",
    tags=["Admin"],
    guards=[operator_only],
    status_code=200,
    responses=documented(VerifyView),
)
async def verify_cache(request: HttpRequest, gate: NamedDependency[Gate]) -> Response[Any]:
    """Read every slot now; what is not as it was written goes. Events say how far it is."""

    async def work(wanted: Wanted) -> VerifyView:
        return await gate.tend(lambda one: one.verify(wanted.watch, wanted.should_stop))

    return await told(request, work)


@post(
    "/admin/cache/gc",
    tags=["Admin"],
    guards=[operator_only],
    status_code=200,
    responses=documented(CollectedView),
)
async def collect_garbage(request: HttpRequest, gate: NamedDependency[Gate]) -> Response[Any]:
    """Do now what is done now and then: expiry, merging, order, caps. Events say how far it is."""

    async def work(wanted: Wanted) -> CollectedView:
        return await gate.collect_garbage(wanted.watch, wanted.should_stop)

    return await told(request, work)


@post("/admin/cache/publish", tags=["Admin"], guards=[local_only], status_code=200)
async def publish_slots(gate: NamedDependency[Gate], data: JSONBody[StagedSlots]) -> PublishedView:
    """Take in slots that `hearth cache import` staged."""
    published = await gate.tend(lambda inventory: inventory.publish(data.slots))
    gate.tell_slots()
    return published


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
    publish_slots,
]
