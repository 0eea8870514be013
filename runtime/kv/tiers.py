"""The KV of one model, as the engine sees it: begin, restore, keep, and what the server says.

Belongs to the mlx thread. What is in memory is taken up at once; slots are read by threads beside
it, and what is new is written by others behind the requests.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakSet

from msgspec import structs

from runtime.kv.block_memory import BlockMemory, Piece
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions, Recognised, concerns
from runtime.kv.find import Finder
from runtime.kv.keep import STATE_TOKENS, Keeper
from runtime.kv.others import ALONE, OtherRanks
from runtime.kv.pack import PackedKv, RunKv
from runtime.kv.reader import FilesRead, OnDisk, Reader, Tidy
from runtime.kv.state import KvState
from runtime.kv.writer import BlockJob, HeadJob, Writer, Written
from runtime.kv_messages import (
    Awaited,
    Brought,
    Drop,
    Dropped,
    Ended,
    Forget,
    HotBudget,
    InMemory,
    Kept,
    KvReport,
    MemoryAsked,
    Opened,
    Recall,
)
from runtime.wire import KvCounts
from store.block_names import HashChain
from store.head_file import Head, owner_of
from store.slots import BlockKey
from store.turns import Turn

_TOLD_SHARE = 8
"""Of a long prompt a head is told each time when that share of it is new."""

_CUT_BLOCKS = 8
"""While a prompt is computed so many of its blocks are cut at once: cuts wait for the device."""


@dataclass(slots=True)
class Disk:
    """The slots and heads of a server, and the threads that read and write them."""

    reader: Reader
    writer: Writer
    secret: bytes
    has_cold: bool = False
    """The server is asked for blocks of which there is no slot."""
    others: OtherRanks = ALONE


class Apart(NamedTuple):
    """So many first tokens of a request, told before there were names for the disk."""

    cursor: CacheCursor
    end: int
    pinned_by: str


class Tiers:
    """`report` sends an event to the server. Without `disk` KV is in memory only. `deletions` are
    those that a request may have come before, also one that begins when they were heard of.

    With `checks` (Python's development mode) everything is recounted whenever nothing runs.
    """

    def __init__(
        self,
        state: KvState,
        disk: Disk | None,
        deletions: Deletions,
        report: Callable[[KvReport], None],
        *,
        prewarm_bytes: int = 0,
        checks: bool = False,
    ) -> None:
        self._state = state
        self._disk = disk
        self._deletions = deletions
        self._report = report
        self._checks = checks
        reader, has_cold = (disk.reader, disk.has_cold) if disk is not None else (None, False)
        self._finder = Finder(state, reader, report, has_cold=has_cold)
        self._keeper = Keeper(state, has_disk=disk is not None)
        self._prewarm_bytes = prewarm_bytes
        self._recalled: list[Recall] = []
        self._recalling: CacheCursor | None = None
        self._queued: dict[bytes, Piece[RunKv]] = {}
        """Pieces that stay in memory until they are slots."""
        self._apart: list[Apart] = []
        """What is written once it is known under which names."""
        self._cursors: WeakSet[CacheCursor] = WeakSet()
        """Those of requests that have not ended."""

    @property
    def memory(self) -> BlockMemory[RunKv]:
        return self._state.memory

    @property
    def num_changes(self) -> int:
        """How often something came into memory or left it."""
        return self.memory.num_changes

    @property
    def num_bytes(self) -> int:
        """What KV in memory takes."""
        return self.memory.num_bytes

    @property
    def counts(self) -> KvCounts:
        return self._state.counts

    @property
    def needs_state(self) -> bool:
        """KV of this model can be taken up at boundaries only."""
        return self._state.needs_state

    def set_idle(self, *, is_idle: bool) -> None:
        """Whether no requests are running. Raises AssertionError with `checks`."""
        if is_idle and self._checks:
            self.memory.check()
            is_read = any(one.num_readers - (one.name in self._queued) for one in self.memory)
            assert self._recalling is not None or not is_read, "nobody reads what is pinned"
        if self._disk is not None:
            self._disk.writer.set_idle(is_idle=is_idle)
        if is_idle:
            self._recall()

    def wire_counts(self, num_encoded_images: int = 0) -> KvCounts:
        """The counters for the heartbeat."""
        return structs.replace(
            self.counts,
            hot_bytes=self.memory.num_bytes,
            num_pieces=len(self.memory),
            num_evicted=self.memory.num_evicted,
            num_queued_bytes=self._disk.writer.num_queued_bytes if self._disk is not None else 0,
            num_encoded_images=num_encoded_images,
        )

    # A request's way

    def begin(self, cursor: CacheCursor) -> None:
        """A prompt arrived; `cursor.is_waiting` says that something must be read first.

        What it is of may have been deleted after it came.
        """
        self._judge(cursor)
        state, size = self._state, self._state.chain.block_size
        if state.unsupported is not None or (cursor.media and not state.keeps_pictures):
            cursor.mode, cursor.reason = "off", "unsupported"
        exact = set(cursor.boundaries) if state.needs_state else set[int]()
        # On disk a state is kept at the end of a block; in memory where it was asked for as well,
        # and there alone where a conversation that goes on leaves it behind.
        lasting = exact - cursor.passing if self._disk is not None else set[int]()
        rounded = {at - at % size for at in lasting}
        cursor.boundaries = tuple(sorted((exact | rounded) - {0}))
        cursor.stop_at(state.model.kv_start)
        state.name(cursor)
        cursor.num_prompt = len(cursor.token_ids)
        self._cursors.add(cursor)
        self._finder.begin(cursor)

    def _judge(self, cursor: CacheCursor) -> None:
        if self._deletions.mean(self._recognised(cursor)):
            cursor.delete()

    def _recognised(self, cursor: CacheCursor) -> Recognised:
        """Whose it is; of which tenant only where both have names of the same chain."""
        is_named = self._disk is None or bool(self._state.model_hash)
        root = self._state.chain.root_of(cursor.tenant) if is_named else None
        return cursor.recognised._replace(root=root)

    def is_overdue(self, cursor: CacheCursor) -> bool:
        """It waits longer for the disk than prefill would take."""
        return cursor.is_waiting and time.perf_counter() > cursor.give_up_s

    def give_up(self, cursor: CacheCursor) -> None:
        """Do not wait for the disk any longer."""
        self._finder.give_up(cursor)

    def restore(self, cursor: CacheCursor, *, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        The first `num_had` tokens the request has had before: only what it gains is reused.
        """
        kv, num_tokens = self._finder.restore(cursor, num_had)
        self._finder.release(cursor)
        self._state.release(cursor)
        return kv, num_tokens

    def on_prefill(
        self, cursor: CacheCursor, kv: Sequence[Any], span: tuple[int, int], seconds: float
    ) -> None:
        """The slice `span` was computed in that time; the caches stand at its end."""
        start, end = span
        state, size = self._state, self._state.chain.block_size
        state.counts.num_computed_tokens += end - start
        state.rates.on_prefill(end - start, seconds)
        is_asked, needs_state = end in cursor.boundaries, state.needs_state
        is_far = needs_state and end // STATE_TOKENS > start // STATE_TOKENS and not end % size
        if end == len(cursor.token_ids) - 1:
            self._keep(cursor, kv, end)
        elif is_asked or is_far or end - cursor.num_kept >= _CUT_BLOCKS * size:
            with_state = is_asked or is_far
            self._keep(cursor, kv, end, with_end=is_asked and needs_state, with_state=with_state)
        num_told = max(cursor.num_told, cursor.use.num_tokens)  # what was found others have told
        if cursor.num_kept - num_told > max(STATE_TOKENS, num_told // _TOLD_SHARE):
            self._tell(cursor, cursor.num_kept)

    def on_interrupted(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> None:
        """The first `end` tokens of a prompt are computed, and others may go on from there."""
        self._keep(cursor, kv, end, with_end=self._state.needs_state)

    @property
    def least_worth(self) -> int:
        """So many tokens that others computed are worth a copy."""
        return self._state.chain.block_size

    def knows_more(self, cursor: CacheCursor, num_tokens: int) -> bool:
        """Others computed so much more of a prompt than these tokens that it is worth a copy."""
        number, names = num_tokens // self.least_worth, cursor.block_hashes
        if number < len(names) and names[number] not in self.memory:
            return False
        worth = min(num_tokens + self.least_worth, len(cursor.token_ids) - 1)
        return self.num_at_hand(cursor) >= worth > num_tokens

    def is_ahead(self, other: CacheCursor, cursor: CacheCursor, num_tokens: int) -> bool:
        """Two prompts are the same in the whole block after so many tokens of them."""
        return cursor.shares_block(other, num_tokens // self._state.chain.block_size)

    def num_at_hand(self, cursor: CacheCursor) -> int:
        """How many of a prompt's tokens it could take up from memory now."""
        return 0 if cursor.mode == "off" else self._finder.find(cursor).num_tokens

    def on_finished(
        self,
        cursor: CacheCursor,
        output_ids: Sequence[int],
        kv: Sequence[Any],
        turn: Turn | None = None,
    ) -> None:
        """A sequence ended; its caches, which nobody changes any more, hold prompt and output. It
        is a `turn` of its conversation, if it is to be known again.
        """
        if turn is not None:
            cursor.said = cursor.said._replace(turns=(*cursor.said.turns, turn))
        if cursor.mode == "full":
            token_ids = array("I", cursor.token_ids) + array("I", output_ids)
            cursor.extend(self._state.chain, token_ids)
            self._keep(cursor, kv, len(token_ids))
            self._state.keep_idle(cursor, kv)
        self._tell(cursor, cursor.num_kept)
        self._leave(cursor)
        path = self._keeper.path(cursor, cursor.num_kept)
        self._await(path, cursor.pause_s, is_over=cursor.is_last)

    def on_kv_start(self, cursor: CacheCursor, token_ids: list[int], kv: Sequence[Any]) -> None:
        """The KV of these tokens, of a prompt and its answer so far, is about to be quantised."""
        self._keep(self.lengthened(cursor, token_ids), kv, len(token_ids), with_end=False)

    def note_durable(self, cursor: CacheCursor) -> None:
        """Say in `cursor.use` how many of its tokens are on disk, from the first one on."""
        num_durable = 0
        for piece in self._keeper.path(cursor, cursor.num_kept):
            if not piece.is_written or piece.start != num_durable:
                break
            num_durable = piece.end
        cursor.use = structs.replace(cursor.use, num_durable=num_durable)

    def pin(self, cursor: CacheCursor, kv: Sequence[Any], source: str) -> None:
        """Have the KV of a prompt stay, or in `prefix` mode that of its prefix.

        `kv` holds all but the prompt's last token.
        """
        end = len(cursor.token_ids) - 1
        if cursor.mode == "prefix":
            end = min(cursor.prefix_end, end)
        if cursor.mode == "off" or not end:
            return
        self._keep(cursor, kv, end)
        for piece in self._keeper.path(cursor, end):
            piece.ttl_class = "pinned"
        self._tell(cursor, end, pinned_by=source)

    def lengthened(self, cursor: CacheCursor, token_ids: Sequence[int]) -> CacheCursor:
        """A cursor for a longer sequence that begins like this one."""
        longer = cursor.fork()
        longer.extend(self._state.chain, token_ids)
        self._cursors.add(longer)
        return longer

    def release(self, cursor: CacheCursor) -> None:
        """Nobody wants the answer any more; what was kept of it is told."""
        self._finder.release(cursor)
        self._state.release(cursor)
        self._tell(cursor, cursor.num_kept)
        self._leave(cursor)

    def _leave(self, cursor: CacheCursor) -> None:
        """A request has ended. What was deleted while it was read for it, and what no head of its
        own goes through, is nobody's.
        """
        self._cursors.discard(cursor)
        chain, size = self._state.chain, self._state.chain.block_size
        own = {*cursor.block_hashes[: cursor.num_kept // size]}
        own.update(cursor.name_at(chain, end) for end in cursor.ends if end <= cursor.num_kept)
        if left := cursor.spared - own:
            self._drop(left, with_ranks=False)

    def leave_beside_rows(
        self, num_bytes: int | None, following: Sequence[CacheCursor] = ()
    ) -> None:
        """See `KvState.leave_beside_rows`; `following` are taken up next."""
        self._state.leave_beside_rows(num_bytes, following[0] if following else None)

    # What the server and the threads of the disk tell

    def hear(self, news: object) -> None:
        """Take in what happened elsewhere, if it is of KV."""
        match news:
            case OnDisk():
                self._finder.on_disk(news)
            case FilesRead():
                self._finder.on_read(news)
            case Written(names=names, reason=reason):
                self._on_written(names, reason, has_slot=reason is None)
            case Opened():
                self._open(news)
            case Kept(head_id=head_id, is_kept=is_kept, lacking=lacking):
                self._on_kept(head_id, lacking, is_kept=is_kept)
            case Forget():
                self._forget(news)
            case Drop(number=number, names=names):
                self._report(Dropped(number=number, num_pieces=self._drop(names)))
            case Brought(names=names, asked=asked, is_away=is_away):
                self._finder.on_brought(names, asked, is_away=is_away)
            case Recall():
                self._recalled.append(news)
            case Awaited(names=names, pause_s=pause_s):
                there = (self.memory.get(name) for name in names)
                path = [one for one in there if one is not None]
                self._await(path, pause_s, is_over=pause_s is None)
            case MemoryAsked(number=number, names=names):
                there = tuple(name for name in names if self.memory.has_all(name))
                self._report(InMemory(number=number, names=there))
            case HotBudget(num_bytes=num_bytes):
                self._state.set_budget(num_bytes)
            case _:
                pass

    # Keeping

    def _keep(
        self,
        cursor: CacheCursor,
        kv: Sequence[Any],
        end: int,
        *,
        with_end: bool = True,
        with_state: bool = True,
    ) -> None:
        new = self._keeper.keep(cursor, kv, end, with_end=with_end, with_state=with_state)
        if cursor.ttl_s != 0:
            size = self._state.chain.block_size
            # A slot may be written or queued before somebody else stops at its end.
            has = [one for one in new.stated if one.is_written or one.has_slot]
            stated = [*has, *(one for one in new.stated if one.name in self._queued)]
            self._write([one for one in new.pieces if len(one) == size])
            self._write_states([one for one in stated if len(one) == size])
        self._state.shrink()

    def _write(self, pieces: Sequence[Piece[RunKv]]) -> None:
        """Queue blocks, which stay in memory until they are slots."""
        if self._disk is not None and self._state.model_hash:
            self._disk.writer.put(self._queue(pieces))

    def _queue(self, pieces: Sequence[Piece[RunKv]]) -> list[BlockJob]:
        jobs: list[BlockJob] = []
        for piece in pieces:
            if piece.name not in self._queued and not piece.has_slot:
                self._queued[piece.name] = piece
                piece.num_readers += 1
                jobs += self._jobs(piece)
        return jobs

    def _jobs(self, piece: Piece[RunKv]) -> list[BlockJob]:
        key, parts = BlockKey(self._state.model_hash, piece.name), self._state.parts
        packed = parts.packed(piece.kv, piece.start, "slices")
        jobs = [BlockJob(key, piece.token_ids, packed, piece.recompute_ms)]
        return jobs if piece.kv.state is None else [*jobs, self._state_job(piece)]

    def _write_states(self, pieces: Sequence[Piece[RunKv]]) -> None:
        if self._disk is not None and self._state.model_hash:
            self._disk.writer.put([self._state_job(piece) for piece in pieces])

    def _state_job(self, piece: Piece[RunKv]) -> BlockJob:
        key = BlockKey(self._state.model_hash, piece.name)
        state = self._state.parts.packed(piece.kv, piece.start, "state")
        return BlockJob(key, array("I"), state, piece.recompute_ms, is_state=True)

    def _on_written(
        self, names: Sequence[bytes], reason: str | None, *, has_slot: bool = False
    ) -> None:
        if reason is not None:
            self.counts.num_unwritten += len(names)
        for name in names:
            if (piece := self._queued.pop(name, None)) is not None:
                piece.num_readers -= 1
                piece.has_slot = has_slot
        self._state.shrink()

    def _tell(
        self, cursor: CacheCursor, end: int, pinned_by: str = "", *, on_disk: bool = True
    ) -> None:
        """Tell the first `end` tokens of a cursor as a head: by it they stay, and are deleted."""
        is_new = end > cursor.num_told or pinned_by
        if cursor.mode == "off" or not end or not is_new:
            return
        chain, size = self._state.chain, self._state.chain.block_size
        names, end_name = tuple(cursor.block_hashes[: end // size]), cursor.name_at(chain, end)
        continues, cursor.continues = cursor.continues, end_name
        cursor.num_told = end
        is_kept = on_disk and cursor.ttl_s != 0
        if self._disk is None or not self._state.model_hash or not is_kept:
            if self._disk is not None and is_kept:
                self._set_apart(Apart(cursor.fork(), end, pinned_by))
            self._tell_in_memory(cursor, end, continues)
            return
        token_ids, told = array("I", cursor.token_ids[:end]), _told(cursor, end, continues)
        _, ttl_s = cursor.worth(0)
        head = Head(
            id=told.head_id,
            model=self._state.model_hash,
            owner=owner_of(self._disk.secret, cursor.asker, cursor.root),
            num_tokens=end,
            name=cursor.asker.model,
            continues=continues,
            ttl_s=ttl_s,
            pins=(pinned_by,) if pinned_by else (),
        )
        there = (self.memory.get(name) for name in names)
        blocks = self._queue([one for one in there if one is not None and not one.is_written])
        job = HeadJob(
            head,
            token_ids,
            names,
            end_name,
            told,
            cursor.num_prompt,
            cursor.said,
            end=self._end(end_name, is_block=not end % size),
        )
        self._disk.writer.put_head(job, blocks)

    def _set_apart(self, new: Apart) -> None:
        """Write it later, unless it leaves memory before that; what it goes on from is not."""
        own, chain = new.cursor, self._state.chain
        own.token_ids = array("I", own.token_ids[: new.end])
        own.rename(chain)
        left = (one for one in self._apart if not _goes_on_from(own, one))
        there = [one for one in left if self.memory.has_all(one.cursor.name_at(chain, one.end))]
        self._apart = [*there, new]

    def _tell_in_memory(self, cursor: CacheCursor, end: int, continues: bytes) -> None:
        """Tell the first `end` tokens of a cursor as a head of which nothing is on disk."""
        token_ids = array("I", cursor.token_ids[:end])
        told = _told(cursor, end, continues)
        self._report(structs.replace(told, token_ids=token_ids.tobytes()))

    def _end(self, name: bytes, *, is_block: bool) -> PackedKv | None:
        """What is to be written behind the last whole block, or of a state at its end."""
        piece = self.memory.get(name)
        if piece is None or (is_block and piece.kv.state is None):
            return None
        return self._state.parts.packed(piece.kv, piece.start, "state" if is_block else "all")

    def _on_kept(self, head_id: str, lacking: Sequence[bytes], *, is_kept: bool) -> None:
        """A head is published: its blocks are durable, but those that others' deletions removed."""
        job = self._disk.writer.answered(head_id) if self._disk is not None else None
        if job is None or self._disk is None:
            return
        for name in job.written:
            if (piece := self.memory.get(name)) is not None:
                piece.is_written, piece.has_slot = is_kept and name not in lacking, False
        there = [one for name in lacking if (one := self.memory.get(name)) is not None]
        if is_kept and there:
            is_pinned = bool(job.head.pins)
            blocks = [replace(one, is_pinned=is_pinned) for one in self._queue(there)]
            again = job.again(with_end=job.with_end, is_answered=False)  # it may be staged now
            self._disk.writer.put_head(again, blocks)

    def _await(self, path: Sequence[Piece[RunKv]], pause_s: float | None, *, is_over: bool) -> None:
        """Who used these last is back in so many seconds, or never."""
        if pause_s is not None:
            until_s = time.time() + pause_s
            for piece in path:
                piece.awaited_s, piece.is_released = max(piece.awaited_s, until_s), False
        if is_over:
            for piece in reversed(path):
                if len(self.memory.behind(piece.name)) > 1:
                    break  # others go through it
                piece.awaited_s, piece.is_released = 0.0, True

    @property
    def awaits_answers(self) -> bool:
        """The answer to a head may say that blocks of it are to be written again, which others'
        deletions removed.
        """
        return self._disk is not None and self._disk.writer.has_unanswered

    def _drop(self, names: Collection[bytes], *, with_ranks: bool = True) -> int:
        """Have nothing of what was deleted in memory, nor write it; how many pieces it was.

        What a request goes through that has not ended is its own: it is told with its head. So is
        what a head goes through that is told, and not answered.
        """
        if self._disk is not None:
            self._disk.writer.drop(names)
        unused = self._unwritten([*names])
        if self._disk is not None and with_ranks:
            self._disk.others.remove(self._state.model_hash, unused)
        self._finder.drop(unused)
        return self._state.drop(unused)

    def _unwritten(self, names: Iterable[bytes]) -> list[bytes]:
        """Those of these names that nobody uses; their blocks are written no more."""
        chain, size = self._state.chain, self._state.chain.block_size
        names, used = {*names}, set[bytes]()
        for cursor in self._cursors:
            if cursor.mode != "off":
                own = {*cursor.block_hashes[: cursor.num_kept // size]}
                own.update(cursor.name_at(chain, end) for end in cursor.ends)
                used |= own
                cursor.has_lost_slots |= not names.isdisjoint(own)
        if self._disk is not None:
            used |= self._disk.writer.open_names()
        for name in names & used:  # its slot is gone: it is written again with the next head
            if (piece := self.memory.get(name)) is not None:
                piece.is_written = piece.has_slot = False
        unused = [*(names - used)]
        if self._disk is not None:
            self._on_written(self._disk.writer.drop_blocks(unused), None)
        return unused

    def _forget(self, news: Forget) -> None:
        """Something was deleted: what is on its way of that is not kept.

        It is told as it is, without a file: the server turns it away, and names what of it is to be
        dropped.
        """

        def is_meant(of: Recognised) -> bool:
            return of.came_after < news.number and concerns(news, of)

        size, names = self._state.chain.block_size, set[bytes]()
        self._apart = [one for one in self._apart if not is_meant(self._recognised(one.cursor))]
        for cursor in self._cursors:
            if cursor.mode != "off" and is_meant(self._recognised(cursor)):
                names.update(cursor.block_hashes[: cursor.num_kept // size])
                self._tell(cursor, cursor.num_kept, on_disk=False)
                cursor.delete()
        if self._disk is not None:
            for job in self._disk.writer.withdraw(is_meant):
                names.update(job.names)
                token_ids = job.token_ids.tobytes()
                self._report(structs.replace(job.told, head_id=job.head.id, token_ids=token_ids))
            self._unwritten(names)

    def _open(self, opened: Opened) -> None:
        """The store is open: what is in memory takes the names that it has there."""
        size = self._state.chain.block_size
        chain = HashChain(opened.secret, opened.model_hash, block_size=size)
        is_new = chain.root != self._state.chain.root
        if is_new:
            self._state.rename(chain, opened.model_hash)
            for cursor in self._cursors:
                cursor.rename(chain)
                cursor.continues = cursor.name_at(chain, cursor.num_told)
            for one in self._apart:
                one.cursor.rename(chain)
        if self._disk is not None:
            self._disk.secret = opened.secret
            self._disk.writer.resume()
            if is_new and self._disk.others.are_away:
                self._disk.reader.ask(Tidy(opened.model_hash, chain))
        apart, self._apart = self._apart, []
        for cursor, end, pinned_by in apart:
            cursor.num_told, cursor.continues = 0, b""
            self._tell(cursor, end, pinned_by)

    # Prewarm

    def _recall(self) -> None:
        """Nobody asks for anything: bring the next conversation back when the last one is here."""
        if self._recalling is not None:
            if self._recalling.is_waiting:
                return
            self._end_recall(self._recalling)
        while self._recalled:
            recall = self._recalled.pop(0)
            token_ids = array("I", recall.token_ids)
            cursor = CacheCursor(token_ids=array("I", [*token_ids, 0]), root=recall.root)
            cursor.block_hashes = self._state.chain.block_hashes(token_ids, root=recall.root)
            most_bytes = self.memory.budget_bytes
            if not recall.is_wanted:
                most_bytes = min(self._prewarm_bytes, most_bytes)
            if self.memory.num_bytes < most_bytes:
                self._finder.recall(cursor)
                if cursor.is_waiting:
                    self._recalling = cursor
                    return
                self._end_recall(cursor)

    def _end_recall(self, cursor: CacheCursor) -> None:
        self._finder.release(cursor)
        self._state.release(cursor)
        self._recalling = None


def _goes_on_from(cursor: CacheCursor, one: Apart) -> bool:
    """Whose it is goes on from all of it, and nobody else wants it to stay."""
    had, is_its = one.cursor, one.cursor.asker == cursor.asker and one.cursor.root == cursor.root
    return is_its and not one.pinned_by and cursor.token_ids[: one.end] == had.token_ids


def _told(cursor: CacheCursor, end: int, continues: bytes) -> Ended:
    """What is told of the first tokens of a cursor, but for themselves."""
    return Ended(
        head_id=uuid4().hex,
        received=cursor.after_deletion,
        asker=cursor.asker,
        tenant=cursor.tenant,
        ends=tuple(sorted(at for at in cursor.ends if at <= end)),
        continues=continues,
    )


def folders(root: Path) -> tuple[Path, Path]:
    """Where the slots and the heads of a store lie."""
    return root / "slots", root / "heads"
