"""The tiers of one model, as the engine sees them: begin, restore, commit, and the server's news.

Belongs to the mlx thread. Hot runs are in memory; warm ones are read by the reader threads; what
is new goes to the hot tier at once and to the writer behind the requests.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from msgspec import structs

from runtime.kv.commit import RUN_TOKENS, Committer
from runtime.kv.cursor import CacheCursor
from runtime.kv.hints import heed, heed_between
from runtime.kv.hot import Held, HotTier
from runtime.kv.late import LateNames, stand_for
from runtime.kv.notes import Notes
from runtime.kv.prefix_tree import Run, run_of
from runtime.kv.prewarm import Prewarmer
from runtime.kv.reader import SlotRead, SlotReader
from runtime.kv.restore import Restorer
from runtime.kv.state import TierState
from runtime.kv.writer import SlotWriter, WriteFailed
from runtime.slot_events import (
    AllSlotsTold,
    Attach,
    Bring,
    Forget,
    Forgotten,
    Hint,
    HotAsked,
    HotBudget,
    HotNow,
    KnownSlot,
    KvReport,
    Lost,
    Slots,
    SlotsAway,
    SlotsDemoted,
    SlotsGone,
    SlotsMerged,
    SlotsPromoted,
    SlotsSaved,
    WritesPaused,
)
from runtime.types import MissReason
from runtime.wire import KvCounts
from store.block_names import HASH_BYTES
from store.keyed_names import Asker

_WORTH_JOINING = 1
"""Blocks; copying the KV of a whole prompt is quicker than computing them."""


class Tiers:
    """`report` sends an event to the server. Without writer and reader there is no disk.

    `prewarm_bytes` of memory may be filled with what was used last, while nothing runs.
    With `checks` (Python's development mode) everything is recounted whenever nothing runs.
    """

    def __init__(
        self,
        tier_state: TierState,
        writer: SlotWriter | None,
        reader: SlotReader | None,
        report: Callable[[KvReport], None],
        *,
        prewarm_bytes: int = 0,
        checks: bool = False,
    ) -> None:
        self._state = tier_state
        self._checks = checks
        self._writer = writer
        self._report = report
        self._restorer = Restorer(tier_state, reader, report)
        self._prewarmer = Prewarmer(tier_state, self._restorer, prewarm_bytes)
        self._notes = Notes(tier_state, report, has_disk=writer is not None)
        self._committer = Committer(tier_state, writer, self._notes)
        self._trails: WeakSet[CacheCursor] = WeakSet()
        self._late = LateNames(tier_state, self._committer, self._restorer, writer, report)

    @property
    def hot(self) -> HotTier:
        return self._state.hot

    @property
    def num_changes(self) -> int:
        """How often something came into memory or left it."""
        return self.hot.num_changes

    @property
    def num_bytes(self) -> int:
        """What KV in memory takes."""
        return self.hot.num_bytes

    @property
    def counts(self) -> KvCounts:
        return self._state.counts

    @property
    def needs_state(self) -> bool:
        """KV of this model can be taken up at boundaries only."""
        return self._state.needs_state

    def set_idle(self, *, is_idle: bool) -> None:
        """Tell the writer whether requests are running. Raises AssertionError with `checks`."""
        if is_idle and self._checks:
            self.hot.integrity_check()
            is_read = any(self.hot[run].num_readers for run in self.hot.tree)
            assert self._prewarmer.is_reading or not is_read, "nobody reads what is pinned"
        if self._writer is not None:
            self._writer.set_idle(is_idle=is_idle)
        self._notes.settle()
        if is_idle:
            self._late.persist()
            self._prewarmer.step()

    def wire_counts(self, num_encoded_images: int = 0) -> KvCounts:
        """The counters for the heartbeat."""
        return structs.replace(
            self.counts,
            hot_bytes=self.hot.num_bytes,
            num_runs=len(self.hot.tree),
            num_evicted=self.hot.num_evicted,
            num_queued_bytes=self._writer.num_queued_bytes if self._writer is not None else 0,
            num_encoded_images=num_encoded_images,
        )

    # A request's way

    def begin(self, cursor: CacheCursor) -> None:
        """A prompt arrived; `cursor.is_waiting` says that something must be read first."""
        if self._state.unsupported is not None or (cursor.media and not self._state.keeps_pictures):
            cursor.mode, cursor.reason = "off", "unsupported"
        cursor.stop_at(self._state.model.kv_start)
        self._trails.add(cursor)
        self._state.name(cursor)
        self._state.judge(cursor)
        self._restorer.begin(cursor)

    def is_overdue(self, cursor: CacheCursor) -> bool:
        """It waits longer for the disk than prefill would take."""
        return cursor.is_waiting and time.perf_counter() > cursor.give_up_s

    def give_up(self, cursor: CacheCursor) -> None:
        """Do not wait for the disk any longer."""
        self._restorer.give_up(cursor)

    def restore(self, cursor: CacheCursor, *, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        The first `num_had` tokens the request has had before: only what it gains is reused.
        """
        kv, num_tokens = self._restorer.restore(cursor, num_had)
        self._restorer.release(cursor)
        return kv, num_tokens

    def on_prefill(
        self, cursor: CacheCursor, kv: Sequence[Any], span: tuple[int, int], seconds: float
    ) -> None:
        """The slice `span` was computed in that time; the caches stand at its end."""
        start, end = span
        self._state.counts.num_computed_tokens += end - start
        self._state.rates.on_prefill(end - start, seconds)
        if end == len(cursor.token_ids) - 1 or end in cursor.boundaries:
            self._committer.commit(cursor, kv, end)
        elif end - cursor.num_kept >= RUN_TOKENS:
            whole = end if self.needs_state else end - (end - cursor.num_kept) % RUN_TOKENS
            self._committer.commit(cursor, kv, whole)

    def on_interrupted(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> None:
        """The first `end` tokens of a prompt are computed, and others may go on from there."""
        self._committer.commit_begun(cursor, kv, end)

    @property
    def least_worth(self) -> int:
        """So many tokens that others computed are worth a copy."""
        return _WORTH_JOINING * self._state.chain.block_size

    def knows_more(self, cursor: CacheCursor, num_tokens: int) -> bool:
        """Others computed so much more of a prompt than these tokens that it is worth a copy."""
        worth = num_tokens + self.least_worth
        worth = min(worth, len(cursor.token_ids) - 1)
        return self.num_at_hand(cursor) >= worth > num_tokens

    def is_ahead(self, other: CacheCursor, cursor: CacheCursor, num_tokens: int) -> bool:
        """Two prompts are the same in the whole block after so many tokens of them."""
        return cursor.shares_block(other, num_tokens // self._state.chain.block_size)

    def num_at_hand(self, cursor: CacheCursor) -> int:
        """How many of a prompt's tokens it could take up from memory now."""
        return 0 if cursor.mode == "off" else self._restorer.num_at_hand(cursor)

    def on_finished(
        self, cursor: CacheCursor, output_ids: Sequence[int], kv: Sequence[Any]
    ) -> None:
        """A sequence ended; its caches, which nobody changes any more, hold prompt and output."""
        if cursor.mode == "full":
            cursor.token_ids = array("I", cursor.token_ids) + array("I", output_ids)
            self._committer.extend_hashes(cursor)
            self._committer.commit(cursor, kv, len(cursor.token_ids), ends_turn=True)
            if cursor.leaf is not None and cursor.leaf in self.hot:
                self._notes.reached(cursor)
                self._notes.ended(cursor.leaf)
            self._state.keep_idle(cursor, kv)
        heed(self.hot, cursor)

    def on_kv_start(self, cursor: CacheCursor, token_ids: list[int], kv: Sequence[Any]) -> None:
        """The KV of these tokens, of a prompt and its answer so far, is about to be quantised."""
        self._committer.commit(self.lengthened(cursor, token_ids), kv, len(token_ids))

    def note_durable(self, cursor: CacheCursor) -> None:
        """Say in `cursor.use` how many of its tokens are on disk, from the first one on."""
        num_durable = self.hot.num_saved(cursor.leaf, cursor.num_kept)
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
        run = self._committer.keep_exactly(cursor, kv, end)
        if run is not None:
            self.hot[run].ttl_class, self.hot[run].ttl_s = "pinned", None
            self._late.pin(run, source, cursor.asker.model)

    def lengthened(self, cursor: CacheCursor, token_ids: Sequence[int]) -> CacheCursor:
        """A cursor for a longer sequence that begins like this one."""
        longer = cursor.fork()
        longer.token_ids = token_ids
        self._trails.add(longer)
        self._committer.extend_hashes(longer)
        return longer

    def release(self, cursor: CacheCursor) -> None:
        """Nobody wants the answer any more."""
        self._restorer.release(cursor)

    # What the server and the tiers' own threads tell

    def hear(self, news: object) -> None:
        """Take in what happened elsewhere."""
        match news:
            case SlotRead():
                self._restorer.on_read(news)
            case WriteFailed():
                self.on_write_failed(news)
            case Attach():
                self._late.attach(news, self._trails)
            case Slots(slots=slots):
                self.learn(slots)
            case Lost(rows=rows):
                self._state.losses.tell(rows)
            case AllSlotsTold():
                self.on_gone(self._late.untold(), "evicted")
                self._late.on_told()
                for run in self.hot.tree:
                    self._notes.ended(run)
            case SlotsSaved(ids=ids):
                self.on_saved(ids)
            case SlotsPromoted(ids=ids):
                self._restorer.on_promoted(ids)
            case SlotsAway(ids=ids):
                self._restorer.on_away(ids)
            case WritesPaused(seconds=seconds):
                if self._writer is not None:
                    self._writer.rest(seconds)
            case SlotsDemoted(ids=ids):
                self.on_demoted(ids)
            case SlotsMerged(ids=ids, slots=slots):
                self.on_merged(ids, slots)
            case SlotsGone(ids=ids, reason=reason):
                self.on_gone(ids, reason)
            case HotBudget(num_bytes=num_bytes):
                self._state.set_budget(num_bytes)
            case Forget():
                self._forget(news)
            case Hint():
                heed_between(self.hot, news)
            case Bring(ids=ids):
                for run in filter(None, map(self.hot.find, ids)):
                    self._prewarmer.bring(run)
            case HotAsked():
                self._report(_hot_now(self.hot, news))
            case _:
                pass

    def leave_beside_rows(
        self, num_bytes: int | None, following: Sequence[CacheCursor] = ()
    ) -> None:
        """See `TierState.leave_beside_rows`; `following` are taken up next."""
        runs = [run for cursor in following for run in cursor.pinned]
        self._state.leave_beside_rows(num_bytes, runs)

    def learn(self, slots: Sequence[KnownSlot]) -> None:
        """Slots that are on disk, in any order."""
        hot, chain = self.hot, self._state.chain
        self._late.on_slots([slot.id for slot in slots])
        for slot in slots:
            parent = hot.find(slot.parent) if slot.parent is not None else None
            if hot.find(slot.id) is not None or not _fits(slot, chain.block_size):
                continue
            if parent is not None and not _continues(slot, parent):
                parent = None
            hashes = (slot.start_hash, *slot.block_hashes)
            run = run_of(chain, parent, slot.start, slot.end, hashes, root=slot.root)
            run.end_hash, run.has_state = slot.end_hash, slot.has_state
            hot.add(run, _on_disk(slot))
            self._state.losses.found((*slot.block_hashes, slot.end_hash))
        self._prewarmer.on_learned()

    def on_saved(self, slot_ids: Sequence[str]) -> None:
        """These slots are published: their bytes survive anything."""
        for run in filter(None, map(self.hot.find, slot_ids)):
            self._notes.saved(run)
            self._notes.ended(run)
        self._late.persist()
        self._state.shrink()

    def on_demoted(self, slot_ids: Sequence[str]) -> None:
        """These slots went to the cold store."""
        for run in filter(None, map(self.hot.find, slot_ids)):
            self.hot[run].tier = "cold"

    def on_merged(self, slot_ids: Sequence[str], slots: Sequence[KnownSlot]) -> None:
        """Slots became fewer; who waits for an old one is given the new one that stands for it."""
        old = [run for one in slot_ids if (run := self.hot.find(one)) is not None]
        self.learn(slots)
        new = [run for slot in slots if (run := self.hot.find(slot.id)) is not None]
        stand_for(self._state, self._restorer, old, new)

    def on_gone(self, slot_ids: Sequence[str], reason: MissReason) -> None:
        """These slots are no longer on disk; what was deleted leaves memory as well."""
        for run in filter(None, map(self.hot.find, slot_ids)):
            self._state.lose_file(run, reason)
            if run not in self.hot:
                self._restorer.on_lost(run)

    def _forget(self, news: Forget) -> None:
        """Nothing of a conversation that is not published is kept, nor what is now said of it."""
        forgotten, unwritten = self._state.forget_deleted(news)
        self._notes.settle()
        for run in forgotten:
            self._restorer.on_lost(run)
        for cursor in self._trails:
            self._state.judge(cursor)
        answer = Forgotten(number=news.number, num_forgotten=len(forgotten))
        if self._writer is None:
            self._report(answer)
        else:
            self._writer.forget(unwritten, _named_in(news), lambda: self._report(answer))

    def on_write_failed(self, failure: WriteFailed) -> None:
        """A slot was not written; its run lives in memory only, until its turn comes again."""
        self.counts.num_unwritten += 1
        self.on_gone([failure.slot_id], "evicted")


def _named_in(news: Forget) -> Callable[[Asker], bool]:
    return lambda asker: news.whom.means(asker, news.secret)


def _hot_now(hot: HotTier, asked: HotAsked) -> HotNow:
    ids = tuple(filter(hot.is_whole, asked.ids))
    held = hot.of_sessions(frozenset(asked.sessions)) if asked.sessions else {}
    return HotNow(asked.number, ids, tuple(held.items()))


def _fits(slot: KnownSlot, block_size: int) -> bool:
    """Whether a slot can be there: an index may say anything."""
    num_blocks = slot.end // block_size - slot.start // block_size
    has_start = len(slot.start_hash) == (HASH_BYTES if slot.start else 0)
    return has_start and 0 <= slot.start < slot.end and len(slot.block_hashes) == num_blocks


def _continues(slot: KnownSlot, parent: Run) -> bool:
    return parent.start < slot.start <= parent.end and parent.root == slot.root


def _on_disk(slot: KnownSlot) -> Held:
    return Held(
        id=slot.id,
        is_written=True,
        is_saved=True,
        tier=slot.tier,
        disk_bytes=slot.disk_bytes,
        last_used_s=slot.last_used_s,
        hits=slot.hits,
        recompute_ms=slot.recompute_ms,
        ttl_class=slot.ttl_class,
        ttl_s=slot.ttl_s,
    )
