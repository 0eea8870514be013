"""Names that share blocks, deleted in any order: what the others said stays, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from uuid import uuid4

from runtime.cache.opened import BlockStore
from runtime.cache.tending import delete, delete_head, inventory_of
from store.head_file import Head, KnownHead, Owner, write_head
from store.heads import Published
from store.keyed_names import Whom, conversation_key, keyed_hash
from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout
from tests.crash.damage import tokens_of
from tests.crash.server_store import check_store, store_at
from tests.slot_samples import MODEL

BLOCK = 16
NAMES = ("coder", "chatty", "third")


@dataclass
class Talk:
    """One conversation: by which name it is asked, its session id if it has one, all it said."""

    name: str
    session: str | None
    tokens: list[int]
    known: KnownHead | None = None


@dataclass
class World:
    """A store, and what must be in it. Every token that is new is one that nobody said before."""

    store: BlockStore
    rng: random.Random
    talks: list[Talk] = field(default_factory=list[Talk])
    deleted: set[int] = field(default_factory=set[int])
    fresh: Iterator[int] = field(default_factory=lambda: count(1))

    def say(self) -> None:
        """Begin a conversation, anew or in the midst of another one, or go on with one."""
        name = self.rng.choice(NAMES)
        mine = [talk for talk in self.talks if talk.name == name]
        if mine and self.rng.random() < 0.4:
            talk = self.rng.choice(mine)
        else:
            session = uuid4().hex if self.rng.random() < 0.6 else None
            begun = self.rng.choice(self.talks).tokens if self.talks else []
            talk = Talk(name, session, begun[: self.rng.randint(0, len(begun))])
            self.talks.append(talk)
        talk.tokens += [next(self.fresh) for _ in range(self.rng.randint(1, 3 * BLOCK))]
        self.keep(talk)

    def keep(self, talk: Talk) -> None:
        """As a worker does."""
        store, secret = self.store, self.store.secret
        keys = self.keys_of(talk)
        for at, key in enumerate(keys):
            kv = Tensor("kv.0", "U8", (BLOCK,), bytes(BLOCK))
            store.slots.put(SlotAbout(*key), talk.tokens[at * BLOCK : (at + 1) * BLOCK], [kv])
        session = conversation_key(secret, talk.session) if talk.session else b""
        owner = Owner(keyed_hash(secret, "model", talk.name.encode()), session, b"")
        continues = talk.known.end if talk.known else b""
        head = Head(uuid4().hex, MODEL, owner, len(talk.tokens), talk.name, continues)
        staged = store.heads.staging_path()
        write_head(staged, head, talk.tokens)
        published = store.heads.publish(staged, store.heads.number)
        assert isinstance(published, Published)
        talk.known = published.known

    def keys_of(self, talk: Talk) -> list[BlockKey]:
        names = self.store.chain_of(MODEL).block_hashes(talk.tokens)
        return [BlockKey(MODEL, name) for name in names]

    def delete(self) -> None:
        """A name, a conversation, or one without a session id."""
        if not self.talks or self.rng.random() < 0.3:
            name = self.rng.choice(NAMES)
            gone = [talk for talk in self.talks if talk.name == name]
            delete(self.store, Whom(model=name), None)
        else:
            talk = self.rng.choice(self.talks)
            gone = [talk]
            if talk.session is not None:
                delete(self.store, Whom(session_id=talk.session), None)
            else:
                assert talk.known is not None
                delete_head(self.store, talk.known.head.id)
        self.talks = [talk for talk in self.talks if talk not in gone]
        left = {token for talk in self.talks for token in talk.tokens}
        self.deleted |= {token for talk in gone for token in talk.tokens} - left

    def check(self) -> None:
        """All that is left is there, listed by its name; of what was deleted not one token is."""
        for talk in self.talks:
            assert talk.known is not None
            assert [*self.store.heads.read(talk.known.head.id).token_ids] == talk.tokens
            for at, key in enumerate(self.keys_of(talk)):
                ids = talk.tokens[at * BLOCK : (at + 1) * BLOCK]
                assert self.store.slots.read(key, ids) is not None
        inventory = inventory_of(self.store)
        listed = [inventory.view(one) for one in inventory.conversations()]
        assert sorted(one.model for one in listed) == sorted(talk.name for talk in self.talks)
        for path in self.store.root.glob("*/**/*.safetensors"):
            assert not self.deleted & {*tokens_of(path)}


def test_what_one_name_is_deleted_of_no_other_name_misses(tmp_path: Path):
    for seed in range(4):
        rng, root = random.Random(seed), tmp_path / str(seed)
        store = store_at(root, block_size=BLOCK)
        world = World(store, rng)
        for _ in range(30):
            if rng.random() < 0.75:
                world.say()
            else:
                world.delete()
                world.check()
        world.check()
        store.close()
        assert world.deleted
        check_store(root, block_size=BLOCK)
