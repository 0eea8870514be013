"""Stored responses and turns of threads in the history, in the transaction of the caller.

Bodies are opaque. One goes on from a previous one, so they form chains that share their beginnings.
Whoever is used is younger than whatever it goes on from is old: what goes for want of room is a
chain's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import CTE, Connection, delete, func, insert, literal, or_, select, update
from sqlalchemy.orm import aliased

from store.history.fitting import PAGE_BYTES, fitting
from store.history.history_tables import Response, ResponseEvents, ResponseItem

MAX_CHAIN = 10_000
"""Responses that one may go on from; more would be a loop or an attack."""

_MANY_IDS = 10_000
"""So many are looked for in one statement; SQLite may allow 32,766 variables."""


class ItemRow(NamedTuple):
    """An item: its id, its JSON, and whether the model made it."""

    id: str
    body: bytes
    is_output: bool


class PageWish(NamedTuple):
    """Which items to read: `limit` of them behind the one with the id `after`, the newest first if
    asked. Fewer where they have more than `most_bytes`, but one at least.
    """

    limit: int
    is_newest_first: bool
    after: str | None
    most_bytes: int = PAGE_BYTES
    is_of_input: bool = False
    """What the model made is left out."""


class ItemPage(NamedTuple):
    """Items in order, and whether there are more behind them."""

    items: list[ItemRow]
    has_more: bool


class FoundItem(NamedTuple):
    """An item by the number of its row, which is not read yet."""

    number: int
    num_bytes: int


class ResponseRow(NamedTuple):
    """A response without its items and events; `body` is JSON."""

    id: str
    previous_id: str | None
    body: bytes
    created_s: float
    session: str = ""


class Chain(NamedTuple):
    """All items up to the end of a response, in order; `missing` is the id of one that is gone."""

    items: list[ItemRow]
    missing: str | None = None


class ChainSize(NamedTuple):
    """How much there is to read."""

    num_items: int
    num_bytes: int


def put(connection: Connection, row: ResponseRow, items: Iterable[ItemRow], now_s: float) -> None:
    """Store a response whole, in the place of one of the same id."""
    connection.execute(delete(Response).where(Response.id == row.id))
    values = {**row._asdict(), "last_used_s": now_s}
    number = connection.execute(
        insert(Response).values(values).returning(Response.number)
    ).scalar_one()
    rows = [
        {"response_number": number, "position": position, **item._asdict()}
        for position, item in enumerate(items)
    ]
    if rows:
        connection.execute(insert(ResponseItem), rows)


def put_events(connection: Connection, response_id: str, events: bytes) -> None:
    """Store the events of a response that has none yet."""
    number = select(Response.number).where(Response.id == response_id).scalar_subquery()
    connection.execute(insert(ResponseEvents).values(response_number=number, body=events))


def events(connection: Connection, response_id: str) -> bytes | None:
    """The stored events of a response."""
    rows = (
        select(ResponseEvents.body)
        .join(Response, Response.number == ResponseEvents.response_number)
        .where(Response.id == response_id)
    )
    return connection.execute(rows).scalar()


def touch(connection: Connection, response_id: str, now_s: float) -> None:
    """A response was used, and with it all that it goes on from."""
    numbers = select(_links(response_id).c.number)
    is_older = Response.last_used_s < now_s
    connection.execute(
        update(Response).where(Response.number.in_(numbers), is_older).values(last_used_s=now_s)
    )


def append(
    connection: Connection, response_id: str, items: Iterable[ItemRow], session: str, now_s: float
) -> bool:
    """Store more items behind those of a response; False when there is none of that id.

    Where there is a `session`, the whole belongs to it from then on.
    """
    found = select(Response.number).where(Response.id == response_id)
    number = connection.execute(found).scalar()
    if number is None:
        return False
    last = select(func.coalesce(func.max(ResponseItem.position), -1))
    first = connection.execute(last.where(ResponseItem.response_number == number)).scalar_one() + 1
    rows = [
        {"response_number": number, "position": position, **item._asdict()}
        for position, item in enumerate(items, first)
    ]
    if rows:
        connection.execute(insert(ResponseItem), rows)
    values = {"last_used_s": now_s, **({"session": session} if session else {})}
    connection.execute(update(Response).where(Response.number == number).values(values))
    return True


def rewrite(connection: Connection, response_id: str, body: bytes, now_s: float) -> bool:
    """Give a response another body; False when there is none of that id."""
    values = {"body": body, "last_used_s": now_s}
    changed = connection.execute(update(Response).where(Response.id == response_id).values(values))
    return bool(changed.rowcount)


def remove_item(connection: Connection, response_id: str, item_id: str) -> bool:
    """Delete one item of a response; False when it has none of that id."""
    number = select(Response.number).where(Response.id == response_id).scalar_subquery()
    is_meant = (ResponseItem.response_number == number) & (ResponseItem.id == item_id)
    return bool(connection.execute(delete(ResponseItem).where(is_meant)).rowcount)


def head(connection: Connection, response_id: str) -> ResponseRow | None:
    """A response without its items."""
    columns = select(
        Response.id, Response.previous_id, Response.body, Response.created_s, Response.session
    )
    found = connection.execute(columns.where(Response.id == response_id)).first()
    return None if found is None else ResponseRow(*found)


def get(connection: Connection, response_id: str) -> tuple[ResponseRow, list[ItemRow]] | None:
    """A response and its own items, in order."""
    row = head(connection, response_id)
    return None if row is None else (row, _items(connection, response_id))


def page(connection: Connection, response_id: str, wish: PageWish) -> ItemPage | None:
    """Some items of a response, nothing else of which is read; None where no item is `after`."""
    number = select(Response.number).where(Response.id == response_id).scalar_subquery()
    is_meant = ResponseItem.response_number == number
    if wish.is_of_input:
        is_meant &= ResponseItem.is_output.is_(False)
    place = ResponseItem.position
    order = place.desc() if wish.is_newest_first else place.asc()
    sizes = select(ResponseItem.number, func.length(ResponseItem.body)).where(is_meant)
    if wish.after is not None:
        seen = select(place).where(is_meant, ResponseItem.id == wish.after).order_by(order)
        last = connection.execute(seen.limit(1)).scalar()
        if last is None:
            return None
        sizes = sizes.where(place < last if wish.is_newest_first else place > last)
    found = [
        (one, size) for one, size in connection.execute(sizes.order_by(order).limit(wish.limit + 1))
    ]
    numbers = fitting(found[: wish.limit], wish.most_bytes)
    columns = select(ResponseItem.id, ResponseItem.body, ResponseItem.is_output)
    rows = columns.where(ResponseItem.number.in_(numbers)).order_by(order)
    items = [ItemRow(*row) for row in connection.execute(rows)]
    return ItemPage(items, has_more=len(found) > len(items))


def own_item(connection: Connection, response_id: str, item_id: str) -> bytes | None:
    """The JSON of an item of a response."""
    rows = (
        select(ResponseItem.body)
        .join(Response, Response.number == ResponseItem.response_number)
        .where(Response.id == response_id, ResponseItem.id == item_id)
        .order_by(ResponseItem.position)
    )
    return connection.execute(rows.limit(1)).scalar()


def chain(connection: Connection, response_id: str) -> Chain:
    """Everything that a response which goes on from this one remembers."""
    links = _links(response_id).c
    rows = connection.execute(select(links.id, links.previous_id).order_by(links.depth.desc()))
    ids = [(one_id, previous_id) for one_id, previous_id in rows]
    missing = ids[0][1] if ids else response_id
    if missing is not None:
        return Chain([], missing)
    return Chain([item for one_id, _ in ids for item in _items(connection, one_id)])


def chain_size(connection: Connection, response_id: str) -> ChainSize:
    """How many items that chain has, and their bytes, without reading them."""
    numbers = select(_links(response_id).c.number)
    num_bytes = func.coalesce(func.sum(func.length(ResponseItem.body)), 0)
    total = select(func.count(), num_bytes).where(ResponseItem.response_number.in_(numbers))
    return ChainSize(*connection.execute(total).one())


def find_items(
    connection: Connection, item_ids: Iterable[str], prefixes: Iterable[str] = ("",)
) -> dict[str, FoundItem]:
    """The items of these ids in responses whose ids begin with one of `prefixes`.

    Of several with one id, which are sent again with every turn, the newest is found.
    """
    is_mine = or_(*(func.substr(Response.id, 1, len(one)) == one for one in prefixes))
    found: dict[str, FoundItem] = {}
    wanted = [*dict.fromkeys(item_ids)]
    for start in range(0, len(wanted), _MANY_IDS):
        newest = (
            select(func.max(ResponseItem.number))
            .join(Response, Response.number == ResponseItem.response_number)
            .where(ResponseItem.id.in_(wanted[start : start + _MANY_IDS]), is_mine)
            .group_by(ResponseItem.id)
        )
        columns = (ResponseItem.id, ResponseItem.number, func.length(ResponseItem.body))
        rows = select(*columns).where(ResponseItem.number.in_(newest))
        found |= {row[0]: FoundItem(row[1], row[2]) for row in connection.execute(rows)}
    return found


def item_body(connection: Connection, number: int) -> bytes:
    """The JSON of an item that was found."""
    body = select(ResponseItem.body).where(ResponseItem.number == number)
    return connection.execute(body).scalar_one()


def remove(connection: Connection, response_id: str, now_s: float) -> bool:
    """Delete a response and its items; False when there was none. `now_s` is not needed here."""
    del now_s
    gone = connection.execute(delete(Response).where(Response.id == response_id))
    return bool(gone.rowcount)


def relatives(connection: Connection, response_id: str) -> set[str]:
    """The ids that this one goes on from and of all that goes on from any of these, its own
    included. Those that nothing has any more are among them.
    """
    before = select(_links(response_id).c.previous_id)
    found = {response_id, *filter(None, connection.execute(before).scalars())}
    ring = [*found]
    while ring:
        some, ring = ring[:_MANY_IDS], ring[_MANY_IDS:]
        after = select(Response.id).where(Response.previous_id.in_(some))
        new = {*connection.execute(after).scalars()} - found
        found |= new
        ring += new
    return found


def sessions(connection: Connection) -> set[str]:
    """The names of all KV that stored turns have."""
    named = select(Response.session).where(Response.session != "").distinct()
    return {*connection.execute(named).scalars()}


def remove_session(connection: Connection, session: str) -> int:
    """Delete all that was asked under that name; how many."""
    return connection.execute(delete(Response).where(Response.session == session)).rowcount


def unused(connection: Connection, before_s: float) -> list[tuple[str, float]]:
    """Ids and last uses of all that was not used since."""
    rows = select(Response.id, Response.last_used_s).where(Response.last_used_s < before_s)
    return [(one_id, last_used_s) for one_id, last_used_s in connection.execute(rows)]


def _items(connection: Connection, response_id: str) -> list[ItemRow]:
    rows = (
        select(ResponseItem.id, ResponseItem.body, ResponseItem.is_output)
        .join(Response, Response.number == ResponseItem.response_number)
        .where(Response.id == response_id)
        .order_by(ResponseItem.position)
    )
    return [ItemRow(*row) for row in connection.execute(rows)]


def _links(response_id: str) -> CTE:
    """A response and all that it goes on from; `depth` is 0 for itself."""
    columns = (Response.number, Response.id, Response.previous_id)
    links = (
        select(*columns, literal(0).label("depth"))
        .where(Response.id == response_id)
        .cte(recursive=True)
    )
    older = aliased(Response)
    return links.union_all(
        select(older.number, older.id, older.previous_id, links.c.depth + 1)
        .join(links, links.c.previous_id == older.id)
        .where(links.c.depth < MAX_CHAIN)
    )
