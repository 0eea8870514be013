"""The tiers of one model, as the engine sees them: begin, restore, commit, and the server's news.

Belongs to the mlx thread. Hot runs are in memory; warm ones are read by the reader threads; what
is new goes to the hot tier at once and to the writer behind the requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

from msgspec import structs

from runtime.kv import turn_ends
from runtime.kv.blocks import HASH_BYTES
from runtime.kv.commit import RUN_TOKENS, Committer
from runtime.kv.ground import Counts, Ground
from runtime.kv.hot import Held, HotTier
from runtime.kv.late import LateNames, stand_for
from runtime.kv.notes import Notes
from runtime.kv.prefix import Run, run_of
from runtime.kv.prewarm import Prewarmer
from runtime.kv.reader import SlotRead, SlotReader
from runtime.kv.restore import Restorer
from runtime.kv.trail import Trail
from runtime.kv.writer import SlotWriter, WriteFailed
from runtime.slot_news import (
    Attach,
    KnownSlot,
    Lost,
    Slots,
    SlotsAway,
    SlotsDemoted,
    SlotsGone,
    SlotsMerged,
    SlotsPromoted,
    SlotsSaved,
    Told,
    WritesPaused,
)
from runtime.types import MissReason
from runtime.wire import (
    Bring,
    Forget,
    Forgotten,
    HotAsked,
    HotBudget,
    HotNow,
    KvCounts,
    KvNews,
    PinWanted,
    SlotBad,
    SlotQueued,
    SlotsLeft,
    SlotsUsed,
    SlotsWanted,
    TurnEnded,
)
from store.keyed_names import Asker

TierEvent = (
    SlotQueued
    | SlotsLeft
    | SlotBad
    | SlotsUsed
    | TurnEnded
    | SlotsWanted
    | HotNow
    | Forgotten
    | PinWanted
)
"""What the tiers tell the server."""

TierNews = SlotRead | WriteFailed | KvNews
"""What the tiers are told from elsewhere, through the engine's inbox."""


_WORTH_JOINING = 1
"""Blocks; copying the KV of a whole prompt is quicker than computing them."""


