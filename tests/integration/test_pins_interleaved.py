"""What somebody pinned stays, what he deleted does not, and nobody else's is pinned with it: random
turns, rewrites, branches, pins, deletions, expiry, eviction and restarts, beside a plain record.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from runtime.cache import tending
from runtime.cache.kept import pinned, pinned_ahead, unpinned
from runtime.cache.opened import BlockStore, Terms, open_blocks
from runtime.errors import UnknownConversation
from store.clock import Instant
from store.head_file import Head, KnownHead, Owner, write_head
from store.heads import Published
from store.keyed_names import Whom, conversation_key, keyed_hash
from store.kv_file import Tensor
from store.room import Limits
from store.slots import BlockKey, SlotAbout

BLOCK, MODEL, TTL_S = 16, b"m" * 16, 100.0
SESSIONS = ["one", "two", "three", "four"]
ROOMY, TIGHT = 1 << 40, 200_000
NUM_STEPS = 120


class Play:
    """The store, and what of each session its owner would say: its last tokens, and if pinned."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.seconds = 1e9
        self.said: dict[str, list[int]] = {}
        self.ends: dict[str, KnownHead] = {}
        self.pinned: set[str] = set()
        self.store = self.opened()

    def opened(self) -> BlockStore:
        read = lambda: Instant(self.seconds, self.seconds, "boot")  # noqa: E731
        return open_blocks(self.root, Terms(BLOCK, None, Limits(ROOMY)), b"s" * 32, read)

    # What its owner does

    def say(self, session: str, token_ids: list[int], before: KnownHead | None) -> None:
        store = self.store
        self.seconds += 1.0
        for number, name in enumerate(store.chain_of(MODEL).block_hashes(token_ids)):
            ids = token_ids[number * BLOCK : (number + 1) * BLOCK]
            store.slots.put(SlotAbout(MODEL, name), ids, [Tensor("kv", "U8", (64,), bytes(64))])
        key = conversation_key(store.secret, session)
        head = Head(
            id=uuid4().hex,
            model=MODEL,
            owner=Owner(keyed_hash(store.secret, "model", b"m"), key, b""),
            num_tokens=len(token_ids),
            name="m",
            continues=before.end if before else b"",
            ttl_s=TTL_S,
        )
        staged = store.heads.staging_path()
        write_head(staged, head, token_ids)
        published = store.heads.publish(staged, store.heads.number)
        assert isinstance(published, Published)
        self.said[session], self.ends[session] = token_ids, published.known

    def go_on(self, session: str) -> None:
        before, known = self.said.get(session, []), self.ends.get(session)
        is_there = known is not None and known.head.id in self.store.heads.known
        new = [self.random.randrange(400) for _ in range(self.random.randrange(1, 60))]
        self.say(session, [*before, *new], known if is_there else None)

    def rewrite(self, session: str) -> None:
        said = self.said.get(session, [])
        kept = said[: self.random.randrange(len(said) + 1)]
        self.say(session, [*kept, *(self.random.randrange(400) for _ in range(40))], None)

    def pin(self, session: str) -> None:
        pinned_ahead(self.store, tending.inventory_of(self.store), session, MODEL, "m")
        self.pinned.add(session)

    def pin_what_is_there(self, session: str) -> None:
        if self.is_there(session):
            pinned(self.store, tending.inventory_of(self.store), session)
            self.pinned.add(session)

    def unpin(self, session: str) -> None:
        is_known = session in self.pinned or self.is_there(session)
        try:
            unpinned(self.store, tending.inventory_of(self.store), session)
            assert is_known
        except UnknownConversation:
            assert session not in self.pinned
        self.pinned.discard(session)

    def delete(self, session: str) -> None:
        key = conversation_key(self.store.secret, session)
        tending.delete(self.store, Whom(key=key), None)
        self.forget(session)

    def branch(self, session: str) -> None:
        copy = self.random.choice(SESSIONS)
        if copy == session or not self.is_there(session) or self.is_there(copy):
            return
        end = self.random.randrange(1, len(self.said[session]) + 1)
        tending.branch(self.store, tending.inventory_of(self.store), session, copy, {"m": end})
        key = conversation_key(self.store.secret, copy)
        known = [one for one in self.store.heads.known.values() if one.head.owner.session == key]
        self.said[copy] = self.said[session][:end]
        self.ends[copy] = max(known, key=lambda one: one.head.num_tokens)

    def is_there(self, session: str) -> bool:
        key = conversation_key(self.store.secret, session)
        known = self.store.heads.known.values()
        return any(one.head.owner.session == key and one.head.num_tokens for one in known)

    def forget(self, session: str) -> None:
        self.said.pop(session, None)
        self.ends.pop(session, None)
        self.pinned.discard(session)

    # What happens to it

    def restart(self, _: str) -> None:
        self.store.close()
        self.store = self.opened()

    def expire(self, _: str) -> None:
        self.seconds += self.random.choice([1.0, TTL_S / 2, TTL_S * 2])
        self.store.heads.expire()
        self.forget_what_is_over()

    def forget_what_is_over(self) -> None:
        for session in SESSIONS:
            if session not in self.pinned and not self.is_there(session):
                self.said.pop(session, None)
                self.ends.pop(session, None)

    def evict(self, _: str) -> None:
        self.store.room._limits = Limits(TIGHT)
        self.store.room.keep()
        self.store.room._limits = Limits(ROOMY)
        self.forget_what_is_over()

    def slots_that_stay(self) -> set[BlockKey]:
        """Those of what is pinned now."""
        said = [self.said[one] for one in self.pinned if one in self.said]
        names = [name for one in said for name in self.store.chain_of(MODEL).block_hashes(one)]
        return {BlockKey(MODEL, one) for one in names if self.store.slots.has(BlockKey(MODEL, one))}

    # What he would be hurt by

    def check(self) -> None:
        store = self.store
        for session in SESSIONS:
            key = conversation_key(store.secret, session)
            mine = [one for one in store.heads.known.values() if one.head.owner.session == key]
            said = self.said.get(session)
            if session not in self.pinned:
                assert not any(one.head.pins for one in mine), "nobody pinned this"
            elif said is None:
                assert any(one.head.pins for one in mine), "it is to stay once it comes"
            else:
                (held,) = [one for one in mine if one.head.pins]
                assert [*store.heads.read(held.head.id).token_ids] == said, "what it became stays"
            if said is None:
                assert not any(one.head.num_tokens for one in mine), "it is gone for good"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_pinned_stays_and_nothing_else_does(tmp_path: Path, seed: int):
    play = Play(tmp_path / "kv", seed)
    happens = [play.restart, play.expire, play.evict]
    steps: list[Callable[[str], None]] = [
        *(play.go_on, play.go_on, play.rewrite, play.pin, play.pin_what_is_there, play.unpin),
        *(play.delete, play.branch, *happens),
    ]
    try:
        for _ in range(NUM_STEPS):
            step, stay = play.random.choice(steps), play.slots_that_stay()
            step(play.random.choice(SESSIONS))
            play.check()
            if step in happens:
                assert all(map(play.store.slots.has, stay)), "what is pinned stays on disk"
    finally:
        play.store.close()
