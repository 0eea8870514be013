"""Heads, and through them which slots stay. One process has them: the server.

A worker stages a head when a turn ends; here it is published or turned away, in one rename. A
deletion removes heads, then the slots that no head goes through, and gives their names, which
workers are told to drop. It has a number: a head whose request came before it, and which is of what
was deleted, is turned away when it comes. Without a session id a head is of a deleted one if it
shares more with that than that shared with any other.

The file of a head is `MODEL/BLOCK/ID.safetensors`, where BLOCK is the name of its last whole block:
who has found that block finds the heads that end behind it in one folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from store.block_names import HashChain, num_common
from store.blocks.head_file import Head, Owner, Turn, read_end, read_head, write_head
from store.blocks.slots import BlockKey, Slots, nothing
from store.disk import make_directory, reported, sync_directories
from store.errors import SlotDamaged, SlotForeign, SlotMissing
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, temp_name


class Whom(NamedTuple):
    """Which heads are meant: those of a session, of a model's name, of both, or all."""

    asked: bytes | None = None
    session: bytes | None = None

    def means(self, owner: Owner) -> bool:
        """Whether a head of this owner is meant."""
        is_asked = self.asked is None or owner.asked == self.asked
        return is_asked and (self.session is None or owner.session == self.session)


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
            return self.whom.means(head.owner)
        return head.owner == self.owner and num_common(self.token_ids, token_ids) > self.num_shared


class KnownHead(NamedTuple):
    """A published head, its file, its last whole block if it has one, and the name of its end. When
    it was used last is the time of its file.
    """

    head: Head
    path: Path
    last: BlockKey | None
    end: bytes
    last_used_s: float


class Published(NamedTuple):
    """A head that is there from now on, and those of its blocks of which there is no slot: others
    went while it was on its way, and with them what nobody else owned yet. Who has them writes them
    again.
    """

    known: KnownHead
    lacking: tuple[BlockKey, ...]


def heads_behind(folder: Path, last: BlockKey) -> list[Path]:
    """The heads below `folder` that end behind this block, or behind a root of that name; the one
    used last comes first. Raises StoreFailed.
    """
    found: list[tuple[int, Path]] = []
    with reported(folder), suppress(FileNotFoundError):
        for path in _place(folder, last).iterdir():
            with suppress(FileNotFoundError):  # it leaves just now
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _place(folder: Path, last: BlockKey) -> Path:
    return folder / last.model.hex() / last.name.hex()


class _Owned:
    """A block that heads go through: the one before it, and how many blocks and heads are right
    behind it.
    """

    __slots__ = ("above", "num_behind")

    def __init__(self, above: BlockKey | None) -> None:
        self.above = above
        self.num_behind = 0


