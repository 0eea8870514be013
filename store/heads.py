"""Heads, and through them which slots stay. One process has them: the server.

A worker stages a head when a turn ends; here it is published or turned away, in one rename. What is
not to be on disk is told with its tokens instead, and kept in memory until the server ends. A
deletion removes heads, then the slots that no head goes through, and gives their names, which
workers are told to drop. It has a number: a head whose request came before it, and which is of what
was deleted, is turned away when it comes. Without a session id a head is of a deleted one if it
shares more with that than that shared with any other.

The file of a head is `MODEL/BLOCK/ID.safetensors`, where BLOCK is the name of its last whole block:
who has found that block finds the heads that end behind it in one folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar
from uuid import uuid4

import msgspec

from store.block_names import HashChain, num_common
from store.disk import disk_bytes, make_directory, reported, sync_directories
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreFailed, StoreFull
from store.head_file import (
    KEPT,
    Head,
    HeadFile,
    KnownHead,
    Owner,
    bare_bytes,
    head_folder,
    read_end,
    read_head,
    write_head,
)
from store.index import Change, Index
from store.slots import BlockKey, Slots, nothing
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, temp_name
from store.tree import NO_BLOCK, Block, Sizes, Tree
from store.turns import DIGEST_BYTES, cut, digests_of, num_turns
from store.types import decayed_hits

P = ParamSpec("P")
T = TypeVar("T")


class Whom(NamedTuple):
    """Which heads are meant: those of a session, of a model's name, of these model hashes, of what
    of that is given, or all.
    """

    asked: bytes | None = None
    session: bytes | None = None
    models: Collection[bytes] | None = None

    def means(self, head: Head) -> bool:
        """Whether this head is meant."""
        is_asked = self.asked is None or head.owner.asked == self.asked
        is_of_model = self.models is None or head.model in self.models
        is_of_session = self.session is None or head.owner.session == self.session
        return is_asked and is_of_model and is_of_session


class Deletion(NamedTuple):
    """What was deleted: `whom`, or a head of `owner` that has no session, by its tokens, of which
    others have the first `num_shared` as well.
    """

    number: int
    whom: Whom | None
    owner: Owner = Owner(b"", b"", b"")
    token_ids: Sequence[int] = ()
    num_shared: int = 0

    def means(self, head: Head, token_ids: Sequence[int]) -> bool:
        """Whether this head is of what was deleted."""
        if self.whom is not None:
            return self.whom.means(head)
        return head.owner == self.owner and num_common(self.token_ids, token_ids) > self.num_shared


class BlockFile(NamedTuple):
    """The states at a block's end, and its slot as well if `is_slot`."""

    key: BlockKey
    is_slot: bool = True


class EndFile(NamedTuple):
    """What the file of a head has behind its last whole block."""

    head_id: str


class TurnedAway(NamedTuple):
    """A head that was deleted while it was on its way; what of it nobody else has."""

    head: Head
    gone: list[BlockKey]


class Published(NamedTuple):
    """A head that is there from now on, and those of its blocks of which there is no slot: others
    went while it was on its way, and with them what nobody else owned yet. Who has them writes them
    again, and says so by `Heads.note`. So many of its slots were not known to be there.
    """

    known: KnownHead
    lacking: tuple[BlockKey, ...]
    num_new_slots: int = 0


