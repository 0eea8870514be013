"""The history's own database: its schema, and every way its file can be bad or missing."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine
from structlog.testing import capture_logs

from migrations.run import downgrade_history, upgrade, upgrade_history
from runtime.cache.history import FILE, LOCK, History
from runtime.errors import StoreUnavailable
from store import ownership
from store.clock import Trusted, TrustedClock
from store.database import Database
from store.errors import IndexDamaged, StoreTooNew
from store.file_kinds import HISTORY
from store.history import agent_rows, response_rows
from store.history.agent_rows import AgentRow, Page, TurnRow
from store.history.history_tables import HistoryTable
from store.history.response_rows import ItemRow, ResponseRow
from store.opening import open_database
from store.types import Instant
from tests.living_history import living
from tests.waiting import until

INSERT = "INSERT INTO left_sessions VALUES (?, 0.0)"


def put(session: str):
    return lambda connection: connection.exec_driver_sql(INSERT, (session,)).rowcount


def sessions(connection: Connection) -> set[str]:
    return {one for (one,) in connection.exec_driver_sql("SELECT session FROM left_sessions")}


def schema(connection: Connection) -> set[tuple[str, str]]:
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite_%'"
    )
    return {(name, "".join(sql.split())) for name, sql in rows}


def opened(home: Path) -> Database:
    return open_database(home / FILE, upgrade_history, kind=HISTORY)


async def until_ok(history: History) -> None:
    await until(lambda: history.status.state == "ok", "the history works again")


def all_bytes(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.iterdir() if path.is_file())


def test_the_migrations_make_the_tables_that_the_code_knows(tmp_path: Path):
    with closing(opened(tmp_path)) as database, database.reading() as connection:
        migrated = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(migrated, HistoryTable.metadata) == []
        made = schema(connection)
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        HistoryTable.metadata.create_all(connection)
        known = schema(connection)
    engine.dispose()
    assert {one for one in made if one[0] != "alembic_version"} == known


def test_the_schema_goes_down_and_up_again(tmp_path: Path):
    with closing(opened(tmp_path)) as database:
        before = database.read(schema)
        database.submit(lambda connection: downgrade_history(connection, 0)).result()
        assert {name for name, _ in database.read(schema)} == {"alembic_version"}
        database.submit(upgrade_history).result()
        assert database.read(schema) == before


def test_index_and_history_can_be_opened_at_the_same_time(tmp_path: Path):
    def open_and_close(number: int) -> None:
        home = tmp_path / str(number)
        home.mkdir()
        if number % 2:
            opened(home).close()
        else:
            open_database(home / "index.db", upgrade).close()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(open_and_close, range(32))) == [None] * 32


def test_commits_are_synced_and_the_files_are_private(tmp_path: Path):
    with closing(opened(tmp_path)) as database:
        database.submit(put("a")).result()
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        synchronous = database.submit(
            lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar()
        )
        assert synchronous.result() == 2


async def test_what_was_written_is_there_after_the_next_start(tmp_path: Path):
    async with living(tmp_path) as history:
        assert await history.write(put("a")) == 1
        assert history.status.state == "ok"
    async with living(tmp_path) as history:
        assert await history.read(sessions) == {"a"}
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600


async def test_a_second_server_is_refused_until_the_first_leaves(tmp_path: Path):
    async with living(tmp_path) as first:
        await first.write(put("a"))
        async with living(tmp_path) as second:
            with pytest.raises(StoreUnavailable, match="another server"):
                await second.write(put("b"))
            assert (second.status.state, second.status.reason) == ("degraded", "locked")
            await first.close()
            await until_ok(second)
            await second.write(put("b"))
            assert await second.read(sessions) == {"a", "b"}


@pytest.mark.parametrize("content", [b"no database" * 900, b"SQLite format 3\x00" + b"\xff" * 8000])
async def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path, content: bytes):
    (tmp_path / FILE).write_bytes(content)
    async with living(tmp_path) as history:
        await history.write(put("a"))
        assert history.status.state == "ok"
    assert (tmp_path / f"{FILE}.aside-1").read_bytes() == content


async def test_an_index_is_no_history(tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("CREATE TABLE slots (a)")
        other.execute(f"PRAGMA application_id = {0x48525448}")
    async with living(tmp_path) as history:
        assert await history.read(sessions) == set()
    assert (tmp_path / f"{FILE}.aside-1").exists()


async def test_damage_after_a_kill_is_found_at_the_start_and_set_aside(tmp_path: Path):
    async with living(tmp_path) as history:
        for number in range(200):
            await history.write(put(f"{number:03d}" * 60))
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("UPDATE store_state SET is_open = 1")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray((tmp_path / FILE).read_bytes())
    middle = len(data) // 4096 // 2 * 4096
    data[middle : middle + 8192] = bytes(8192)
    (tmp_path / FILE).write_bytes(data)
    async with living(tmp_path) as history:
        assert await history.read(sessions) == set()
        await history.write(put("a"))
    assert (tmp_path / f"{FILE}.aside-1").exists()


async def test_a_newer_schema_is_never_touched(tmp_path: Path):
    async with living(tmp_path) as history:
        await history.write(put("a"))
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute(f"PRAGMA user_version = {HISTORY.version + 1}")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StoreTooNew):
        opened(tmp_path)
    async with living(tmp_path) as history:
        with pytest.raises(StoreUnavailable, match="schema"):
            await history.read(sessions)
    assert (tmp_path / FILE).read_bytes() == before


async def test_a_file_that_was_removed_is_noticed_and_made_anew(tmp_path: Path):
    async with living(tmp_path) as history:
        await history.write(put("a"))
        (tmp_path / FILE).unlink()
        with pytest.raises(StoreUnavailable, match="removed"):
            await history.write(put("b"))
        assert history.status.reason == "lost"
        await until_ok(history)
        await history.write(put("c"))
        assert await history.read(sessions) == {"c"}


async def test_a_home_that_cannot_be_made_degrades_and_mends(tmp_path: Path):
    home = tmp_path / "home"
    home.write_text("in the way")
    async with living(home) as history:
        with pytest.raises(StoreUnavailable):
            await history.read(sessions)
        assert history.status.state == "degraded"
        home.unlink()
        await until_ok(history)
        assert await history.read(sessions) == set()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


async def test_a_full_disk_refuses_writes_and_keeps_what_is_there(tmp_path: Path):
    def limited(num_pages: int):
        text = f"PRAGMA max_page_count = {num_pages}"
        return lambda connection: connection.exec_driver_sql(text).scalar()

    async with living(tmp_path) as history:
        await history.write(put("a"))
        await history.write(limited(1))
        with pytest.raises(StoreUnavailable, match="full"):
            await history.write(put("b" * 100_000))
        assert history.status.reason == "full"
        assert await history.read(sessions) == {"a"}
        await history.write(limited(100_000))
        await until_ok(history)
        await history.write(put("c"))


async def test_what_the_work_raises_is_raised_and_undone(tmp_path: Path):
    def work(connection: Connection) -> None:
        put("a")(connection)
        raise ValueError("no")

    async with living(tmp_path) as history:
        with pytest.raises(ValueError, match="no"):
            await history.write(work)
        assert await history.read(sessions) == set()
        assert history.status.state == "ok"


async def test_tidying_leaves_no_byte_of_what_was_deleted(tmp_path: Path):
    async with living(tmp_path) as history:
        await history.write(put("confidential" * 50))
        await history.tidy()
        assert b"confidential" in (tmp_path / FILE).read_bytes()
        await history.write(
            lambda connection: connection.exec_driver_sql("DELETE FROM left_sessions").rowcount
        )
        await history.tidy()
        assert b"confidential" not in all_bytes(tmp_path)


async def test_what_was_set_aside_is_said_until_it_is_acknowledged_and_goes_long_after(
    tmp_path: Path,
):
    (tmp_path / FILE).write_bytes(b"no database" * 900)
    async with living(tmp_path) as history:
        await history.read(sessions)
        assert (history.health.state, history.health.reason) == ("degraded", "set_aside")
        assert history.health.message is not None
        assert "aside-1" in history.health.message
        assert "hearth history" in history.note
    async with living(tmp_path) as history:
        await history.read(sessions)
        assert history.health.reason == "set_aside", "a restart is no acknowledgement"
        os.utime(tmp_path / f"{FILE}.aside-1", (0, 0))
        assert await history.drop_asides(0.0) == 0, "nobody knows of it"
        assert await history.acknowledge() == 1
        assert (history.health.state, history.note) == ("ok", "")
        assert await history.drop_asides(3600.0) == 0, "its own time is anybody's to set"
    async with living(tmp_path) as history:
        await history.read(sessions)
        assert history.health.state == "ok"
        assert await history.drop_asides(0.0) == 1
        assert not (tmp_path / f"{FILE}.aside-1").exists()


def asides(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.glob("*.aside-*")}


def told(connection: Connection) -> dict[str, int]:
    """By agent, how many turns it has, each of them whole."""
    rows = agent_rows.listing(connection, None, 1000).rows
    for row in rows:
        turns = agent_rows.turns(connection, row.session, Page(limit=1000))
        assert [turn.number for turn in turns] == list(range(1, row.num_turns + 1))
        for turn in turns:
            assert turn.bodies == body_of(row.id, turn.number)
    return {row.id: row.num_turns for row in rows}


def body_of(agent_id: str, number: int) -> tuple[bytes, ...]:
    return tuple(f'"{agent_id} {number} {part} {"x" * 400}"'.encode() for part in range(2))


def tell(connection: Connection) -> None:
    """Twenty agents of ten turns, and twenty responses that go on from one another."""
    for number in range(20):
        name = f"agent-{number}"
        agent_rows.create(connection, AgentRow(name, f"session {name}", b"{}", 1.0, 1.0))
        turns = [TurnRow(n, "r", "m", "stop", 3, 2, 1, 1.0, body_of(name, n)) for n in range(1, 11)]
        agent_rows.put_turns(connection, f"session {name}", turns, 1.0)
        previous = f"resp-{number - 1}" if number else None
        items = [ItemRow(f"item-{number}", b'"said"', is_output=True)]
        response_rows.put(connection, ResponseRow(f"resp-{number}", previous, b"{}", 1.0), items, 1)


async def damaged(home: Path, spoil: Callable[[bytearray], None]) -> None:
    """A history of a server that was killed and whose file was spoilt."""
    async with living(home) as history:
        await history.write(tell)
        await history.tidy()
    with closing(sqlite3.connect(home / FILE)) as other:
        other.execute("UPDATE store_state SET is_open = 1")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray((home / FILE).read_bytes())
    spoil(data)
    (home / FILE).write_bytes(data)


@pytest.mark.parametrize("num_zeroed", [100, 200, 4096])
async def test_all_is_taken_over_from_a_file_whose_beginning_is_gone(
    tmp_path: Path, num_zeroed: int
):
    def spoil(data: bytearray) -> None:
        data[:num_zeroed] = bytes(num_zeroed)

    await damaged(tmp_path, spoil)
    async with living(tmp_path) as history:
        assert await history.read(told) == {f"agent-{n}": 10 for n in range(20)}
        chain = await history.read(lambda c: response_rows.chain(c, "resp-19"))
        assert len(chain.items) == 20
        assert history.health.reason == "set_aside"
        assert history.note == "", "nothing is missing"


@pytest.mark.parametrize("seed", range(3))
async def test_what_can_be_read_of_a_damaged_file_is_taken_over_and_nothing_half(
    tmp_path: Path, seed: int
):
    def spoil(data: bytearray) -> None:
        pages = random.Random(seed).sample(range(16, len(data) // 4096), 3)
        for page in pages:
            data[page * 4096 : (page + 1) * 4096] = bytes(4096)

    await damaged(tmp_path, spoil)
    async with living(tmp_path) as history:
        found = await history.read(told)
        assert 0 < sum(found.values()) < 200
        assert "hearth history" in history.note
        assert await history.write(put("a")) == 1
    before = asides(tmp_path)
    async with living(tmp_path) as history:
        assert await history.read(told) == found
    assert asides(tmp_path) == before, "what was taken over once is left alone"


def failed(said: Sequence[MutableMapping[str, Any]]) -> int:
    return sum(one["event"] == "history_still_degraded" for one in said)


async def test_health_stays_degraded_while_what_clients_ask_for_cannot_be_written(tmp_path: Path):
    async with living(tmp_path) as history:
        await history.write(
            lambda c: (
                c.exec_driver_sql(
                    "CREATE TRIGGER no BEFORE INSERT ON turn_messages"
                    " BEGIN SELECT RAISE(ABORT, 'no'); END"
                ).rowcount
            )
        )
        row = AgentRow("a", "s", b"{}", 1.0, 1.0)
        turn = TurnRow(1, "r", "m", "stop", 3, 2, 1, 1.0, (b'"x"',))
        await history.write(lambda c: agent_rows.create(c, row))
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await history.write(lambda c: agent_rows.append(c, "s", turn, 2.0))
        with capture_logs() as said:
            await until(lambda: failed(said) >= 1, "it is tried again")
        assert history.status.state == "degraded"
        assert "history_works_again" not in [one["event"] for one in said]
        await history.write(lambda c: c.exec_driver_sql("DROP TRIGGER no").rowcount)
        await until_ok(history)


async def test_ages_go_on_where_they_were_and_jumps_and_boots_are_no_age(tmp_path: Path):
    times = [Instant(1e9, 50.0, "one"), Instant(1e9, 50.0, "one")]

    def read() -> Instant:
        return times[-1]

    async def aged(boot: str, monotonic_s: float, wall_s: float) -> float:
        times.append(Instant(wall_s, monotonic_s, boot))
        history = History(tmp_path, read=read)
        history.start()
        await history.read(sessions)
        now_s = history.now_s()
        await history.close()
        return now_s

    assert await aged("one", 50.0, 1e9) == 1e9
    assert await aged("one", 80.0, 2e9) == 1e9 + 30
    assert await aged("two", 5000.0, 3e9) == 1e9 + 30
    assert await aged("two", 5060.0, 1.0) == 1e9 + 90


async def test_an_older_history_begins_to_age_where_it_was_used_last(tmp_path: Path):
    def older(connection: Connection) -> None:
        agent_rows.create(connection, AgentRow("a", "s", b"{}", 5.0, 700.0))
        agent_rows.create(connection, AgentRow("b", "t", b"{}", 5.0, 900.0))
        downgrade_history(connection, 3)

    with closing(opened(tmp_path)) as database:
        database.submit(older).result()
        database.submit(upgrade_history).result()
        database.clock = TrustedClock(Trusted(900.0))
    async with living(tmp_path) as history:
        await history.read(sessions)
        assert history.now_s() == pytest.approx(900.0, abs=60)


def test_the_lock_goes_with_its_descriptor(tmp_path: Path):
    os.close(ownership.hold(tmp_path / LOCK))
    os.close(ownership.hold(tmp_path / LOCK))


def test_damage_seen_while_reading_is_reported(tmp_path: Path):
    with closing(opened(tmp_path)) as database:
        for number in range(20):
            database.submit(put(f"{number:03d}" * 600)).result()
        database.checkpoint().result()
        data = bytearray((tmp_path / FILE).read_bytes())
        data[8 * 4096 : -1] = bytes(len(data) - 8 * 4096 - 1)
        with (tmp_path / FILE).open("r+b") as file:
            file.write(data)
        with pytest.raises(IndexDamaged):
            database.read(sessions)
