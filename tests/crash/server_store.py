"""What has to hold of a server's store whatever happened to the server."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

from runtime.cache.inventory import Inventory
from runtime.cache.inventory_views import ConversationView
from runtime.cache.owned import OpenStore
from runtime.cache.store_opening import open_store
from store import upkeep
from store.disk import disk_bytes
from store.recovery import Recovery
from store.slots import read_header, slot_path, verify
from tests.running_server import RunningServer

MEMBERS = """
SELECT s.name FROM conversation_slots cs JOIN slots s ON s.id = cs.slot_id
JOIN conversations c ON c.id = cs.conversation_id WHERE lower(hex(c.key)) = ?
"""


def kill(server: RunningServer) -> None:
    """The server and nobody else; its workers notice."""
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def durable_tokens(server: RunningServer, session_id: str) -> int:
    """How many tokens of this conversation the store has acknowledged: they survive anything."""
    query = {"conversation": session_id}
    answer = server.request("GET", "/admin/cache/chain", params=query)
    assert answer.status_code in (200, 404), answer.text
    return answer.json()["leaves"][-1] if answer.status_code == 200 else 0


def wait_until_durable(
    server: RunningServer, session_id: str, num_tokens: int, timeout_s: float = 20.0
) -> int:
    """Wait until the store has acknowledged so many tokens of this conversation; how many then."""
    deadline_s = time.monotonic() + timeout_s
    while (num_durable := durable_tokens(server, session_id)) < num_tokens:
        assert time.monotonic() < deadline_s, f"{num_durable} of {num_tokens} tokens are saved"
    return num_durable


def stored_tokens(server: RunningServer) -> int:
    """Tokens whose KV is on disk, each slot counted once."""
    stats = server.get("/admin/cache/stats").json()
    return sum(tier["num_tokens"] for tier in stats["tiers"])


def check_store(root: Path, cold: Path | None = None, *, counts_bytes: bool = False) -> int:
    """Nobody has the store open: index and disk agree, every byte is as written; slots there are.

    A first recovery may have work left by a kill, a second one has none. With `counts_bytes` the
    own and shared bytes of all conversations are those on disk.
    """
    store = open_store(root, str(cold) if cold else None)
    try:
        _recover(store)
        assert not _recover(store), "a second recovery found work"
        rows = {row.header.id: row for row in store.index.all_slots()}
        paths = {path.stem: path for path in upkeep.slot_files(root)}
        packed = {one.id: one.num_bytes for one in store.cold.slots()} if store.cold else {}
        assert sorted(rows) == sorted([*paths, *packed])
        for name, row in rows.items():
            assert row.parent is None or row.parent in rows
            if row.tier == "cold":
                assert row.disk_bytes == packed[name]
                continue
            assert verify(slot_path(root, name)).header == read_header(paths[name]) == row.header
            assert row.disk_bytes == disk_bytes(paths[name])
        assert not store.index.condemned()
        for directory in (root, cold or root):
            assert not list(directory.rglob(".tmp-*"))
            _check_modes(directory)
        assert store.database.check()
        if counts_bytes:
            check_bytes_add_up(store)
        return len(rows)
    finally:
        store.close()


def check_bytes_add_up(store: OpenStore) -> None:
    """Each slot is somebody's, and own bytes are those of slots that nobody else has."""
    views = Inventory(store).conversations()
    disk = {row.header.id: row.disk_bytes for row in store.index.all_slots()}
    held = [_slots_of(store, view) for view in views]
    uses = Counter(one for slots in held for one in slots)
    assert set(uses) == set(disk), "somebody has each slot"
    for view, slots in zip(views, held, strict=True):
        assert view.disk_bytes == sum(disk[one] for one in slots)
        assert view.own_bytes == sum(disk[one] for one in slots if uses[one] == 1)


def _slots_of(store: OpenStore, view: ConversationView) -> set[str]:
    """What a conversation is part of; of a chain without a name, what its last slot needs."""
    if view.is_named:
        with store.database.reading() as connection:
            return set(connection.exec_driver_sql(MEMBERS, (view.id,)).scalars())
    parents = {row.header.id: row.parent for row in store.index.all_slots()}
    found, one = set[str](), view.id
    while one is not None:
        found.add(one)
        one = parents[one]
    return found


def _recover(store: OpenStore) -> bool:
    recovery = Recovery(store.root, store.database, store.cold, time.time())
    return recovery.run().has_changed


def _check_modes(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def sql_dump(root: Path) -> str:
    with sqlite3.connect(f"file:{root}/index.db?mode=ro", uri=True) as connection:
        return "\n".join(connection.iterdump())


def slot_names(root: Path) -> set[str]:
    """The slots that the index has."""
    with sqlite3.connect(f"file:{root}/index.db?mode=ro", uri=True) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM slots")}


def cache_of(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["hearth"]["cache"]
