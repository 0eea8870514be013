"""`hearth db`: what looks changes nothing, and what upgrades does all databases."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from api.cli import doctor_disk
from migrations.run import downgrade_history
from runtime.cache.history import FILE, OpenHistory
from runtime.cache.opened import INDEX, BlockStore, open_blocks
from runtime.cache.tending import terms_of
from runtime.config.settings import Settings
from store.file_kinds import HISTORY
from store.file_kinds import INDEX as INDEX_KIND
from store.history import agent_rows, expired_rows
from store.history.agent_rows import AgentRow
from tests.running_server import hearth


def open_index(home: Path) -> BlockStore:
    return open_blocks(home / "kv", terms_of(Settings(home=home)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """One that a server has used and left."""
    open_index(tmp_path).close()
    OpenHistory(tmp_path).close()
    return tmp_path


def done(home: Path, action: str) -> tuple[int, list[Any]]:
    result = hearth("db", action, "--json", HEARTH_HOME=str(home))
    assert result.stdout, result.stderr
    said = json.loads(result.stdout)
    assert said["is_intact"] is (result.returncode == 0)
    return result.returncode, said["databases"]


def files(home: Path) -> dict[Path, bytes]:
    """All but the log of SQLite, which is made by looking too, and is empty."""
    there = (path for path in home.rglob("*") if path.is_file())
    logs = ("-shm", "-wal")
    return {path: path.read_bytes() for path in there if not path.name.endswith(logs)}


def test_a_damaged_database_is_said_to_be_damaged_and_stays_where_it_is(home: Path):
    for path in (home / "kv" / INDEX, home / FILE):
        path.write_bytes(b"no database" * 999)
    before = files(home)
    for action in ("check", "upgrade"):
        code, found = done(home, action)
        assert code == 1
        assert ["not a database" in one["error"] for one in found] == [True, True]
    assert files(home) == before


def test_an_older_database_is_upgraded_when_that_is_asked_and_not_by_a_look(home: Path):
    with closing(OpenHistory(home)) as history:
        history.database.submit(lambda one: downgrade_history(one, 1)).result()
    newest = [INDEX_KIND.version, HISTORY.version]
    code, found = done(home, "check")
    assert (code, [one["schema_version"] for one in found]) == (0, [INDEX_KIND.version, 1])
    assert [one["known_version"] for one in found] == newest
    assert "hearth db upgrade" in hearth("db", "check", HEARTH_HOME=str(home)).stdout
    code, found = done(home, "upgrade")
    assert (code, [one["schema_version"] for one in found]) == (0, newest)
    assert (home / f"{FILE}.aside-schema-1").exists()


def test_a_newer_database_is_refused_and_left_alone(home: Path):
    with closing(sqlite3.connect(home / FILE)) as newer:
        newer.execute(f"PRAGMA user_version = {HISTORY.version + 1}")
    before = files(home)
    code, found = done(home, "upgrade")
    assert (code, "schema" in found[1]["error"]) == (1, True)
    assert files(home) == before


def test_databases_are_looked_at_while_a_server_has_them(home: Path):
    with closing(open_index(home)), closing(OpenHistory(home)):
        code, found = done(home, "check")
        refused = hearth("db", "upgrade", HEARTH_HOME=str(home))
    assert (code, [one["error"] for one in found]) == (0, [None, None])
    assert refused.returncode == 1
    assert "A server has the store open" in refused.stderr


def remembered(home: Path, *words: str) -> tuple[int, Any]:
    result = hearth("history", *words, "--json", HEARTH_HOME=str(home), HEARTH_PORT="1")
    return result.returncode, json.loads(result.stdout) if result.stdout else result.stderr


def test_what_expired_and_what_was_set_aside_is_seen_and_dealt_with_without_a_server(home: Path):
    (home / FILE).write_bytes(b"no database" * 999)
    with closing(OpenHistory(home)) as history:
        agent = AgentRow("a", "session", b"{}", 1.0, 1.0)
        history.database.submit(lambda c: agent_rows.create(c, agent)).result()
        history.database.submit(lambda c: expired_rows.expire_agents(c, 9e9, 1.0)).result()
    code, shown = remembered(home)
    assert (code, [one["id"] for one in shown["expired"]]) == (0, ["a"])
    assert [one["name"] for one in shown["set_aside"]] == [f"{FILE}.aside-1"]
    found = [one for one in doctor_disk.findings(Settings(home=home)) if one.subject == "History"]
    assert [one.remedy for one in found] == [
        None,
        "hearth history acknowledge, when you have read this",
    ]
    assert remembered(home, "acknowledge") == (0, {"num_new": 1})
    assert remembered(home, "acknowledge") == (0, {"num_new": 0})
    found = [one for one in doctor_disk.findings(Settings(home=home)) if one.subject == "History"]
    assert [one.remedy for one in found] == [None]
    assert remembered(home, "restore", "b")[0] == 1
    assert remembered(home, "restore", "a") == (0, {"restored": ["a"], "taken": []})
    assert remembered(home)[1]["expired"] == []
    assert remembered(home, "restore")[0] == 2, "it does not say what"
