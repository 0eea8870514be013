"""`/admin/dashboard`: what the page at `/` shows and asks for. For this machine only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery

from api.admin.cache import operator_only
from api.dashboard.service import Dashboard
from api.dashboard.views import (
    KeptListing,
    Prewarmed,
    Samples,
    SlotTree,
    Snapshot,
)
from api.http.body import HttpRequest
from api.http.gate import Gate
from api.http.guard import GuardRules
from api.http.kv_access import KvAccess
from api.http.sse import EVENTS, EventStream
from api.observe.trend import SAMPLE_S
from runtime.supervisor.lifecycle import Transition
from runtime.supervisor.news import Listener

_TICK_S = 1.0
MAX_SLOTS = 2000


@get("/admin/dashboard", tags=["Admin"], guards=[operator_only])
async def snapshot(dashboard: NamedDependency[Dashboard]) -> Snapshot:
    """How everything stands now."""
    return await dashboard.snapshot()


@get("/admin/dashboard/samples", tags=["Admin"], guards=[operator_only], sync_to_thread=False)
def samples(dashboard: NamedDependency[Dashboard]) -> Samples:
    """Time to first token and decode rate over the last hour."""
    return Samples(SAMPLE_S, dashboard.samples())


@get("/admin/dashboard/events", tags=["Admin"], guards=[operator_only], media_type=EVENTS)
async def live_snapshots(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    dashboard: NamedDependency[Dashboard],
    rules: NamedDependency[GuardRules],
) -> EventStream:
    """A snapshot every second, and one at once when a model changes its state.

    It ends with the session that asked for it.
    """
    listener, headers = gate.supervisor.news.listen(), request.headers
    by_session = rules.sessions.find(headers) is not None
    feed = _feed(dashboard, listener, lambda: by_session and rules.sessions.find(headers) is None)
    return EventStream(feed, listener.close, {})


@get("/admin/dashboard/conversations", tags=["Admin"], guards=[operator_only])
async def conversations(
    dashboard: NamedDependency[Dashboard], search: FromQuery[str] = ""
) -> KeptListing:
    """Conversations whose id or model contains `search`, the latest used first."""
    return await dashboard.conversations(search)


@post(
    "/admin/dashboard/conversations/prewarm",
    tags=["Admin"],
    guards=[operator_only],
    status_code=200,
)
async def prewarm_conversation(
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    conversation: FromQuery[str],
) -> Prewarmed:
    """Bring a conversation's KV from disk into the memory of its model, if that is loaded."""
    found = await cache.contents.find(conversation)
    view = found.view
    loaded = [one.spec.id for one in gate.supervisor.status() if one.is_loaded]
    if view.model not in loaded:
        return Prewarmed(view.id, 0, f"{view.model} is not loaded; load it first.")
    if not await cache.contents.bring(found):
        return Prewarmed(view.id, 0, "Nothing of it is on disk.")
    return Prewarmed(view.id, view.num_durable, "It is on its way into memory.")


@get("/admin/dashboard/tree", tags=["Admin"], guards=[operator_only])
async def slot_tree(cache: NamedDependency[KvAccess], model: FromQuery[str]) -> SlotTree:
    """The slots of a model as a tree; what is shared is there once."""
    slots = await cache.contents.tree(model)
    return SlotTree(model, len(slots), slots[:MAX_SLOTS])


async def _feed(
    dashboard: Dashboard, listener: Listener[Transition], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    while not (listener.is_closed or is_over()):
        now = await dashboard.snapshot()
        yield b"event: snapshot\ndata: %s\n\n" % msgspec.json.encode(now)
        await listener.next(_TICK_S)


HANDLERS = [
    snapshot,
    samples,
    live_snapshots,
    conversations,
    prewarm_conversation,
    slot_tree,
]
