"""An agent's turns in a real database: one that becomes longer."""

from __future__ import annotations

from store.database import Database
from store.history import agent_rows
from store.history.agent_rows import AgentRow, Page, TurnRow


def turn(number: int, request_id: str, *bodies: bytes) -> TurnRow:
    return TurnRow(number, request_id, "m", "stop", 3, 2, 1, 5.0, bodies)


def test_only_the_last_turn_of_that_request_is_replaced(database: Database) -> None:
    agent = AgentRow("a", "session", b"{}", 1.0, 1.0)
    first, last = turn(1, "r1", b"hello"), turn(2, "r2", b"and", b"so")
    longer = turn(2, "r3", b"and", b"so on")

    def write(row: TurnRow, request_id: str, session: str = "session") -> bool:
        return database.submit(
            lambda c: agent_rows.replace(c, session, row, request_id, 5.0)
        ).result()

    database.submit(lambda c: agent_rows.create(c, agent)).result()
    for row in (first, last):
        database.submit(lambda c, row=row: agent_rows.append(c, "session", row, 5.0)).result()
    assert not write(longer, "r1")
    assert not write(turn(1, "r4", b"no"), "r1")
    assert not write(longer, "r2", "another session")
    assert database.read(lambda c: agent_rows.turns(c, "session", Page())) == [first, last]
    assert write(longer, "r2")
    assert not write(last, "r2")
    assert database.read(lambda c: agent_rows.turns(c, "session", Page())) == [first, longer]
    found = database.read(lambda c: agent_rows.get(c, "a"))
    assert found is not None
    assert (found.num_turns, found.num_bytes) == (2, len(b"helloandso on"))
