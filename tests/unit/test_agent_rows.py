"""An agent's turns in a real database: one that becomes longer."""

from __future__ import annotations

from functools import partial

import pytest

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


def pages(database: Database, most_bytes: int | None, *, is_newest_first: bool) -> list[list[int]]:
    """The numbers of all turns, page by page."""
    found: list[list[int]] = []
    page = Page(None, 4, is_newest_first, most_bytes)
    while rows := database.read(partial(agent_rows.turns, session="session", page=page)):
        found.append([row.number for row in rows])
        page = page._replace(after=rows[-1].number)
    return found


def test_pages_of_turns_are_as_short_as_their_bytes_say(database: Database) -> None:
    agent = AgentRow("a", "session", b"{}", 1.0, 1.0)
    database.submit(lambda c: agent_rows.create(c, agent)).result()
    rows = [turn(number, "r", b"x" * number, b"") for number in range(1, 7)]
    database.submit(lambda c: agent_rows.put_turns(c, "session", rows, 5.0)).result()
    assert pages(database, None, is_newest_first=False) == [[1, 2, 3, 4], [5, 6]]
    assert pages(database, 9, is_newest_first=False) == [[1, 2, 3], [4, 5], [6]]
    assert pages(database, 9, is_newest_first=True) == [[6], [5, 4], [3, 2, 1]]
    assert pages(database, 0, is_newest_first=True) == [[6], [5], [4], [3], [2], [1]]


@pytest.mark.parametrize("most_bytes", [None, 0, 1, 250, 10_000])
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_a_listing_goes_on_where_its_page_was_full(
    database: Database, limit: int, most_bytes: int | None
) -> None:
    names = [f"a{number}" for number in range(7)]
    for number, name in enumerate(names):
        agent = AgentRow(name, name, b"x" * 50 * number, 1.0, 1.0)
        database.submit(lambda c, agent=agent: agent_rows.create(c, agent)).result()
    seen: list[str] = []
    has_more = True
    while has_more:
        after = seen[-1] if seen else None
        page = database.read(
            lambda c, after=after: agent_rows.listing(c, after, limit, most_bytes=most_bytes)
        )
        assert 1 <= len(page.rows) <= limit
        total = sum(len(row.config) for row in page.rows)
        assert most_bytes is None or total <= most_bytes or len(page.rows) == 1
        seen += [row.id for row in page.rows]
        has_more = page.has_more
    assert seen == names[::-1]
