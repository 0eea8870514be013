"""Finding: how far a prompt is known, having read what is only on disk, filling fresh caches."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

from runtime.kv.block_memory import Found, Piece
from runtime.kv.cursor import CacheCursor
from runtime.kv.media import around
from runtime.kv.pack import RunKv
from runtime.kv.reader import Asked, FilesRead, OnDisk, PieceRead, Reader, Wanted
from runtime.kv.state import KvState
from runtime.kv_messages import Damaged, Want
from runtime.types import CacheUse, MissReason
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError
from store.head_file import HEAD
from store.slots import SLOT, STATE

_WORTH = 0.8
"""Reading is to take less than so much of the time that computing takes."""

_PATIENCE_S = 1.0

Report = Callable[[Damaged | Want], None]


class Finder:
    """Looks prompts up and brings their KV back. `report` sends an event to the server.

    With `has_cold` the server is asked for blocks of which there is no slot.
    """

    def __init__(
        self, state: KvState, reader: Reader | None, report: Report, *, has_cold: bool = False
    ) -> None:
        self._state = state
        self._memory = state.memory
        self._reader = reader
        self._report = report
        self._has_cold = has_cold
        self._reading: dict[bytes, list[CacheCursor]] = {}
        """Who waits for what, by the names of pieces, and of prompts that are looked for."""
        self._then: dict[CacheCursor, list[Wanted]] = {}
        """States, which are read once the blocks before them are here."""
        self._recalled: set[CacheCursor] = set()
        """What is brought back while nobody asks: reading takes nothing from anybody."""
        self._known: dict[CacheCursor, int] = {}
        """How many first tokens of a prompt heads on disk have, with or without their KV."""
        self._said: dict[CacheCursor, int] = {}
        """How many are all that a head on disk has."""
        self._dropped: set[bytes] = set()
        """Names of what was deleted while something is read."""
        self._lacks: dict[CacheCursor, bool] = {}
        """A file that was to be read for these is gone, and it is looked up once more what else
        there is; False when that was done.
        """

    # Looking up

    def find(self, cursor: CacheCursor) -> Found[RunKv]:
        """How much of a prompt can be taken up, its last token excepted."""
        found = self._find(cursor, self._limit(cursor))
        # A picture is computed in one piece: its prompt is taken up before it or behind it.
        while (span := around(cursor.media, found.num_tokens)) is not None:
            found = self._find(cursor, span.start)
        return found

    def _limit(self, cursor: CacheCursor) -> int:
        most = len(cursor.token_ids) - 1
        return most if cursor.limit is None else min(most, cursor.limit)

    def _find(self, cursor: CacheCursor, limit: int) -> Found[RunKv]:
        return self._memory.find(
            cursor.token_ids, cursor.block_hashes, root=cursor.root, limit=limit
        )

    def begin(self, cursor: CacheCursor) -> None:
        """Look a prompt up and ask for what is only on disk; `cursor.is_waiting` says whether."""
        if cursor.mode == "off":
            return
        cursor.started_s = time.perf_counter()
        found = self.find(cursor)
        self._state.pin(cursor, [piece for piece, _ in found.taken])
        cursor.use = CacheUse(tier="hot" if found.taken else "none", num_tokens=found.num_tokens)
        cursor.give_up_s = cursor.started_s + _PATIENCE_S
        is_all = found.num_tokens >= len(cursor.token_ids) - 1
        if self._reader is not None and not is_all and cursor.limit is None:
            self._look(cursor, found)

    def _look(self, cursor: CacheCursor, found: Found[RunKv]) -> None:
        assert self._reader is not None
        # What of it has no slot yet may leave memory as soon as it has one: then nobody reads it.
        there = (self._memory.get(name) for name in cursor.block_hashes)
        self._state.pin(cursor, [one for one in there if one is not None])
        limit, size = len(cursor.token_ids) - 1, self._state.chain.block_size
        key = b"look" + cursor.name_at(self._state.chain, limit)
        cursor.awaits.add(key)
        waiting = self._reading.setdefault(key, [])
        waiting.append(cursor)
        if len(waiting) == 1:
            num_found = min(found.num_known, limit) // size
            self._reader.ask(
                Asked(
                    key,
                    self._state.model_hash,
                    self._state.chain,
                    cursor.root or self._state.chain.root,
                    cursor.block_hashes[: limit // size],
                    array("I", cursor.token_ids[:limit]),
                    num_found,
                    self._state.needs_state,
                )
            )

    def recall(self, cursor: CacheCursor) -> None:
        """As `begin`, for tokens that nobody waits for."""
        self._recalled.add(cursor)
        self.begin(cursor)

    def on_disk(self, found: OnDisk) -> None:
        """Have read what was found, for those who wait for it, if that is worth it."""
        for cursor in self._reading.pop(found.asked.key, []):
            self._known[cursor] = found.num_known
            self._said[cursor] = found.num_said
            wanted = self._wanted(cursor, found)
            is_worth = self._is_worth_reading(cursor, found, len(wanted))
            if wanted and not is_worth and cursor not in self._recalled:
                cursor.reason, wanted = "slower_than_prefill", []
            last = [one for one in wanted if one.kind != SLOT]
            if last and self._state.needs_state:
                self._then[cursor] = last
            is_bare = self._state.needs_state
            self._read(cursor, [one for one in wanted if one.kind == SLOT or not is_bare])
            if self._has_cold and found.num_blocks < len(found.asked.names):
                self._want(cursor, found.asked.names[found.num_blocks :])
            self._arrived(cursor, found.asked.key)

    def _wanted(self, cursor: CacheCursor, found: OnDisk) -> list[Wanted]:
        """The files that are missed in memory on the way."""
        assert self._reader is not None
        chain, model = self._state.chain, self._state.model_hash
        size, names = chain.block_size, cursor.block_hashes
        wanted: list[Wanted] = []
        for number in (*range(found.num_blocks), *found.later):
            if names[number] not in self._memory:
                start = number * size
                ids = array("I", cursor.token_ids[start : start + size])
                above = cursor.above(chain, number)
                wanted.append(self._reader.slot(model, names[number], above, start, ids))
        end = found.state_at * size
        if found.state_at and not self._is_known(cursor, end):
            wanted.append(self._reader.state(model, names[found.state_at - 1], end))
        if (last := found.end) is not None:
            end = last.num_blocks * size + last.num_tokens
            if not self._is_known(cursor, end):
                above = cursor.above(chain, found.num_blocks)
                wanted.append(self._reader.end(model, last, above))
        return wanted

    def _is_known(self, cursor: CacheCursor, end: int) -> bool:
        """So much of a prompt can be taken up from memory."""
        return self.find(cursor).num_tokens >= end

    def _read(self, cursor: CacheCursor, wanted: Sequence[Wanted]) -> None:
        """Have it wait for these files; those that nobody waited for are read."""
        assert self._reader is not None
        new: list[Wanted] = []
        for one in wanted:
            key = one.name + one.kind.encode()
            cursor.awaits.add(key)
            waiting = self._reading.setdefault(key, [])
            waiting.append(cursor)
            if len(waiting) == 1:
                new.append(one)
        if wanted and cursor.tier == "hot":
            cursor.tier = "warm"
        self._reader.read(new)

    def _want(self, cursor: CacheCursor, names: Sequence[bytes]) -> None:
        """Ask whether the cold store has the blocks of which there is no slot."""
        key = b"cold" + names[0]
        cursor.awaits.add(key)
        waiting = self._reading.setdefault(key, [])
        waiting.append(cursor)
        if len(waiting) == 1:
            self._report(Want(names=tuple(names)))

    def on_brought(
        self, names: Sequence[bytes], asked: Sequence[bytes], *, is_away: bool = False
    ) -> None:
        """Some of what the cold store was asked for are slots now, as far as it is not away."""
        for cursor in self._reading.pop(b"cold" + asked[0], []):
            if is_away:
                cursor.reason = cursor.reason or "away"
            if names:
                cursor.tier = "cold"
                self._look(cursor, self.find(cursor))
            self._arrived(cursor, b"cold" + asked[0])

    # What the reader brings

    def on_read(self, files: FilesRead) -> None:
        """Take in what was read, and go on for the cursors that waited for it."""
        for read in files.reads:
            self._on_read(read)
        arrays = (read.arrays for read in files.reads)
        self._state.divide_slabs(one.slab for one in arrays if one is not None)
        self._state.shrink()

    def _on_read(self, read: PieceRead) -> None:
        wanted = read.wanted
        key = wanted.name + wanted.kind.encode()
        cursors = self._reading.pop(key, [])
        piece, is_gone = None, False
        try:
            piece = None if self._is_dropped(read, cursors) else self._piece(read)
        except SlotForeign:
            pass
        except StoreError as error:
            is_gone = isinstance(error, SlotMissing | SlotDamaged)
            if not isinstance(error, SlotMissing):
                self._on_bad(read, error, cursors)
        if is_gone:
            for cursor in cursors:
                self._lacks.setdefault(cursor, True)
        if piece is not None:
            self._state.counts.num_restored_bytes += read.num_bytes
            self._state.rates.on_read(read.num_bytes, read.seconds)
            for cursor in cursors:
                self._state.pin(cursor, [piece])
        for cursor in cursors:
            self._arrived(cursor, key)
        if not self._reading:
            self._dropped.clear()

    def _is_dropped(self, read: PieceRead, cursors: Sequence[CacheCursor]) -> bool:
        """It was deleted meanwhile, and nobody asks for the very tokens: with a request they are
        that one's, and are told with its head.
        """
        wanted, token_ids = read.wanted, read.token_ids or array("I")
        is_end = wanted.kind == HEAD
        name = self._state.chain.end_hash(wanted.above, token_ids) if is_end else wanted.name
        asked = [one for one in cursors if one.mode != "off" and one not in self._recalled]
        for cursor in asked if name in self._dropped else ():
            cursor.spared.add(name)
        return name in self._dropped and not asked

    def _piece(self, read: PieceRead) -> Piece[RunKv] | None:
        """Have in memory what was read.

        Raises:
            StoreError: it could not be read, or is not what was asked for.
        """
        if read.error is not None:
            raise read.error
        wanted, chain = read.wanted, self._state.chain
        if wanted.kind == STATE:
            there = self._memory.get(wanted.name)
            if there is None:
                return None
            kv = self._loaded(read, there.start, 0)
            kv = self._state.parts.with_state(there.kv, kv)
            return self._put(wanted.name, there.above, there.start, there.token_ids, kv, read)
        token_ids = read.token_ids if read.token_ids is not None else array("I")
        if wanted.kind != HEAD and token_ids != wanted.token_ids:
            self._state.counts.exact_key_rejected_by_model_lcp += 1
            return None
        kv = self._loaded(read, wanted.start, len(token_ids))
        if token_ids:
            name = chain.end_hash(wanted.above, token_ids)
            return self._put(name, wanted.above, wanted.start, token_ids, kv, read)
        there = self._memory.get(wanted.above)  # a head that ends with a whole block has a state
        if there is None:
            return None
        kv = self._state.parts.with_state(there.kv, kv)
        return self._put(there.name, there.above, there.start, there.token_ids, kv, read)

    def _loaded(self, read: PieceRead, start: int, num_tokens: int) -> RunKv:
        assert read.arrays is not None
        arrays = read.arrays
        kv = self._state.parts.load(read.layout, arrays.tensors, start, num_tokens)
        return kv._replace(share=read.share, slab=arrays.slab, slab_at=arrays.slab_at)

    def _put(
        self,
        name: bytes,
        above: bytes,
        start: int,
        token_ids: array[int],
        kv: RunKv,
        read: PieceRead,
    ) -> Piece[RunKv] | None:
        has_state = kv.state is not None
        piece = Piece(
            name,
            above,
            start,
            token_ids,
            kv,
            kv.nbytes,
            has_state=has_state,
            is_written=True,
            recompute_ms=read.recompute_ms,
            last_used_s=time.time(),
        )
        if kv.slab is not None:
            kv.slab.pieces.add(piece)
        return self._memory.put(piece)

    def _on_bad(self, read: PieceRead, error: StoreError, cursors: Sequence[CacheCursor]) -> None:
        """What cannot be read is computed; a damaged file goes."""
        for cursor in cursors:
            cursor.reason = "damaged"
        if isinstance(error, SlotDamaged):
            self._state.counts.num_damaged += 1
            if read.error is None:  # else who read it has removed it, here or on another rank
                read.wanted.path.unlink(missing_ok=True)
            self._report(Damaged(names=(read.wanted.name,)))

    def _arrived(self, cursor: CacheCursor, key: bytes) -> None:
        cursor.awaits.discard(key)
        if not cursor.awaits:
            self._read(cursor, self._then.pop(cursor, ()))
        if not cursor.awaits and self._lacks.get(cursor):
            self._lacks[cursor] = False
            self._look(cursor, self.find(cursor))

    def drop(self, names: Collection[bytes]) -> None:
        """These were deleted: what is being read of them is not taken in, unless it is asked."""
        if self._reading:
            self._dropped.update(names)

    def give_up(self, cursor: CacheCursor) -> None:
        """Reading takes longer than prefill would; go on with what is in memory."""
        self.stop_waiting(cursor)
        cursor.reason = cursor.reason or "slower_than_prefill"

    def stop_waiting(self, cursor: CacheCursor) -> None:
        """It needs nothing any more of what is being read."""
        for key in cursor.awaits:
            if cursor in self._reading.get(key, []):
                self._reading[key].remove(cursor)
        cursor.awaits.clear()
        self._then.pop(cursor, None)

    def release(self, cursor: CacheCursor) -> None:
        """It needs nothing any more."""
        self.stop_waiting(cursor)
        self._known.pop(cursor, None)
        self._said.pop(cursor, None)
        self._lacks.pop(cursor, None)
        self._recalled.discard(cursor)

    def _is_worth_reading(self, cursor: CacheCursor, found: OnDisk, num_files: int) -> bool:
        """Whether reading is expected to take less than computing; with how long to wait for it."""
        size, rates = self._state.chain.block_size, self._state.rates
        end = found.num_blocks * size + (found.end.num_tokens if found.end is not None else 0)
        prefill_s = rates.prefill_s(end - cursor.use.num_tokens)
        cursor.give_up_s = time.perf_counter() + max(_PATIENCE_S, prefill_s)
        read_s = rates.read_s(found.num_bytes, num_files)
        return not prefill_s or rates.pays(read_s, prefill_s * _WORTH, time.monotonic())

    # Taking up

    def restore(self, cursor: CacheCursor, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        Of those the request had the first `num_had` before.
        """
        if cursor.mode == "off":
            cursor.use = CacheUse(reason=cursor.reason or "off")
            return self._state.model.new_kv(), 0
        start_s = cursor.started_s if cursor.tier != "hot" else time.perf_counter()
        found = self.find(cursor)
        if cursor.media:
            num_alike = self._find(cursor, self._limit(cursor)).num_tokens
            # A block may end inside a picture; a prompt that parts there has another one.
            is_retreat = found.num_tokens < num_alike and num_alike % self._state.chain.block_size
            self._state.counts.vlm_retreat += bool(is_retreat)
        kv = self._taken_up(cursor, found)
        for piece, _ in found.taken:
            self._memory.use(piece)
        reason, at = self._why_no_more(cursor, found, num_had)
        num_gained = found.num_tokens - num_had
        restore_s = time.perf_counter() - start_s if found.num_tokens else 0.0
        cursor.use = CacheUse(
            tier=cursor.tier if found.num_tokens else "none",
            num_tokens=cursor.use.num_tokens + num_gained if num_had else num_gained,
            restore_ms=restore_s * 1000,
            reason=reason,
            at=at,
        )
        cursor.num_kept = found.num_tokens
        # It goes on from a head also where the end of that has no KV, and is computed again.
        num_said = max(found.num_tokens, self._said.get(cursor, 0))
        if num_said and not cursor.continues:
            cursor.continues = cursor.name_at(self._state.chain, num_said)
        self._stop_where_known_again(cursor, found)
        self._state.counts.restore_s += restore_s
        self._state.counts.num_reused_tokens += num_gained
        return kv, found.num_tokens

    def _taken_up(self, cursor: CacheCursor, found: Found[RunKv]) -> list[Any]:
        state, num_tokens = self._state, found.num_tokens
        if num_tokens and not cursor.media:
            token_ids = array("I", cursor.token_ids[:num_tokens])
            if (idle := state.idle_caches.take(cursor.root, token_ids)) is not None:
                return idle
        kv, parts = state.model.new_kv(num_tokens), state.parts
        given = self._to_give(found) if parts.can_divide else []
        pieces = [(piece.kv, num) for piece, num in found.taken]
        if pieces:
            self._memory.drop([piece.name for piece in given])
            state.leave_slabs(given)
            for piece in given:
                piece.kv = RunKv([], None)  # a cursor may hold it until the caches are filled
            num_room = len(cursor.token_ids) - num_tokens
            (parts.move if given else parts.assemble)(kv, pieces, num_room)
        return kv

    def _to_give(self, found: Found[RunKv]) -> list[Piece[RunKv]]:
        """What would be evicted once the request has its own copy: so it is never in memory twice.

        It is on disk, and nobody else is about to use it.
        """
        excess, given = self._memory.num_bytes - self._memory.budget_bytes, list[Piece[RunKv]]()
        for piece, _ in reversed(found.taken):
            is_gone_on_from = any(one not in given for one in self._memory.behind(piece.name))
            is_read = piece.num_readers > 1 or is_gone_on_from
            if excess > 0 and piece.is_written and not piece.has_state and not is_read:
                given.append(piece)
                excess -= piece.num_bytes
        return given

    def _stop_where_known_again(self, cursor: CacheCursor, found: Found[RunKv]) -> None:
        """Blocks after a lost one are taken up as soon as what is before them is computed."""
        if self._state.needs_state or cursor.limit is not None:
            return
        size, at = self._state.chain.block_size, found.num_tokens // self._state.chain.block_size
        known = [name in self._memory for name in cursor.block_hashes]
        starts = [n for n in range(at + 1, len(known)) if known[n] and not known[n - 1]]
        cursor.boundaries = (*cursor.boundaries, *(n * size for n in starts))

    def _why_no_more(
        self, cursor: CacheCursor, found: Found[RunKv], num_had: int
    ) -> tuple[MissReason | None, int]:
        """The first reason why a token had to be computed, and where that was."""
        if cursor.use.reason is not None and cursor.use.num_tokens < num_had:
            # It computed what it missed; what is taken up behind that does not make it undone.
            return cursor.use.reason, cursor.use.at
        at = found.num_tokens
        if at >= len(cursor.token_ids) - 1:
            return None, at
        if cursor.reason is not None:
            return cursor.reason, at
        if found.num_known > at and self._state.needs_state:
            return "no_checkpoint", at
        if (missed := self._state.why_missed(cursor, at)) is not None:
            return missed, at
        if self._reader is not None and not self._state.model_hash:
            return "away", at
        if self._known.get(cursor, 0) > at:
            return "not_yet_durable", at
        size = self._state.chain.block_size
        above = cursor.above(self._state.chain, at // size)
        is_parted = at and self._memory.goes_on(above, cursor.token_ids[at - at % size : at])
        return "diverged" if is_parted else "first_seen", at
