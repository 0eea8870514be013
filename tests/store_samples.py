"""Conversations in a store whose every byte can be computed again, and databases as it has them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from migrations.run import upgrade
from runtime.cache.opened import BlockStore
from store.database import Database
from store.errors import SlotDamaged, SlotMissing
from store.head_file import Head, KnownHead, Owner, read_end, write_head
from store.heads import Published
from store.index import Change
from store.kv_file import Tensor
from store.opening import open_database
from store.slots import BlockKey, SlotAbout
from store.tree import Block, Sizes
from tests import slot_samples
from tests.slot_samples import MODEL

NOW_S = 1_800_000_000.0


@contextmanager
def opened(root: Path, **options: Any) -> Generator[Database]:
    database = open_database(root / "index.db", upgrade, **options)
    try:
        yield database
    finally:
        database.close()


def rows(number: int, num_blocks: int = 2) -> Change:
    """A head and the blocks that it goes through, as the index has them."""
    names = [number.to_bytes(12, "big") + at.to_bytes(4, "big") for at in range(num_blocks)]
    keys = [BlockKey(MODEL, name) for name in names]
    blocks = [
        (key, Block(keys[at - 1] if at else None, 100.0, Sizes(4096)))
        for at, key in enumerate(keys)
    ]
    head = Head(slot_samples.slot_id(number), MODEL, Owner(b"a", b"s", b""), 512 * num_blocks)
    known = KnownHead(head, keys[-1], names[-1], None, (), 4096, 0, NOW_S, NOW_S)
    return Change([known], blocks)


class _Said(NamedTuple):
    number: int
    num_tokens: int
    model: bytes = MODEL
    has_state: bool = False


class Said(_Said):
    """A conversation that nobody else says a part of; a model that `has_state` has states at the
    ends of blocks.
    """

    @cached_property
    def token_ids(self) -> list[int]:
        return slot_samples.token_ids(self.number, self.num_tokens)

    @property
    def session(self) -> bytes:
        return blake2b(self.number.to_bytes(8), digest_size=16).digest()

    def keys(self, store: BlockStore) -> list[BlockKey]:
        names = store.chain_of(self.model).block_hashes(self.token_ids)
        return [BlockKey(self.model, name) for name in names]

    def tensors(self, start: int, end: int) -> list[Tensor]:
        """What is kept of these tokens."""
        ids = list(enumerate(self.token_ids[start:end], start))
        return [_tensor(f"kv.{n}", [(n, at, one) for at, one in ids]) for n in range(2) if ids]

    def states(self, end: int) -> list[Tensor]:
        """What a model that has states has there."""
        return [_tensor("state", [(7, end, self.token_ids[end - 1])])]


def _tensor(name: str, places: list[tuple[int, int, int]]) -> Tensor:
    data = b"".join(slot_samples.row(*place) for place in places)
    return Tensor(name, "U8", (len(places), slot_samples.ROW_BYTES), data)


def say(store: BlockStore, said: Said, ttl_s: float | None = None) -> KnownHead:
    """Have it in a store, as a worker and the server do it when a turn ends and nobody goes on."""
    keys, size = said.keys(store), store.block_size
    for start, key in zip(range(0, said.num_tokens, size), keys, strict=False):
        about, end = SlotAbout(*key, "{}", 10.0), start + size
        store.slots.put(about, said.token_ids[start:end], said.tensors(start, end))
        if said.has_state:
            store.slots.put_state(about, said.states(end))
    store.slots.sync([said.model])
    owner = Owner(b"a" * 16, said.session, b"")
    head = Head(uuid4().hex, said.model, owner, said.num_tokens, ttl_s=ttl_s, layout="{}")
    staged = store.heads.staging_path()
    write_head(staged, head, said.token_ids, said.tensors(len(keys) * size, said.num_tokens))
    published = store.heads.publish(staged, store.heads.number)
    assert isinstance(published, Published)
    assert not published.lacking
    return published.known


def head_of(store: BlockStore, said: Said) -> KnownHead | None:
    known = store.heads.known.values()
    return next((one for one in known if one.head.owner.session == said.session), None)


def held(store: BlockStore, said: Said) -> set[int]:
    """Which of its tokens are to be had, after a look at every byte of them."""
    found, size = set[int](), store.block_size
    keys = said.keys(store)
    for number, key in enumerate(keys):
        start, end = number * size, (number + 1) * size
        slot = store.slots.read(key, said.token_ids[start:end])
        if slot is not None:
            assert _plain(slot.tensors) == _plain(said.tensors(start, end))
        state = store.slots.read_state(key)
        if state is not None:
            assert _plain(state.tensors) == _plain(said.states(end))
        if slot is not None or _is_cold(store, key):
            found |= {*range(start, end)}
    if (known := head_of(store, said)) is not None and known.path is not None:
        start = len(keys) * size
        assert _plain(read_end(known.path)) == _plain(said.tensors(start, said.num_tokens))
        found |= {*range(start, said.num_tokens)}
    return found


def _is_cold(store: BlockStore, key: BlockKey) -> bool:
    try:
        return store.cold is not None and store.read_cold(key, is_state=False) > 0
    except (SlotDamaged, SlotMissing):
        return False


def _plain(tensors: list[Tensor]) -> list[tuple[object, ...]]:
    return [(*one[:3], bytes(one.data)) for one in tensors]