def _alone(
    method: Callable[Concatenate[Heads, P], T],
) -> Callable[Concatenate[Heads, P], T]:
    @wraps(method)
    def locked(self: Heads, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Heads:
    """All heads below `folder`, those in memory, and the blocks that they go through.

    Without a `folder` and an `index` all are in memory. `chain_of` gives the names of a model's
    blocks, and `now_s` trusted time. For any thread: each call has it alone.
    """

    def __init__(
        self,
        folder: Path | None,
        slots: Slots,
        chain_of: Callable[[bytes], HashChain],
        now_s: Callable[[], float],
        index: Index | None = None,
        before_change: Callable[[], None] = nothing,
    ) -> None:
        self.lock = RLock()
        self.slots = slots
        self.now_s = now_s
        self.known: dict[str, KnownHead] = {}
        self.kept = Tree()
        """The blocks that heads on disk go through; the index has a row of each."""
        self.told = Tree()
        """The blocks that heads in memory go through."""
        self.left_cold: dict[BlockKey, Block] = {}
        """Blocks without heads of which something is still to be removed from the cold store."""
        self.unowned_bytes = 0
        """What slots take that `sweep` found without a head and too young to go."""
        self.were_rows_wrong = False
        """At the start rows said something else than files: the index may be an older one."""
        self.number = 0
        """That of the last deletion."""
        self._folder = folder
        self._chain_of = chain_of
        self._index = index
        self._before_change = before_change
        self._ends: dict[Owner, dict[bytes, str]] = {}
        """The heads of each owner, by the names of their ends."""
        self._by_digest: dict[bytes, tuple[str, ...]] = {}
        """Heads with turns, by what stands for the digests of their conversations at these."""
        self._kept: dict[tuple[bytes, ...], set[str]] = {}
        """Heads of conversations that are pinned whatever they become, by conversation."""
        self._ends_in: dict[str, frozenset[BlockKey]] = {}
        """The ends within blocks that a worker may have in memory of a head, by their names."""
        self._num_with_end: Counter[BlockKey] = Counter()
        """How many heads have each of these ends."""
        self._num_on_disk: Counter[BlockKey] = Counter()
        """How many heads on disk have an end of this name, of which other ranks may have a part."""
        self._left_parts: dict[BlockKey, None] = {}
        """Ends that no head on disk has any more, and of which parts may still be removed."""
        self._left_ends: dict[BlockKey, None] = {}
        """Those that no head has any more, and of which nobody was told yet."""
        self._deletions: list[Deletion] = []
        self._leaving: dict[BlockKey, Block] = {}
        """Blocks that no head goes through any more, and whose files are still to be removed."""
        self._replaced: set[str] = set()
        """Heads that another goes on from, and whose files are still to be removed."""
        if folder is not None and index is not None:
            make_directory(folder)
            self._recover(folder, index)

    # Turns

    def staging_path(self) -> Path:
        """Where a head is made before it is published. Raises StoreFailed without a disk."""
        return self._on_disk() / temp_name(uuid4().hex)

    @_alone
    def publish(
        self,
        staged: Path | HeadFile,
        received: int,
        ends: Iterable[int] = (),
        age_s: float = 0.0,
    ) -> Published | TurnedAway:
        """Have the head of a turn that ended `age_s` ago, unless it is of what was deleted since.

        Its request came when the last deletion had the number `received`. It replaces the heads
        of its owner that it goes on from, and one that ends where it ends, which may be this one as
        it was before the KV behind its last whole block was written; but one in memory does
        not replace one on disk, nor any one that others have pinned. The pins of who pinned what
        ends there are its own, and that of a conversation that is to stay. Told with its tokens it
        is in memory only.
        Workers have in memory what ends at the positions `ends` of it: when it leaves, the names of
        these ends leave with those of its blocks.

        Raises:
            SlotMissing, SlotDamaged: it is not as it was staged; then it is gone.
            StoreFailed, StoreFull: the system refuses; it may be published again.
        """
        path = staged if isinstance(staged, Path) else None
        file = _read_staged(staged)
        head, token_ids, _ = file
        blocks = self._blocks_of(head, token_ids)
        end_keys = self._end_keys(head, token_ids, blocks, {*ends, len(token_ids)})
        if any(one.number > received and one.means(head, token_ids) for one in self._deletions):
            self._leave_end(head, self._end_of(head, token_ids, blocks))
            return self._turn_away(path, head, blocks, end_keys)
        kept = self.kept.blocks
        new = {one for one in blocks if one not in kept}
        absent = [one for one in blocks if one in new or not kept[one].sizes.slot]
        known = self._publish(path, file, blocks, end_keys, age_s)
        if path is None:
            return Published(known, ())
        missing = [one for one in absent if not kept[one].sizes.slot]
        lacking = tuple(one for one in missing if one in new)
        return Published(known, lacking, len(absent) - len(missing))

    def _turn_away(
        self,
        path: Path | None,
        head: Head,
        blocks: Sequence[BlockKey],
        ends: frozenset[BlockKey],
    ) -> TurnedAway:
        there = (self.kept.blocks, self.told.blocks)
        gone = [one for one in blocks if not any(one in blocks for blocks in there)]
        if self._folder is not None:  # of one told with its tokens some may be written, too
            self._leave((one, Block(None)) for one in blocks)
        with suppress(StoreFull, StoreFailed):  # what stays goes with what leaves next
            if path is not None:
                with reported(path):
                    path.unlink(missing_ok=True)
            self._drop()
        ends_gone = (one for one in ends if one not in self._num_with_end)
        return TurnedAway(head, [*gone, *ends_gone])

    def _publish(
        self,
        path: Path | None,
        file: HeadFile,
        blocks: Sequence[BlockKey],
        ends: frozenset[BlockKey],
        age_s: float = 0.0,
    ) -> KnownHead:
        head, token_ids, said = file
        end, now_s = self._end_of(head, token_ids, blocks), self.now_s()
        before = self._before(head, token_ids, blocks)
        kept = self._kept_of(head, is_on_disk=path is not None)
        same = [one for one in before if one.end == end and (path or not one.path)]
        head = self._with_pins(path, file, same, kept)
        before = [one for one in before if {*one.head.pins} <= {*head.pins}]
        placed = None if path is None else self._place(path, head, blocks)
        used_s = max([now_s - age_s, *(one.last_used_s for one in before)])
        hits = [decayed_hits(one.hits, used_s - one.last_used_s) + 1 for one in before]
        if head.continues == end:  # it is only written again, with what is behind its end
            hits = [one.hits for one in same]
        known = KnownHead(
            head,
            blocks[-1] if blocks else None,
            end,
            placed,
            () if placed else token_ids,
            *self._bytes_of(placed, file._replace(head=head), end),
            min((one.created_s for one in before), default=now_s),
            used_s,
            max(hits, default=0.0),
            *self._turns_of(head, said),
        )
        ends = ends.union(*(self._ends_in.get(one.head.id, ()) for one in before))
        new = self._learn(known, blocks, ends)
        if placed:
            self._write(Change([known], self._measured(blocks, new)))
        self._replaced |= {one.head.id for one in before if placed or not one.path} - {head.id}
        with suppress(StoreFull, StoreFailed):  # they go with what is forgotten next
            self._forget(())
        for one in kept:
            self._leave_kept(one)
        return known

    def _before(
        self, head: Head, token_ids: Sequence[int], blocks: Sequence[BlockKey]
    ) -> list[KnownHead]:
        """Those of its owner that it goes on from, and that ends where it ends. It may have found
        more than these have, which others said as well.
        """
        size = self._chain_of(head.model).block_size

        def is_before(one: KnownHead) -> bool:
            num, num_blocks = one.head.num_tokens, one.head.num_tokens // size
            last = blocks[num_blocks - 1] if 0 < num_blocks <= len(blocks) else None
            is_its = one.head.model == head.model
            if not is_its or not 0 < num <= len(token_ids) or one.last != last:
                return False
            return one.end == self._end_of(head, token_ids[:num], blocks[:num_blocks])

        known = (self.known[one] for one in self._ends.get(head.owner, {}).values())
        return [one for one in known if is_before(one)]

    def _kept_of(self, head: Head, *, is_on_disk: bool) -> list[KnownHead]:
        """Those of its conversation that are pinned whatever it becomes."""
        ids = self._kept.get(_conversation_of(head), ()) if head.owner.session else ()
        found = [self.known[one] for one in ids if one != head.id]
        return [one for one in found if (one.path is not None) == is_on_disk]

    def _leave_kept(self, known: KnownHead) -> None:
        """Its conversation has become something else, which is pinned instead."""
        head = known.head
        if head.id not in self.known:
            return
        left = [one for one in head.pins if one != KEPT]
        with suppress(SlotDamaged, SlotMissing, StoreFull, StoreFailed):  # the next one tries again
            if head.num_tokens:
                self.mark(head.id, pins=left, ttl_s=head.ttl_s)
            else:
                self._forget([head.id])

    def _with_pins(
        self,
        path: Path | None,
        file: HeadFile,
        same: Sequence[KnownHead],
        kept: Sequence[KnownHead],
    ) -> Head:
        """A staged head with the pins of those that end where it ends, and of its conversation."""
        head = file.head
        pins = {*head.pins}.union(*(one.head.pins for one in same), [KEPT] if kept else [])
        if pins == {*head.pins}:
            return head
        head = msgspec.structs.replace(head, pins=tuple(sorted(pins)))
        if path is not None:
            staged = self.staging_path()
            self._before_change()
            write_head(staged, head, file.token_ids, read_end(path), file.said)
            with reported(path):
                staged.replace(path)
        return head

    @_alone
    def note(self, keys: Iterable[BlockKey]) -> None:
        """Files of these blocks came or went: count what there is now."""
        self._write(Change(blocks=self._measured([one for one in keys if one in self.kept.blocks])))

    @_alone
    def settle(self, oldest_received: int) -> None:
        """No request is open any more that came before the deletion after this one."""
        self._deletions = [one for one in self._deletions if one.number > oldest_received]

    @_alone
    def touch(self, head_id: str) -> None:
        """It was used. Raises StoreFailed."""
        known, now_s = self.known[head_id], self.now_s()
        hits = decayed_hits(known.hits, now_s - known.last_used_s) + 1
        known = self.known[head_id] = known._replace(last_used_s=now_s, hits=hits)
        if known.path is not None:
            with reported(known.path):
                os.utime(known.path)
            self._write(Change([known]))

    @_alone
    def read(self, head_id: str) -> HeadFile:
        """A head with its tokens.

        Raises:
            SlotMissing, SlotDamaged: there is nothing to be had of it; then it is gone.
            StoreFailed: the system refuses.
        """
        try:
            return _read(self.known[head_id])
        except (SlotMissing, SlotDamaged):
            self._forget([head_id])
            raise

    @_alone
    def forget(self, head_id: str) -> list[BlockKey]:
        """Have no head any more whose file is damaged, or that only keeps the pin of what is yet to
        come; the blocks that leave with it.
        """
        return self._forget([head_id])

    @_alone
    def with_turns(
        self, model: bytes, owner: Owner, digests: Iterable[bytes], limit: int
    ) -> list[Path]:
        """The files of a few heads with turns at which a conversation is called like one of
        these; the owner's own first, and those used last. Without any, the last of the owner's
        session.
        """

        def rank(known: KnownHead) -> tuple[bool, float]:
            return known.head.owner == owner, known.last_used_s

        def of(ids: Iterable[str]) -> list[KnownHead]:
            there = (self.known[one] for one in ids)
            mine = (one for one in there if one.path is not None and one.head.model == model)
            return sorted(mine, key=rank, reverse=True)

        found: dict[str, KnownHead] = {}
        for name in map(self._chain_of(model).turn_name, digests):
            for one in of(self._by_digest.get(name, ())):
                found.setdefault(one.head.id, one)
            if len(found) >= limit:
                break
        if not found and owner.session:
            found = {one.head.id: one for one in of(self._ends.get(owner, {}).values())[:1]}
        return [one.path for one in found.values() if one.path is not None][:limit]

    @_alone
    def fork(self, head_id: str, session: bytes, end: int) -> KnownHead:
        """A head of another session that has the first `end` tokens of this one.

        Raises:
            SlotMissing, SlotDamaged, StoreFailed, StoreFull: the head cannot be read, or written.
        """
        head, token_ids, said = self.read(head_id)
        copy = msgspec.structs.replace(
            head,
            id=uuid4().hex,
            owner=head.owner._replace(session=session),
            num_tokens=end,
            pins=(),
            continues=b"",
            layout=head.layout if end == head.num_tokens else "",
        )
        path, staged = self.known[head_id].path, None
        file = HeadFile(copy, token_ids[:end], cut(said, end))
        if path is not None:
            tensors = read_end(path) if end == head.num_tokens else []
            staged = self.staging_path()
            self._before_change()
            write_head(staged, copy, file.token_ids, tensors, file.said)
        return self._publish(staged, file, self._blocks_of(copy, file.token_ids), frozenset())

    @_alone
    def keep_ahead(self, model: bytes, owner: Owner, name: str) -> KnownHead:
        """Have a conversation pinned of which nothing is here yet.

        Raises:
            StoreFailed, StoreFull: the system refuses.
        """
        head = Head(id=uuid4().hex, model=model, owner=owner, num_tokens=0, name=name, pins=(KEPT,))
        staged = self.staging_path()
        self._before_change()
        write_head(staged, head, ())
        return self._publish(staged, HeadFile(head, ()), (), frozenset())

    @_alone
    def mark(self, head_id: str, *, pins: Iterable[str], ttl_s: float | None) -> KnownHead:
        """Have a head stay for whoever pinned it, or for so long after its last use.

        Raises as `fork`.
        """
        known, file = self.known[head_id], self.read(head_id)
        marked = msgspec.structs.replace(file.head, pins=tuple(sorted({*pins})), ttl_s=ttl_s)
        blocks, path = self._blocks_of(marked, file.token_ids), known.path
        if path is not None:
            staged = self.staging_path()
            self._before_change()
            write_head(staged, marked, file.token_ids, read_end(path), file.said)
            path = self._place(staged, marked, blocks)
        num_bytes, end_bytes = self._bytes_of(path, file._replace(head=marked), known.end)
        marked_head = known._replace(head=marked, num_bytes=num_bytes, end_bytes=end_bytes)
        self._learn(marked_head, blocks, self._ends_in[head_id])
        if path:
            self._write(Change([marked_head]))
        return marked_head

    # Leaving

    @_alone
    def delete(self, whom: Whom, number: int | None = None) -> list[BlockKey]:
        """Delete these heads, those that are on their way too; the blocks and ends that leave with
        them. Without a `number` the deletion has the next one.

        Raises:
            StoreFailed: not all could be deleted; who asks again is told of what left before, too.
        """
        self.number = number or self.number + 1
        self._deletions.append(Deletion(self.number, whom))
        return self._forget([i for i, one in self.known.items() if whom.means(one.head)])

    @_alone
    def delete_head(self, head_id: str, number: int | None = None) -> list[BlockKey]:
        """Delete a head that has no session, and what is on its way of its conversation."""
        self.number = number or self.number + 1
        known = self.known[head_id]
        with suppress(SlotDamaged, SlotMissing):
            owner, token_ids = known.head.owner, _read(known).token_ids
            shared = self.num_shared(head_id, token_ids)
            self._deletions.append(Deletion(self.number, None, owner, token_ids, shared))
        return self._forget([head_id])

    @_alone
    def remember(self, whom: Whom, number: int) -> None:
        """This was deleted before the store was open."""
        self.number = max(self.number, number)
        self._deletions.append(Deletion(number, whom))

    @_alone
    def leave_memory(self, model: bytes) -> None:
        """Nobody has anything of a model in memory any more: heads that were only there go."""
        told = [i for i, one in self.known.items() if one.path is None and one.head.model == model]
        self._forget(told)

    @_alone
    def expire(self, longer_s: float = 0.0) -> list[BlockKey]:
        """Remove heads that nobody used for as long as they are kept and so much longer; the blocks
        that leave. Raises StoreFailed.
        """
        return self._forget([one.head.id for one in self.idle(longer_s)])

    @_alone
    def idle(self, longer_s: float = 0.0) -> list[KnownHead]:
        """Heads that nobody used for as long as they are kept and so much longer."""
        now_s = self.now_s()
        return [
            one
            for one in self.known.values()
            if not one.head.is_pinned and one.head.ttl_s is not None
            if now_s - one.last_used_s > one.head.ttl_s + longer_s
        ]

    @property
    def ends(self) -> Collection[BlockKey]:
        """Ends of heads on disk, of which other ranks may have parts; these count as the heads."""
        return [key for key, num in self._num_on_disk.items() if num]

    def sweep(self, model: bytes, before_s: float) -> list[BlockKey]:
        """Remove slots of a model through which no head goes, and which were written before that
        time of the wall clock; these.

        A worker that ends in the middle of a turn leaves them behind. What others write may be
        without a head until their turns end.
        """
        return self.sweep_each(lambda one: before_s if one == model else 0.0)

    @_alone
    def sweep_each(self, before_s: Callable[[bytes], float]) -> list[BlockKey]:
        """The same of all models, each with a time of its own; what there is of slots is counted
        anew.
        """
        unowned = self._compare()
        gone = [one for one in unowned if self.slots.written_s(one) < before_s(one.model)]
        self.unowned_bytes = sum(unowned.values()) - sum(unowned[one] for one in gone)
        self._leave((one, Block(None)) for one in gone)
        return self._drop()

    @_alone
    def remove_files(self, files: Iterable[BlockFile]) -> None:
        """Have no files of blocks here; their names stay known. Raises StoreFailed."""
        changed: list[BlockKey] = []
        try:
            for key, is_slot in files:
                changed.append(key)
                self.slots.remove_state(key)
                if is_slot:
                    self.slots.remove(key)
        finally:
            self.note(changed)

    @_alone
    def remove_ends(self, head_ids: Iterable[str]) -> None:
        """Have nothing here that is behind the last whole blocks of these heads.

        Raises:
            StoreFailed, StoreFull: the system refuses.
        """
        for head_id in head_ids:
            known = self.known.get(head_id)
            if known is None or known.path is None:
                continue
            with suppress(SlotDamaged, SlotMissing):  # then it is gone
                _, token_ids, said = self.read(head_id)
                head, staged = msgspec.structs.replace(known.head, layout=""), self.staging_path()
                self._before_change()
                write_head(staged, head, token_ids, (), said)
                with reported(known.path):
                    used_ns = known.path.stat().st_mtime_ns  # by which readers know the last ones
                    os.utime(staged, ns=(used_ns, used_ns))
                    staged.replace(known.path)
                for key in self._parts_of(head, known.end):
                    self.slots.remove_end(key)
                sizes = self._bytes_of(known.path, HeadFile(head, token_ids, said), known.end)
                known = known._replace(head=head, num_bytes=sizes[0], end_bytes=sizes[1])
                self.known[head_id] = known
                self._write(Change([known]))

    @_alone
    def set_cold(self, key: BlockKey, sizes: Sizes, *, is_first: bool = False) -> None:
        """The files of a block in the cold store take so much. Raises as `Index.write_first`."""
        block = self.kept.blocks[key]
        cold = block.sizes._replace(cold_slot=sizes.cold_slot, cold_state=sizes.cold_state)
        if self.kept.measure(key, cold):
            self._write(Change(blocks=[(key, block)]), is_first=is_first)

    @_alone
    def set_all_cold(self, sizes: Mapping[BlockKey, Sizes]) -> None:
        """The same of all blocks, in one change. Raises as `Index.write_first`."""
        kept, changed = self.kept.blocks, list[tuple[BlockKey, Block]]()
        for key in sizes.keys() & kept.keys():
            cold = sizes[key]
            known = kept[key].sizes._replace(cold_slot=cold.cold_slot, cold_state=cold.cold_state)
            if self.kept.measure(key, known):
                changed.append((key, kept[key]))
        self._write(Change(blocks=changed), is_first=True)

    @_alone
    def removed_cold(self, key: BlockKey) -> None:
        """Nothing of a block is in the cold store any more."""
        if self.left_cold.pop(key, None) is not None:
            self._write(Change(gone_blocks=[key]))
        if key in self.kept.blocks:
            self.set_cold(key, Sizes())

    @_alone
    def num_shared(self, head_id: str, token_ids: Sequence[int]) -> int:
        """How many first tokens of a head any other of its owner has."""
        known, shared = self.known[head_id], 0
        for other in self.known.values():
            if other.head.id != known.head.id and other.head.owner == known.head.owner:
                with suppress(SlotDamaged, SlotMissing):
                    shared = max(shared, num_common(token_ids, _read(other).token_ids))
        return shared

    def _forget(self, head_ids: Iterable[str]) -> list[BlockKey]:
        """Remove heads, and what nothing else goes through. Of one that was replaced the next start
        finds that it was: it need not be gone for good at once.
        """
        ids = {*head_ids}
        places: set[Path] = set()
        for head_id in ids | self._replaced:
            known = self.known.get(head_id)
            if known is not None and known.path is not None:
                self._before_change()
                with reported(known.path):
                    known.path.unlink(missing_ok=True)
                if head_id in ids:
                    places.add(known.path.parent)
                self._write(Change(gone_heads=[head_id]))
            if known is not None:
                self._unlearn(known)
        sync_directories(places)
        for place in places:
            _drop_empty(place)
        return self._drop()

    def _leave(self, blocks: Iterable[tuple[BlockKey, Block]]) -> None:
        """The files of these blocks are to go unless a head goes through them by then."""
        for key, block in blocks:
            self._leaving.setdefault(key, self.left_cold.get(key, block))

    def _drop(self) -> list[BlockKey]:
        """Remove the slots of blocks that no head goes through any more; those of which nobody has
        anything now. What they have in the cold store goes later.
        """
        gone: list[BlockKey] = []
        cold: list[tuple[BlockKey, Block]] = []
        try:
            for key, block in list(self._leaving.items()):
                if key not in self.kept.blocks:
                    self.slots.remove(key)
                    gone.append(key)
                    if block.sizes.cold:
                        block.sizes = block.sizes._replace(slot=0, state=0)
                        cold.append((key, block))
                del self._leaving[key]
            for key in list(self._left_parts):
                if not self._num_on_disk[key]:
                    self.slots.remove_end(key)
                    del self._num_on_disk[key]
                del self._left_parts[key]
        finally:
            self.left_cold |= dict(cold)
            self._write(Change(blocks=cold, gone_blocks={*gone} - {key for key, _ in cold}))
        ends, self._left_ends = self._left_ends, {}
        left = [one for one in ends if one not in self._num_with_end]
        return [*(one for one in gone if one not in self.told.blocks), *left]

    # What is known

    def _learn(
        self, known: KnownHead, blocks: Sequence[BlockKey], ends: frozenset[BlockKey] = frozenset()
    ) -> list[BlockKey]:
        """Have this head, in the place of one of its id; those blocks that nobody owned before."""
        tree = self.kept if known.path else self.told
        new = tree.own(blocks, known.head.block_ms)
        for key in new if known.path else ():
            left = self.left_cold.pop(key, NO_BLOCK)
            tree.measure(key, self._leaving.pop(key, left).sizes)
        self._add(known, ends)
        return new

    def _add(self, known: KnownHead, ends: frozenset[BlockKey] = frozenset()) -> None:
        if (before := self.known.get(known.head.id)) is not None:
            self._unlearn(before)
        if known.head.num_tokens % self._chain_of(known.head.model).block_size:
            ends |= {BlockKey(known.head.model, known.end)}
        if known.path is not None:
            self._num_on_disk.update(self._parts_of(known.head, known.end))
        self._ends_in[known.head.id] = ends
        self._num_with_end.update(ends)
        self.known[known.head.id] = known
        self._ends.setdefault(known.head.owner, {})[known.end] = known.head.id
        if KEPT in known.head.pins:
            self._kept.setdefault(_conversation_of(known.head), set()).add(known.head.id)
        for digest in _digests(known):
            self._by_digest[digest] = (*self._by_digest.get(digest, ()), known.head.id)

    def _unlearn(self, known: KnownHead) -> None:
        head = known.head
        del self.known[head.id]
        ends = self._ends.get(head.owner, {})
        if ends.get(known.end) == head.id:
            del ends[known.end]
            if not ends:
                del self._ends[head.owner]
        if KEPT in head.pins:
            kept = self._kept[_conversation_of(head)]
            kept.discard(head.id)
            if not kept:
                del self._kept[_conversation_of(head)]
        for digest in _digests(known):
            others = tuple(one for one in self._by_digest.pop(digest) if one != head.id)
            if others:
                self._by_digest[digest] = others
        self._replaced.discard(head.id)
        ends_in = self._ends_in.pop(head.id, frozenset())
        self._num_with_end.subtract(ends_in)
        for end in ends_in:
            if not self._num_with_end[end]:
                del self._num_with_end[end]
                self._left_ends[end] = None
        if known.path is not None:
            self._num_on_disk.subtract(self._parts_of(head, known.end))
            self._leave_end(head, known.end)
        self._leave((self.kept if known.path else self.told).leave(known.last))

    def _parts_of(self, head: Head, end: bytes) -> list[BlockKey]:
        """What other ranks have of the end of a head is called so, where it is within a block."""
        is_within = head.num_tokens % self._chain_of(head.model).block_size
        return [BlockKey(head.model, end)] if is_within else []

    def _leave_end(self, head: Head, end: bytes) -> None:
        self._left_parts |= dict.fromkeys(self._parts_of(head, end))

    def _bytes_of(self, path: Path | None, file: HeadFile, end: bytes) -> tuple[int, int]:
        """What a head takes of the disk, with what other ranks have of its end; and its end."""
        if path is None:
            return 0, 0
        head = file.head
        end_bytes = sum(map(self.slots.end_bytes, self._parts_of(head, end)))
        with reported(path):
            end_bytes += path.stat().st_size - bare_bytes(file)
        return self._disk_bytes_of(path, head, end), end_bytes

    def _turns_of(self, head: Head, said: bytes) -> tuple[bytes, int]:
        """By what its turns are found, and how many there are."""
        names = map(self._chain_of(head.model).turn_name, digests_of(said))
        return b"".join(names), num_turns(said)

    def _disk_bytes_of(self, path: Path, head: Head, end: bytes) -> int:
        return disk_bytes(path) + sum(map(self.slots.end_bytes, self._parts_of(head, end)))

    def _measured(
        self, keys: Iterable[BlockKey], new: Iterable[BlockKey] = ()
    ) -> list[tuple[BlockKey, Block]]:
        """Look at the files of these blocks: those that are new, or of which something changed."""
        changed = dict.fromkeys(new)
        for key in keys:
            slot, state = self.slots.disk_bytes(key)
            sizes = self.kept.blocks[key].sizes._replace(slot=slot, state=state)
            if self.kept.measure(key, sizes):
                changed[key] = None
        return [(key, self.kept.blocks[key]) for key in changed]

    def _write(self, change: Change, *, is_first: bool = False) -> None:
        if self._index is not None and any(change):
            (self._index.write_first if is_first else self._index.write)(change)

    def _blocks_of(self, head: Head, token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
        names = self._chain_of(head.model).block_hashes(token_ids, root=head.owner.root)
        return tuple(BlockKey(head.model, name) for name in names)

    def _last_of(self, head: Head, blocks: Sequence[BlockKey]) -> BlockKey:
        """Its last whole block, or where its names begin."""
        root = BlockKey(head.model, head.owner.root or self._chain_of(head.model).root)
        return blocks[-1] if blocks else root

    def _end_of(self, head: Head, token_ids: Sequence[int], blocks: Sequence[BlockKey]) -> bytes:
        chain = self._chain_of(head.model)
        rest = token_ids[len(blocks) * chain.block_size :]
        return chain.end_hash(self._last_of(head, blocks).name, rest)

    def _end_keys(
        self, head: Head, token_ids: Sequence[int], blocks: Sequence[BlockKey], ends: Iterable[int]
    ) -> frozenset[BlockKey]:
        """The names of those ends that are within blocks."""
        chain = self._chain_of(head.model)
        found: list[BlockKey] = []
        for end in ends:
            number = end // chain.block_size
            if rest := token_ids[number * chain.block_size : end]:
                above = self._last_of(head, blocks[:number]).name
                found.append(BlockKey(head.model, chain.end_hash(above, rest)))
        return frozenset(found)

    def _on_disk(self) -> Path:
        if self._folder is None:
            raise StoreFailed("nothing is kept on disk")
        return self._folder

    def _place(self, staged: Path, head: Head, blocks: Sequence[BlockKey]) -> Path:
        """Have a staged head under its name."""
        place = head_folder(self._on_disk(), self._last_of(head, blocks))
        path = place / f"{head.id}{SUFFIX}"
        make_directory(place)
        self._before_change()
        with reported(path):
            staged.replace(path)
        try:
            sync_directories([place])
        except StoreFailed:
            if head.id not in self.known:  # else it is all that there is of one that was published
                path.unlink(missing_ok=True)
            raise
        return path

    # Starting

    def _recover(self, folder: Path, index: Index) -> None:
        """Have what the files say; rows that say otherwise are mended."""
        for path in folder.glob(f"{TEMPORARY}*"):
            if is_abandoned(path.name):
                path.unlink(missing_ok=True)
        rows, blocks = index.load()
        self.kept.fill(blocks)
        told = {one.head.id: one for one in rows}
        paths = {path.name.removesuffix(SUFFIX): path for path in folder.glob(f"*/*/*{SUFFIX}")}
        unread: list[Path] = []
        for head_id, path in paths.items():
            row = told.get(head_id)
            num_bytes = self._disk_bytes_of(path, row.head, row.end) if row is not None else 0
            is_known = row is not None and row.num_bytes == num_bytes
            if row is None or not is_known or not self.kept.is_whole(row.last):
                unread.append(path)
                continue
            self.kept.join(row.last)
            self._add(row._replace(path=path))
        gone = told.keys() - paths.keys()
        self.were_rows_wrong = bool(gone or unread)
        self._write(Change(gone_heads=gone))
        for path in unread:
            self._read_anew(path, told.get(path.name.removesuffix(SUFFIX)))
        for place in list(folder.glob("*/*")):
            _drop_empty(place)
        for key, block in [one for one in self.kept.blocks.items() if not one[1].num_behind]:
            self.kept.remove(key)
            self._leave([(key, block)])
        self._finish_replacing()
        self._leave((one, Block(None)) for one in self._compare())
        self._drop()

    def _read_anew(self, path: Path, row: KnownHead | None) -> None:
        """Have a head of which the rows say too little."""
        try:
            head, token_ids, said = file = read_head(path)
        except (SlotForeign, SlotMissing):
            return
        except SlotDamaged:
            self._before_change()
            path.unlink()
            self._write(Change(gone_heads=[path.name.removesuffix(SUFFIX)]))
            return
        blocks, now_s = self._blocks_of(head, token_ids), self.now_s()
        end = self._end_of(head, token_ids, blocks)
        last, sizes = blocks[-1] if blocks else None, self._bytes_of(path, file, end)
        times = (row.created_s, row.last_used_s, row.hits) if row else (now_s, now_s, 0.0)
        turns = self._turns_of(head, said)
        known = KnownHead(head, last, end, path, (), *sizes, *times, *turns)
        new = self._learn(known, blocks)
        self._write(Change([known], [(one, self.kept.blocks[one]) for one in new]))

    def _compare(self) -> dict[BlockKey, int]:
        """Count what there is of slots; those without a head, and what they take."""
        found = self.slots.found()
        changed: list[tuple[BlockKey, Block]] = []
        for key, block in self.kept.blocks.items():
            sizes = found.get(key, (0, 0))
            if sizes != block.sizes[:2]:
                self.kept.measure(key, Sizes(*sizes, *block.sizes[2:]))
                changed.append((key, block))
        self.were_rows_wrong |= bool(changed)
        self._write(Change(blocks=changed))
        blocks, ends = self.kept.blocks, self._num_on_disk
        return {key: sum(n) for key, n in found.items() if key not in blocks and not ends[key]}

    def _finish_replacing(self) -> None:
        """Remove heads whose successors were published right before the end."""
        for known in list(self.known.values()):
            before = self._ends.get(known.head.owner, {}).get(known.head.continues)
            if before is None or before == known.head.id:
                continue
            if {*self.known[before].head.pins} <= {*known.head.pins}:
                self._replaced.add(before)
        self._forget(())


def _read_staged(staged: Path | HeadFile) -> HeadFile:
    if isinstance(staged, HeadFile):
        return staged
    try:
        return read_head(staged)
    except SlotDamaged:
        staged.unlink(missing_ok=True)
        raise


def _digests(known: KnownHead) -> list[bytes]:
    all_of, size = known.digests, DIGEST_BYTES
    return [all_of[start : start + size] for start in range(0, len(all_of), size)]


def _read(known: KnownHead) -> HeadFile:
    if known.path is None:
        return HeadFile(known.head, known.token_ids)
    return read_head(known.path)


def _conversation_of(head: Head) -> tuple[bytes, ...]:
    return head.model, head.owner.asked, head.owner.session


def _drop_empty(place: Path) -> None:
    with suppress(OSError):  # another head is there
        place.rmdir()
        place.parent.rmdir()