class Tiers:
    """`report` sends an event to the server. Without writer and reader there is no disk.

    `prewarm_bytes` of memory may be filled with what was used last, while nothing runs.
    With `checks` (Python's development mode) everything is recounted whenever nothing runs.
    """

    def __init__(
        self,
        ground: Ground,
        writer: SlotWriter | None,
        reader: SlotReader | None,
        report: Callable[[TierEvent], None],
        *,
        prewarm_bytes: int = 0,
        checks: bool = False,
    ) -> None:
        self._ground = ground
        self._checks = checks
        self._writer = writer
        self._report = report
        self._restorer = Restorer(ground, reader, report)
        self._prewarmer = Prewarmer(ground, self._restorer, prewarm_bytes)
        self._notes = Notes(ground, report, has_disk=writer is not None)
        self._committer = Committer(ground, writer, self._notes)
        self._trails: WeakSet[Trail] = WeakSet()
        self._late = LateNames(ground, self._committer, self._restorer, writer, report)

    @property
    def hot(self) -> HotTier:
        return self._ground.hot

    @property
    def counts(self) -> Counts:
        return self._ground.counts

    @property
    def needs_state(self) -> bool:
        """KV of this model can be taken up at boundaries only."""
        return self._ground.needs_state

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

    @property
    def num_queued_bytes(self) -> int:
        """Waiting to be written."""
        return self._writer.num_queued_bytes if self._writer is not None else 0

    def wire_counts(self, num_encoded_images: int = 0) -> KvCounts:
        """The counters for the heartbeat."""
        hot = self.hot
        return KvCounts(
            hot_bytes=hot.num_bytes,
            num_runs=len(hot.tree),
            num_evicted=hot.num_evicted,
            num_queued_bytes=self.num_queued_bytes,
            num_encoded_images=num_encoded_images,
            **asdict(self.counts),
        )

    # A request's way

    def begin(self, trail: Trail) -> None:
        """A prompt arrived; `trail.is_waiting` says that something must be read first."""
        is_kept = self._ground.keeps_pictures or not trail.media
        if self._ground.unsupported is not None or not is_kept:
            trail.mode, trail.reason = "off", "unsupported"
        self._trails.add(trail)
        self._ground.name(trail)
        self._restorer.begin(trail)

    def is_overdue(self, trail: Trail) -> bool:
        """It waits longer for the disk than prefill would take."""
        return trail.is_waiting and time.perf_counter() > trail.give_up_s

    def give_up(self, trail: Trail) -> None:
        """Do not wait for the disk any longer."""
        self._restorer.give_up(trail)

    def restore(self, trail: Trail, *, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        The first `num_had` tokens the request has had before: only what it gains is reused.
        """
        kv, num_tokens = self._restorer.restore(trail, num_had)
        self._restorer.release(trail)
        return kv, num_tokens

    def on_prefill(
        self, trail: Trail, kv: Sequence[Any], span: tuple[int, int], seconds: float
    ) -> None:
        """The slice `span` was computed in that time; the caches stand at its end."""
        start, end = span
        self._ground.counts.num_computed_tokens += end - start
        self._ground.rates.on_prefill(end - start, seconds)
        if end == len(trail.token_ids) - 1 or end in trail.boundaries:
            self._committer.commit(trail, kv, end)
        elif end - trail.num_kept >= RUN_TOKENS:
            whole = end if self.needs_state else end - (end - trail.num_kept) % RUN_TOKENS
            self._committer.commit(trail, kv, whole)

    def on_interrupted(self, trail: Trail, kv: Sequence[Any], end: int) -> None:
        """The first `end` tokens of a prompt are computed, and others may go on from there."""
        self._committer.commit_begun(trail, kv, end)

    def knows_more(self, trail: Trail, num_tokens: int) -> bool:
        """Others computed so much more of a prompt than these tokens that it is worth a copy."""
        if trail.mode == "off":
            return False
        worth = num_tokens + _WORTH_JOINING * self._ground.chain.block_size
        worth = min(worth, len(trail.token_ids) - 1)
        return self._restorer.num_at_hand(trail) >= worth > num_tokens

    def on_finished(self, trail: Trail, output_ids: Sequence[int], kv: Sequence[Any]) -> None:
        """A sequence ended; its caches hold the prompt and the output."""
        if trail.mode != "full":
            return
        trail.token_ids = [*trail.token_ids, *output_ids]
        self._committer.extend_hashes(trail)
        self._committer.commit(trail, kv, len(trail.token_ids), ends_turn=True)
        if trail.leaf is not None and trail.leaf in self.hot:
            turn_ends.tell_reached(self._ground, trail, self._report)
            turn_ends.tell_ended(self._ground, trail.leaf, self._report)

    def note_durable(self, trail: Trail) -> None:
        """Say in `trail.use` how many of its tokens are on disk, from the first one on."""
        num_durable = self.hot.num_saved(trail.leaf, trail.num_kept)
        trail.use = structs.replace(trail.use, num_durable=num_durable)

    def pin(self, trail: Trail, kv: Sequence[Any], source: str) -> None:
        """Have the KV of a prompt stay, or in `prefix` mode that of its prefix.

        `kv` holds all but the prompt's last token.
        """
        end = len(trail.token_ids) - 1
        if trail.mode == "prefix":
            end = min(trail.prefix_end, end)
        if trail.mode == "off" or not end:
            return
        run = self._committer.keep_exactly(trail, kv, end)
        if run is not None:
            held = self.hot[run]
            held.ttl_class, held.ttl_s = "pinned", None
            self._late.pin(run, source, trail.asker.model)

    def lengthened(self, trail: Trail, token_ids: list[int]) -> Trail:
        """A trail for a longer sequence that begins like this one."""
        longer = trail.fork()
        longer.token_ids = token_ids
        self._trails.add(longer)
        self._committer.extend_hashes(longer)
        return longer

    def release(self, trail: Trail) -> None:
        """Nobody wants the answer any more."""
        self._restorer.release(trail)

    # What the server and the tiers' own threads tell

    def hear(self, news: TierNews) -> None:
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
                self._ground.losses.tell(rows)
            case Told():
                self.on_gone(self._late.untold(), "evicted")
                self._late.on_told()
                for run in self.hot.tree:
                    turn_ends.tell_ended(self._ground, run, self._report)
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
                self.set_budget(num_bytes)
            case Forget():
                self._forget(news)
            case Bring(ids=ids):
                for run in filter(None, map(self.hot.find, ids)):
                    self._prewarmer.bring(run)
            case HotAsked(number=number, ids=ids):
                self._report(HotNow(number=number, ids=tuple(filter(self.hot.is_whole, ids))))

    def set_budget(self, num_bytes: int) -> None:
        """The hot tier may be larger from now on, or has to be smaller at once."""
        self._ground.set_budget(num_bytes)

    def leave_beside_rows(self, num_bytes: int | None) -> None:
        """So much is left beside running requests of the memory for both; None: enough."""
        self._ground.leave_beside_rows(num_bytes)

    def learn(self, slots: Sequence[KnownSlot]) -> None:
        """Slots that are on disk, in any order."""
        hot, chain = self.hot, self._ground.chain
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
            self._ground.losses.found((*slot.block_hashes, slot.end_hash))
        self._prewarmer.on_learned()

    def on_saved(self, slot_ids: Sequence[str]) -> None:
        """These slots are published: their bytes survive anything."""
        for slot_id in slot_ids:
            if (run := self.hot.find(slot_id)) is not None:
                self._notes.saved(run)
                turn_ends.tell_ended(self._ground, run, self._report)
        self._late.persist()
        self._ground.shrink()

    def on_demoted(self, slot_ids: Sequence[str]) -> None:
        """These slots went to the cold store."""
        for slot_id in slot_ids:
            if (run := self.hot.find(slot_id)) is not None:
                self.hot[run].tier = "cold"

    def on_merged(self, slot_ids: Sequence[str], slots: Sequence[KnownSlot]) -> None:
        """Slots became fewer; who waits for an old one is given the new one that stands for it."""
        old = [run for one in slot_ids if (run := self.hot.find(one)) is not None]
        self.learn(slots)
        new = [run for slot in slots if (run := self.hot.find(slot.id)) is not None]
        stand_for(self._ground, self._restorer, old, new)

    def on_gone(self, slot_ids: Sequence[str], reason: MissReason) -> None:
        """These slots are no longer on disk; what was deleted leaves memory as well."""
        for slot_id in slot_ids:
            if (run := self.hot.find(slot_id)) is None:
                continue
            self._ground.lose_file(run, reason)
            if run not in self.hot:
                self._restorer.on_lost(run)

    def _forget(self, news: Forget) -> None:
        """Nothing of a conversation that is not published is kept, nor what is now said of it."""

        def is_meant(asker: Asker) -> bool:
            return news.whom.means(asker, news.secret)

        self._ground.losses.forget(news.whom, news.secret)
        forgotten, unwritten = self._ground.forget_askers(is_meant)
        self._notes.settle()
        for run in forgotten:
            self._restorer.on_lost(run)
        for trail in self._trails:
            if is_meant(trail.asker):
                trail.mode, trail.reason = "off", "deleted"
        answer = Forgotten(number=news.number, num_forgotten=len(forgotten))
        if self._writer is None:
            self._report(answer)
        else:
            self._writer.forget(unwritten, is_meant, lambda: self._report(answer))

    def on_write_failed(self, failure: WriteFailed) -> None:
        """A slot was not written; its run lives in memory only, until its turn comes again."""
        self.counts.num_unwritten += 1
        self.on_gone([failure.slot_id], "evicted")


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
