"""What expired is kept a while: found by nobody, restored as it was, erased in the end."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
from sqlalchemy import Connection

from store.database import Database
from store.history import agent_rows, expired_rows, response_rows
from store.history.agent_rows import AgentRow, Page, TurnRow
from store.history.expired_rows import ExpiredRow
from store.history.quota import HistoryCapacity, make_room, used_bytes
from store.history.response_rows import ItemRow, ResponseRow

T = TypeVar("T")

AGENT = AgentRow("a", "session", b'{"model":"m"}', 1.0, 1.0, ttl_s=None)
PINNED = AgentRow("pinned", "pinned session", b"{}", 1.0, 1.0, is_pinned=True)
TURNS = [TurnRow(n, f"r{n}", "m", "stop", 3, 2, 1, float(n), (b'"x"' * n,)) for n in range(1, 251)]
ITEMS = [ItemRow("in", b'"q"', is_output=False), ItemRow("out", b'"w"', is_output=True)]
RESPONSE = ResponseRow("r", None, b"{}", 4.0)


def fill(connection: Connection) -> None:
    for row in (AGENT, PINNED):
        agent_rows.create(connection, row)
    agent_rows.put_turns(connection, "session", TURNS, 5.0)
    response_rows.put(connection, RESPONSE, ITEMS, 6.0)
    response_rows.put_events(connection, "r", b"events")


def seen(connection: Connection) -> object:
    """Everything that a client can find."""
    found = [agent_rows.get(connection, one) for one in ("a", "pinned")]
    turns = agent_rows.turns(connection, "session", Page(limit=1000))
    told = response_rows.get(connection, "r"), response_rows.events(connection, "r")
    items = response_rows.find_items(connection, ["in", "out"]).items()
    named = {one: response_rows.item_body(connection, row.number) for one, row in items}
    listed = agent_rows.listing(connection, None, 10).rows
    return [row and row._replace(last_used_s=0.0) for row in found], turns, told, named, len(listed)


def expire(connection: Connection, now_s: float) -> int:
    return expired_rows.expire_agents(connection, now_s, 10.0) + expired_rows.expire_responses(
        connection, now_s, 10.0
    )


def do(database: Database, work: object) -> list[ExpiredRow]:
    database.submit(work).result()  # pyright: ignore[reportArgumentType]
    return database.read(expired_rows.listing)


def test_what_expires_is_found_by_nobody_and_restored_as_it_was(database: Database):
    database.submit(fill).result()
    before = database.read(seen)
    assert do(database, lambda c: expire(c, 15.0)) == []
    expired = do(database, lambda c: expire(c, 17.0))
    assert [(one.kind, one.id, one.expired_s) for one in expired] == [
        ("response", "r", 17.0),
        ("agent", "a", 17.0),
    ]
    assert database.read(seen) == (
        [None, PINNED._replace(last_used_s=0.0)],
        [],
        (None, None),
        {},
        1,
    )
    assert database.read(agent_rows.left_sessions) == [("session", 17.0)]
    for one in expired:
        assert database.submit(lambda c, one=one: expired_rows.restore(c, one, 20.0)).result()
    assert database.read(seen) == before
    assert database.read(agent_rows.left_sessions) == []
    assert do(database, lambda c: expire(c, 30.0)) == [], "it lives as if it were used now"
    assert len(do(database, lambda c: expire(c, 30.5))) == 2


def test_what_has_its_id_by_now_is_not_replaced(database: Database):
    database.submit(fill).result()
    _, agent = do(database, lambda c: expire(c, 17.0))
    new = AGENT._replace(session="new", created_s=9.0)
    assert database.submit(lambda c: agent_rows.create(c, new)).result()
    assert not database.submit(lambda c: expired_rows.restore(c, agent, 20.0)).result()
    assert database.read(lambda c: agent_rows.get(c, "a")) == new
    assert agent in database.read(expired_rows.listing)


def test_it_is_erased_when_its_grace_is_over_or_its_client_deletes_it(database: Database):
    database.submit(fill).result()
    assert len(do(database, lambda c: expire(c, 17.0))) == 2
    assert len(do(database, lambda c: expired_rows.erase(c, 16.9))) == 2
    assert database.submit(lambda c: expired_rows.erase_id(c, "agent", "a")).result()
    assert not database.submit(lambda c: expired_rows.erase_id(c, "agent", "a")).result()
    assert [one.id for one in database.read(expired_rows.listing)] == ["r"]
    assert do(database, lambda c: expired_rows.erase(c, 17.0)) == []
    counts = "SELECT (SELECT count(*) FROM expired_parts) + (SELECT count(*) FROM turn_messages)"
    assert database.read(lambda c: c.exec_driver_sql(counts).scalar()) == 0


def test_for_want_of_room_it_goes_before_anything_that_lives(database: Database):
    big = RESPONSE._replace(id="old", body=b"x" * 200_000)
    database.submit(fill).result()
    database.submit(lambda c: response_rows.put(c, big, [], 0.5)).result()
    database.submit(lambda c: expired_rows.expire_agents(c, 17.0, 10.0)).result()
    room = HistoryCapacity(database.read(used_bytes) - 1)
    assert database.submit(lambda c: make_room(c, room, 18.0)).result() == 1
    assert database.read(expired_rows.listing) == []
    assert database.read(lambda c: response_rows.get(c, "old")) is not None


@pytest.mark.parametrize("one_id", ["1", "2", "3", "branch", "branched"])
@pytest.mark.parametrize("expired", [(), ("3",), ("2", "3"), ("branched",), ("branch", "branched")])
def test_a_chain_is_erased_by_any_of_its_turns_whichever_of_them_expired(
    database: Database, one_id: str, expired: tuple[str, ...]
):
    chain = {"1": None, "2": "1", "3": "2", "branch": "1", "branched": "branch", "other": None}

    def work(connection: Connection) -> tuple[bool, bool]:
        for name, previous_id in chain.items():
            row = ResponseRow(name, previous_id, b"{}", 1.0, session=name)
            used_s = 1.0 if name in expired else 50.0
            response_rows.put(connection, row, [], used_s)
        expired_rows.expire_responses(connection, 55.0, 10.0)
        is_gone = expired_rows.erase_chain(connection, one_id, 55.0)
        return is_gone, expired_rows.erase_chain(connection, one_id, 55.0)

    assert database.submit(work).result() == (True, False)
    assert database.read(expired_rows.listing) == []
    left = database.read(lambda c: [name for name in chain if response_rows.get(c, name)])
    assert left == ["other"]
    assert database.read(response_rows.sessions) == {"other"}


def test_rows_that_expired_before_sessions_were_known_are_restored(database: Database):
    former = msgspec.msgpack.encode(("r", None, b"{}", 4.0))
    assert msgspec.msgpack.decode(former, type=ResponseRow) == RESPONSE
