"""Names that share slots, deleted in any order: what the others said stays, and nothing else."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from runtime.cache.compaction import compact
from runtime.cache.inventory import Inventory
from runtime.cache.owned import Merged, OpenStore
from runtime.cache.store_opening import open_store
from runtime.slot_events import SlotStaged, TurnEnded
from store.block_names import HashChain
from store.keyed_names import Asker
from store.slots import read_token_ids, slot_path, stage, verify
from store.types import SlotHeader, TensorData
from store.upkeep import slot_files

MODEL = b"m" * 32
BLOCK = 16
NAMES = ("coder", "chatty", "third")
LAYOUT = '{"layout":{"kinds":[]},"num_slices":1,"skeleton":null}'


@dataclass
class Talk:
    """One conversation: who asks, all it said."""

    asker: Asker
    tokens: list[int]


@dataclass
class World:
    """A store, and what must be in it. Every token that is new is one that nobody said before."""

    store: OpenStore
    rng: random.Random
    talks: list[Talk] = field(default_factory=list[Talk])
    deleted: set[int] = field(default_factory=set[int])
    fresh: Iterator[int] = field(default_factory=lambda: count(1))
    sessions: Iterator[int] = field(default_factory=count)

    @property
    def inventory(self) -> Inventory:
        return Inventory(self.store)

    def say(self) -> None:
        """Begin a conversation, anew or in the midst of another one, or go on with one."""
        name = self.rng.choice(NAMES)
        mine = [talk for talk in self.talks if talk.asker.model == name]
        if mine and self.rng.random() < 0.4:
            talk = self.rng.choice(mine)
        else:
            session = f"s{next(self.sessions)}" if self.rng.random() < 0.6 else None
            begun = self.rng.choice(self.talks).tokens if self.talks else []
            is_same = bool(begun) and self.rng.random() < 0.2
            cut = len(begun) if is_same else self.rng.randint(0, len(begun))
            talk = Talk(Asker(name, session), begun[:cut])
            self.talks.append(talk)
            if is_same:
                return self.keep(talk)
        talk.tokens += [next(self.fresh) for _ in range(self.rng.randint(1, 3 * BLOCK))]
        return self.keep(talk)

    def keep(self, talk: Talk) -> None:
        """As a worker does: what is not known yet becomes a slot."""
        leaf, num_known = self.known(talk.tokens)
        if num_known == len(talk.tokens):
            assert leaf is not None
            ended = TurnEnded(asker=talk.asker, slot_id=leaf.id, num_tokens=num_known, ttl_s=None)
            self.store.end_turn(MODEL, ended)
            return
        self.publish(talk, leaf, num_known)

    def publish(self, talk: Talk, parent: SlotHeader | None, start: int) -> None:
        tokens, end = talk.tokens[start:], len(talk.tokens)
        chain = HashChain(self.store.secret, MODEL, block_size=BLOCK)
        hashes = chain.block_hashes(talk.tokens)
        last = hashes[-1] if hashes else chain.root
        begun = start - start % BLOCK
        before = hashes[begun // BLOCK - 1] if begun else chain.root
        header = SlotHeader(
            id=f"{self.rng.getrandbits(128):032x}",
            model=MODEL,
            start_hash=chain.end_hash(before, talk.tokens[begun:start]) if start else b"",
            start=start,
            end=end,
            block_size=BLOCK,
            block_hashes=tuple(hashes[start // BLOCK :]),
            end_hash=chain.end_hash(last, talk.tokens[end - end % BLOCK :]),
            layout=LAYOUT,
            has_state=False,
            recompute_ms=1.0,
            created_s=1.0,
        )
        data = array("I", tokens)
        tensor = TensorData("kv.0", "U32", (len(tokens), 1), memoryview(data).cast("B"))
        staged = stage(self.store.root, header, data, [tensor])
        told = SlotStaged(
            header,
            str(staged.path),
            staged.num_bytes,
            talk.asker,
            ends_turn=True,
            parent=parent.id if parent is not None else None,
        )
        outcome = self.store.publish([told])
        assert [row.header.id for row in outcome.saved] == [header.id]

    def known(self, tokens: list[int]) -> tuple[SlotHeader | None, int]:
        """The last slot on the way of these tokens, and how many of them are on disk."""
        rows = self.store.index.slots_of(MODEL)
        slots, parents = [row.header for row in rows], {row.header.id: row.parent for row in rows}
        said = {one.id: read_token_ids(slot_path(self.store.root, one.id)) for one in slots}
        leaf: SlotHeader | None = None
        position = 0
        while True:
            best, num_best = None, 0
            for one in slots:
                if parents[one.id] != (leaf.id if leaf else None) or one.start != position:
                    continue
                if (num := common(said[one.id], tokens[position:])) > num_best:
                    best, num_best = one, num
            if best is None:
                return leaf, position
            # It may be left earlier, where something that says more hangs on it.
            forks = {one.start for one in slots if parents[one.id] == best.id}
            deepest = position + num_best
            leaf = best
            further = [at for at in forks if position < at <= deepest]
            position = deepest
            for at in sorted(further, reverse=True):
                if any(
                    parents[one.id] == best.id
                    and one.start == at
                    and at + common(said[one.id], tokens[at:]) > position
                    for one in slots
                ):
                    position = at
                    break

    def delete(self) -> None:
        """A name, a conversation, or a chain without a session id."""
        if self.rng.random() < 0.4 or not self.talks:
            name = self.rng.choice(NAMES)
            gone = [talk for talk in self.talks if talk.asker.model == name]
            self.inventory.remove_name(name)
        else:
            session = self.rng.choice(self.talks).asker.session_id
            gone = [talk for talk in self.talks if talk.asker.session_id == session]
            if session is None:
                return
            self.inventory.remove_conversation(session)
        self.talks = [talk for talk in self.talks if talk not in gone]
        left = {token for talk in self.talks for token in talk.tokens}
        self.deleted |= {token for talk in gone for token in talk.tokens} - left

    def check(self) -> None:
        """All that is left is there, listed by its name; of what was deleted not one token is."""
        for talk in self.talks:
            assert self.known(talk.tokens)[1] == len(talk.tokens), talk
        views = self.inventory.conversations()
        listed = sorted((view.model, view.id) for view in views if view.is_named)
        key = self.store.conversation_key
        named = [talk.asker for talk in self.talks if talk.asker.session_id is not None]
        assert listed == sorted((one.model, key(one.session_id or "").hex()) for one in named)
        assert {view.model for view in views} == {talk.asker.model for talk in self.talks}
        rows = {row.header.id: row.header for row in self.store.index.all_slots()}
        for path in slot_files(self.store.root):
            slot = verify(path)
            assert slot.header == rows[path.stem], "an index that is made anew is another one"
            assert not self.deleted & set(slot.token_ids)
            assert not self.deleted & set(array("I", path.read_bytes()[-4 * len(slot.token_ids) :]))
        assert rows.keys() == {path.stem for path in slot_files(self.store.root)}
        assert not self.store.index.to_cut()


def common(one: array[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_what_one_name_is_deleted_of_no_other_name_misses(tmp_path: Path):
    cuts = [cuts_of(tmp_path / str(seed), random.Random(seed)) for seed in range(3)]
    assert sum(cuts) > 1, "or nobody went off in the midst of what was deleted"


def cuts_of(root: Path, rng: random.Random) -> int:
    """Say and delete in any order; how often the end of a slot was cut off."""
    store = open_store(root, None)
    world = World(store, rng)
    try:
        for _ in range(25):
            if rng.random() < 0.75:
                world.say()
            else:
                world.delete()
                world.check()
            if rng.random() < 0.1:
                assert all(isinstance(one, Merged) for one in compact(store, set, lambda: False))
        world.check()
        world.inventory.remove_name("coder")
        world.talks = [talk for talk in world.talks if talk.asker.model != "coder"]
        world.check()
        return store.counts["cut"]
    finally:
        store.close()
