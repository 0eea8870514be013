"""What the operator sees of the history and does to it: what was set aside, what has expired."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy import Connection

from api.admin.cache import operator_only
from runtime.cache.history import History
from runtime.errors import UnknownExpired
from store.clock import TrustedClock
from store.history import expired_rows, set_aside_rows


class ExpiredView(msgspec.Struct, gc=False):
    """An agent or stored response that can be restored until it is erased. Times are wall time."""

    kind: str
    id: str
    num_bytes: int
    last_used_s: float
    expired_s: float
    erased_s: float


class SetAsideView(msgspec.Struct, gc=False):
    """A damaged file beside the database, and how much of it was taken over."""

    name: str
    at_s: float
    num_agents: int
    num_responses: int
    is_whole: bool
    is_acknowledged: bool


class HistoryView(msgspec.Struct, gc=False):
    """Everything that is not served and not gone either."""

    expired: list[ExpiredView]
    set_aside: list[SetAsideView]


class RestoreAsked(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Ids as `GET /admin/history` says them."""

    ids: list[str]


class Restored(msgspec.Struct, gc=False):
    """`taken` are ids that something else has by now."""

    restored: list[str]
    taken: list[str]


class Acknowledged(msgspec.Struct, gc=False):
    """How many files were not acknowledged before."""

    num_new: int


def look(connection: Connection, clock: TrustedClock, grace_s: float) -> HistoryView:
    """What there is."""
    expired = [
        ExpiredView(
            row.kind,
            row.id,
            row.num_bytes,
            clock.wall_s(row.last_used_s),
            clock.wall_s(row.expired_s),
            clock.wall_s(row.expired_s + grace_s),
        )
        for row in expired_rows.listing(connection)
    ]
    aside = [
        SetAsideView(
            row.name,
            row.at_s,
            row.num_agents,
            row.num_responses,
            bool(row.is_whole),
            bool(row.is_acknowledged),
        )
        for row in set_aside_rows.listing(connection)
    ]
    return HistoryView(expired, aside)


def restore(connection: Connection, ids: Sequence[str], now_s: float) -> Restored:
    """Bring back what expired last under each id, all or nothing.

    Raises UnknownExpired.
    """
    latest = {row.id: row for row in reversed(expired_rows.listing(connection))}
    outcome = Restored([], [])
    for one_id in dict.fromkeys(ids):
        if one_id not in latest:
            raise UnknownExpired(one_id)
        is_back = expired_rows.restore(connection, latest[one_id], now_s)
        (outcome.restored if is_back else outcome.taken).append(one_id)
    return outcome


@get("/admin/history", tags=["Admin"], guards=[operator_only])
async def show_history(history: NamedDependency[History]) -> HistoryView:
    """What has expired and can be restored, and damaged files that were set aside."""
    return await history.read(lambda c: look(c, history.clock(), history.grace_s))


@post("/admin/history/restore", tags=["Admin"], guards=[operator_only], status_code=200)
async def restore_expired(
    history: NamedDependency[History], data: JSONBody[RestoreAsked]
) -> Restored:
    """Bring agents and stored responses back that have expired."""
    return await history.write(lambda c: restore(c, data.ids, history.now_s()))


@post("/admin/history/acknowledge", tags=["Admin"], guards=[operator_only], status_code=200)
async def acknowledge(history: NamedDependency[History]) -> Acknowledged:
    """The operator knows of all damaged files: health is `ok` again."""
    return Acknowledged(await history.acknowledge())


HANDLERS = (show_history, restore_expired, acknowledge)
