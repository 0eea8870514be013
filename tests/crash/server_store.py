"""What has to hold of a server's store whatever happened to the server."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

from runtime.cache.opened import BlockStore, Terms, open_blocks
from runtime.cache.tending import inventory_of
from runtime.cache.verification import StoredFile, files_of, verify
from store.block_names import BLOCK_TOKENS
from store.cold_blocks import cold_id
from store.room import Limits
from store.slots import BlockKey
from tests.running_server import RunningServer


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
    """Tokens whose KV is in slots, each slot counted once."""
    stats = server.get("/admin/cache/stats").json()
    return sum(tier["num_tokens"] for tier in stats["tiers"])


def store_at(root: Path, cold: Path | None = None, block_size: int = BLOCK_TOKENS) -> BlockStore:
    """A store that nobody has open, without a cap that it would reach."""
    return open_blocks(root, Terms(block_size, str(cold) if cold else None, Limits(1 << 50)))


def check_store(root: Path, cold: Path | None = None, block_size: int = BLOCK_TOKENS) -> int:
    """Nobody has the store open: index and disk agree, and so do the sums that people are shown;
    every byte is as written, of the tokens that its heads say; how many files there are.

    A first start may have work left by a kill, a second one has none.
    """
    store = store_at(root, cold, block_size)
    if store.cold is not None:
        store.finish_cold()
        store.cold.sweep()
    store.close()
    before = _files_of(root)
    store = store_at(root, cold, block_size)
    try:
        assert _files_of(root) == before, "a second start found work"
        blocks, found = store.heads.kept.blocks, store.slots.found()
        assert {key: block.sizes[:2] for key, block in blocks.items() if block.sizes.warm} == found
        assert not store.heads.left_cold
        unread = _check_cold(store)
        _check_tokens(store)
        for file in files_of(store):
            assert file in unread or verify(store, file).found == "whole", file
        _check_bytes_add_up(store)
        for directory in (root, cold or root):
            assert not list(directory.rglob(".tmp-*"))
            _check_modes(directory)
        assert store.database.check()
        return len(before)
    finally:
        store.close()


def _files_of(root: Path) -> dict[Path, int]:
    """Heads and slots, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in root.glob("*/**/*.safetensors")}


def _check_cold(store: BlockStore) -> set[StoredFile]:
    """The index knows each file there; those that are missing are still here: rows come first."""
    there = {one.id for one in store.cold.slots()} if store.cold is not None else set[str]()
    missing: set[StoredFile] = set()
    for file in files_of(store):
        if file.key is None or file.kind not in ("cold_slot", "cold_state"):
            continue
        is_state = file.kind == "cold_state"
        if (name := cold_id(file.key, is_state=is_state)) in there:
            there.remove(name)
        else:
            missing.add(file)
            sizes = store.heads.kept.blocks[file.key].sizes
            assert sizes.state if is_state else sizes.slot
    assert not there
    return missing


def _check_tokens(store: BlockStore) -> None:
    """Each head goes through the blocks of its own tokens, and the slots there are have these."""
    size, used = store.block_size, set[BlockKey]()
    for known in list(store.heads.known.values()):
        head, token_ids, _ = store.heads.read(known.head.id)
        names = store.chain_of(head.model).block_hashes(token_ids, root=head.owner.root)
        keys = [BlockKey(head.model, name) for name in names]
        assert [*store.heads.kept.chain(known.last)][::-1] == keys
        used |= {*keys}
        for number, key in enumerate(keys):
            if store.slots.has(key):
                ids = token_ids[number * size : (number + 1) * size]
                assert store.slots.read(key, ids) is not None, key
    assert used == store.heads.kept.blocks.keys(), "somebody has each block"


def _check_bytes_add_up(store: BlockStore) -> None:
    """Own bytes are those of heads, and of blocks that nobody else goes through."""
    inventory, blocks = inventory_of(store), store.heads.kept.blocks
    conversations = inventory.conversations()
    held = [
        {key for known in one.heads for key in store.heads.kept.chain(known.last)}
        for one in conversations
    ]
    uses = Counter(key for keys in held for key in keys)
    for one, keys in zip(conversations, held, strict=True):
        view, sizes = inventory.view(one), {key: blocks[key].sizes for key in keys}
        head_bytes = sum(known.num_bytes for known in one.heads)
        assert view.disk_bytes == head_bytes + sum(s.warm + s.cold for s in sizes.values())
        own_bytes = sum(one.warm for key, one in sizes.items() if uses[key] == 1)
        assert view.own_bytes == head_bytes + own_bytes


def _check_modes(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def sql_dump(root: Path) -> str:
    with sqlite3.connect(f"file:{root}/index.db?mode=ro", uri=True) as connection:
        return "\n".join(connection.iterdump())