class Heads:
    """All heads below `folder`, and the blocks that they go through.

    `chain_of` gives the names of a model's blocks.
    """

    def __init__(
        self,
        folder: Path,
        slots: Slots,
        chain_of: Callable[[bytes], HashChain],
        before_change: Callable[[], None] = nothing,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._chain_of = chain_of
        self._before_change = before_change
        self.known: dict[str, KnownHead] = {}
        self.owned: dict[BlockKey, _Owned] = {}
        self.number = 0
        """That of the last deletion."""
        self._ends: dict[tuple[Owner, bytes], str] = {}
        self._deletions: list[Deletion] = []
        make_directory(folder)
        self._recover()

    # Turns

    def staging_path(self) -> Path:
        """Where a head is made before it is published."""
        return self._folder / temp_name(uuid4().hex)

    def publish(self, staged: Path, received: int) -> Published | None:
        """Have the head of a turn that ended, or None where it is of what was deleted since.

        Its request came when the last deletion had the number `received`. It replaces the head of
        its owner that it goes on from.

        Raises:
            SlotMissing, SlotDamaged: it is not as it was staged; then it is gone.
            StoreFailed: the system refuses.
        """
        try:
            head, token_ids = read_head(staged)
        except SlotDamaged:
            staged.unlink(missing_ok=True)
            raise
        blocks = self._blocks_of(head, token_ids)
        if any(one.number > received and one.means(head, token_ids) for one in self._deletions):
            staged.unlink()
            self._drop(blocks)
            return None
        before = self._ends.get((head.owner, head.continues))
        new = [one for one in blocks if one not in self.owned]
        known = self._put(staged, head, token_ids, blocks)
        if before is not None and before != head.id:
            self._forget([before])
        return Published(known, tuple(one for one in new if not self._slots.has(one)))

    def settle(self, oldest_received: int) -> None:
        """No request is open any more that came before the deletion after this one."""
        self._deletions = [one for one in self._deletions if one.number > oldest_received]

    def touch(self, head_id: str, now_s: float) -> None:
        """It was used. Raises StoreFailed."""
        known = self.known[head_id]
        with reported(known.path):
            os.utime(known.path, (now_s, now_s))
        self.known[head_id] = known._replace(last_used_s=now_s)

    def fork(self, head_id: str, session: bytes, end: int) -> KnownHead:
        """A head of another session that has the first `end` tokens of this one.

        Raises:
            SlotMissing, SlotDamaged, StoreFailed: the head cannot be read, or not be written.
        """
        path = self.known[head_id].path
        head, token_ids = read_head(path)
        tensors = read_end(path) if end == head.num_tokens else []
        copy = msgspec.structs.replace(
            head,
            id=uuid4().hex,
            owner=head.owner._replace(session=session),
            num_tokens=end,
            continues=b"",
            turns=tuple(one for one in head.turns if one.end <= end),
        )
        staged = self.staging_path()
        self._before_change()
        write_head(staged, copy, token_ids[:end], tensors)
        return self._put(staged, copy, token_ids[:end], self._blocks_of(copy, token_ids[:end]))

    # Leaving

    def delete(self, whom: Whom) -> list[BlockKey]:
        """Delete these heads, those that are on their way too; the blocks that leave with them."""
        self.number += 1
        self._deletions.append(Deletion(self.number, whom))
        return self._forget([i for i, one in self.known.items() if whom.means(one.head.owner)])

    def delete_head(self, head_id: str) -> list[BlockKey]:
        """Delete a head that has no session, and what is on its way of its conversation."""
        known = self.known[head_id]
        self.number += 1
        with suppress(SlotDamaged, SlotMissing):
            token_ids = read_head(known.path).token_ids
            shared = self._num_shared(known, token_ids)
            owner = known.head.owner
            self._deletions.append(Deletion(self.number, None, owner, token_ids, shared))
        return self._forget([head_id])

    def expire(self, now_s: float) -> list[BlockKey]:
        """Remove heads that nobody used for as long as they are kept; the blocks that leave."""
        gone = [
            head_id
            for head_id, (head, _, _, _, last_used_s) in self.known.items()
            if not head.is_pinned and head.ttl_s is not None and now_s - last_used_s > head.ttl_s
        ]
        return self._forget(gone)

    def sweep(self, before_s: float) -> list[BlockKey]:
        """Remove slots through which no head goes, and which were written before that time; these.

        A worker that ends in the middle of a turn leaves them behind. A turn that goes on and found
        one of them there is told that it lacks it.
        """
        found = [one for one in self._slots.found() if one not in self.owned]
        return self._drop(one for one in found if self._slots.written_s(one) < before_s)

    def with_turn(self, digest: bytes) -> tuple[KnownHead, Turn] | None:
        """The head used last that has a turn of this name, and that turn."""
        turns = ((one, turn) for one in self.known.values() for turn in one.head.turns)
        found = [pair for pair in turns if pair[1].digest == digest]
        return max(found, key=lambda pair: pair[0].last_used_s, default=None)

    def _num_shared(self, known: KnownHead, token_ids: Sequence[int]) -> int:
        """How many of a head's first tokens any other of its owner has."""
        owner, head_id = known.head.owner, known.head.id
        shared = 0
        for other in self.known.values():
            if other.head.id == head_id or other.head.owner != owner:
                continue
            with suppress(SlotDamaged, SlotMissing):
                theirs = read_head(other.path).token_ids
                shared = max(shared, num_common(token_ids, theirs))
        return shared

    def _forget(self, head_ids: Iterable[str]) -> list[BlockKey]:
        left: list[BlockKey] = []
        places: set[Path] = set()
        for head_id in head_ids:
            known = self.known[head_id]
            self._before_change()
            with reported(known.path):
                known.path.unlink(missing_ok=True)
            del self.known[head_id]
            places.add(known.path.parent)
            end = (known.head.owner, known.end)
            if self._ends.get(end) == head_id:
                del self._ends[end]
            left += self._leave(known.last)
        sync_directories(places)
        for place in places:
            self._drop_empty(place)
        return self._drop(left)

    def _leave(self, block: BlockKey | None) -> list[BlockKey]:
        """A head, or a block, is behind this one no more; those through which none goes now, the
        last one first.
        """
        gone: list[BlockKey] = []
        while block is not None:
            owned = self.owned[block]
            owned.num_behind -= 1
            if owned.num_behind:
                break
            del self.owned[block]
            gone.append(block)
            block = owned.above
        return gone

    def _drop_empty(self, place: Path) -> None:
        with suppress(OSError):  # another head is there
            place.rmdir()
            place.parent.rmdir()

    def _drop(self, blocks: Iterable[BlockKey]) -> list[BlockKey]:
        """Remove the slots of those through which no head goes; these."""
        gone = [one for one in dict.fromkeys(blocks) if one not in self.owned]
        for one in gone:
            self._slots.remove(one)
        return gone

    # Starting

    def _recover(self) -> None:
        for path in self._folder.glob(f"{TEMPORARY}*"):
            if is_abandoned(path.name):
                path.unlink(missing_ok=True)
        for path in list(self._folder.glob(f"*/*/*{SUFFIX}")):
            try:
                head, token_ids = read_head(path)
            except (SlotForeign, SlotMissing):
                continue
            except SlotDamaged:
                self._before_change()
                path.unlink()
                continue
            self._learn(head, token_ids, self._blocks_of(head, token_ids), path)
        for place in list(self._folder.glob("*/*")):
            self._drop_empty(place)
        self._finish_replacing()
        self.sweep(before_s=math.inf)

    def _finish_replacing(self) -> None:
        """Remove heads whose successors were published right before the end."""
        for known in list(self.known.values()):
            before = self._ends.get((known.head.owner, known.head.continues))
            if before is not None and before != known.head.id:
                self._forget([before])

    def _put(
        self, staged: Path, head: Head, token_ids: Sequence[int], blocks: Sequence[BlockKey]
    ) -> KnownHead:
        place = _place(self._folder, self._last_of(head, blocks))
        path = place / f"{head.id}{SUFFIX}"
        make_directory(place)
        self._before_change()
        with reported(path):
            staged.replace(path)
        sync_directories([place])
        return self._learn(head, token_ids, blocks, path)

    def _learn(
        self, head: Head, token_ids: Sequence[int], blocks: Sequence[BlockKey], path: Path
    ) -> KnownHead:
        chain = self._chain_of(head.model)
        rest = token_ids[len(blocks) * chain.block_size :]
        end = chain.end_hash(self._last_of(head, blocks).name, rest)
        last = blocks[-1] if blocks else None
        known = KnownHead(head, path, last, end, path.stat().st_mtime)
        self.known[head.id] = known
        self._ends[head.owner, end] = head.id
        self._own(blocks)
        return known

    def _own(self, blocks: Sequence[BlockKey]) -> None:
        """One more head goes through these, each behind the one before it."""
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            is_new = block not in self.owned
            owned = self.owned.setdefault(block, _Owned(blocks[number - 1] if number else None))
            owned.num_behind += 1
            if not is_new:
                break

    def _blocks_of(self, head: Head, token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
        names = self._chain_of(head.model).block_hashes(token_ids, root=head.owner.root)
        return tuple(BlockKey(head.model, name) for name in names)

    def _last_of(self, head: Head, blocks: Sequence[BlockKey]) -> BlockKey:
        """Its last whole block, or where its names begin."""
        root = BlockKey(head.model, head.owner.root or self._chain_of(head.model).root)
        return blocks[-1] if blocks else root
