"""What expired: agents and stored responses that nobody finds, kept a while longer to be restored.

They are moved, not marked: no query of the living can come upon them. All in the transaction of
the caller, by trusted time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from store.history import agent_rows, response_rows
from store.history.agent_rows import AgentRow, Page, TurnRow
from store.history.history_tables import Expired, ExpiredPart
from store.history.response_rows import ItemRow, ResponseRow

Kind = Literal["agent", "response"]

_pack = msgspec.msgpack.encode
_PAGE = 100


class ExpiredRow(NamedTuple):
    """What expired at `expired_s`. `number` is its own: an id may have expired more than once."""

    number: int
    kind: Kind
    id: str
    num_bytes: int
    last_used_s: float
    expired_s: float


def expire_agents(connection: Connection, now_s: float, ttl_s: float) -> int:
    """Move all agents that were not used for as long as they live; how many.

    Their KV is deleted, as it can be computed again.
    """
    ids = agent_rows.expired(connection, now_s, ttl_s)
    for agent_id in ids:
        row = agent_rows.get(connection, agent_id)
        assert row is not None, "it was found in this transaction"
        _keep(connection, "agent", (row.id, row.last_used_s, now_s), _agent(connection, row))
        agent_rows.remove(connection, agent_id, now_s)
    return len(ids)


def expire_responses(connection: Connection, now_s: float, ttl_s: float) -> int:
    """Move all responses that were not used for so long; how many."""
    found = response_rows.unused(connection, now_s - ttl_s)
    for response_id, last_used_s in found:
        told = (response_id, last_used_s, now_s)
        _keep(connection, "response", told, _response(connection, response_id))
        response_rows.remove(connection, response_id, now_s)
    return len(found)


def listing(connection: Connection) -> list[ExpiredRow]:
    """Everything that can be restored, the latest first."""
    columns = select(
        Expired.number,
        Expired.kind,
        Expired.id,
        Expired.num_bytes,
        Expired.last_used_s,
        Expired.expired_s,
    )
    return [ExpiredRow(*row) for row in connection.execute(columns.order_by(Expired.number.desc()))]


def restore(connection: Connection, one: ExpiredRow, now_s: float) -> bool:
    """Bring it back as if it were used now; False where there is one of that id by now."""
    rows = select(ExpiredPart.body).where(ExpiredPart.expired_number == one.number)
    parts = connection.execute(rows.order_by(ExpiredPart.position)).scalars()
    is_back = _RESTORE[one.kind](connection, parts, now_s)
    if is_back:
        connection.execute(delete(Expired).where(Expired.number == one.number))
    return is_back


def erase(connection: Connection, before_s: float) -> int:
    """Delete for good what expired before; how many."""
    return connection.execute(delete(Expired).where(Expired.expired_s <= before_s)).rowcount


def erase_id(connection: Connection, kind: Kind, one_id: str) -> bool:
    """Delete for good whatever had that id: what is deleted by its client stays deleted."""
    gone = delete(Expired).where(Expired.kind == kind, Expired.id == one_id)
    return bool(connection.execute(gone).rowcount)


def erase_responses(
    connection: Connection, is_meant: Callable[[ResponseRow], bool]
) -> list[ResponseRow]:
    """Delete for good all stored turns that are meant; what they were."""
    rows = (
        select(Expired.number, ExpiredPart.body)
        .join(ExpiredPart, ExpiredPart.expired_number == Expired.number)
        .where(Expired.kind == "response", ExpiredPart.position == 0)
    )
    found = {
        number: msgspec.msgpack.decode(body, type=ResponseRow)
        for number, body in connection.execute(rows)
    }
    gone = {number: row for number, row in found.items() if is_meant(row)}
    for number in gone:
        connection.execute(delete(Expired).where(Expired.number == number))
    return [*gone.values()]


def erase_chain(connection: Connection, one_id: str, now_s: float) -> bool:
    """Delete for good a stored turn, all that it goes on from and all that goes on from these;
    False where there was nothing.
    """
    left, is_gone = {one_id}, False
    while left:
        ids = response_rows.relatives(connection, left.pop())
        num_gone = sum([response_rows.remove(connection, one, now_s) for one in ids])
        erased = erase_responses(
            connection, lambda row, ids=ids: not ids.isdisjoint((row.id, row.previous_id))
        )
        left |= {one for row in erased for one in (row.id, row.previous_id) if one is not None}
        is_gone = is_gone or bool(num_gone or erased)
    return is_gone


def erase_number(connection: Connection, number: str, now_s: float) -> None:
    """Delete one for good, for want of room. `now_s` is not needed here."""
    del now_s
    connection.execute(delete(Expired).where(Expired.number == int(number)))


def _keep(
    connection: Connection, kind: Kind, told: tuple[str, float, float], parts: Iterable[bytes]
) -> None:
    one_id, last_used_s, now_s = told
    values = {"kind": kind, "id": one_id, "last_used_s": last_used_s, "expired_s": now_s}
    number = connection.execute(
        insert(Expired).values(values | {"num_bytes": 0}).returning(Expired.number)
    ).scalar_one()
    num_bytes = 0
    for position, body in enumerate(parts):
        part = {"expired_number": number, "position": position, "body": body}
        connection.execute(insert(ExpiredPart).values(part))
        num_bytes += len(body)
    connection.execute(update(Expired).where(Expired.number == number).values(num_bytes=num_bytes))


def _agent(connection: Connection, row: AgentRow) -> Iterator[bytes]:
    """The agent, then its turns, each with its messages."""
    yield _pack(row)
    after: int | None = None
    while found := agent_rows.turns(connection, row.session, Page(after, _PAGE)):
        yield from map(_pack, found)
        after = found[-1].number


def _response(connection: Connection, response_id: str) -> Iterator[bytes]:
    """The response, its events, then its items."""
    found = response_rows.get(connection, response_id)
    assert found is not None, "it was found in this transaction"
    row, items = found
    yield _pack(row)
    yield response_rows.events(connection, response_id) or b""
    yield from map(_pack, items)


def _restore_agent(connection: Connection, parts: Iterator[bytes], now_s: float) -> bool:
    row = msgspec.msgpack.decode(next(parts), type=AgentRow)
    if not agent_rows.create(connection, row._replace(last_used_s=now_s, num_turns=0)):
        return False
    turns = (msgspec.msgpack.decode(part, type=TurnRow) for part in parts)
    agent_rows.put_turns(connection, row.session, turns, now_s)
    agent_rows.forget_left(connection, [row.session])
    return True


def _restore_response(connection: Connection, parts: Iterator[bytes], now_s: float) -> bool:
    row = msgspec.msgpack.decode(next(parts), type=ResponseRow)
    if response_rows.get(connection, row.id) is not None:
        return False
    events = next(parts)
    items = [msgspec.msgpack.decode(part, type=ItemRow) for part in parts]
    response_rows.put(connection, row, items, now_s)
    if events:
        response_rows.put_events(connection, row.id, events)
    return True


_RESTORE: dict[str, Callable[[Connection, Iterator[bytes], float], bool]] = {
    "agent": _restore_agent,
    "response": _restore_response,
}
