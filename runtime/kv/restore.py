"""Restore: how far a prompt is known, reading what is only on disk, filling fresh layer caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from runtime.kv.cursor import CacheCursor
from runtime.kv.hot import HotTier
from runtime.kv.media import around, overlapping, rope_delta
from runtime.kv.pack import RunKv
from runtime.kv.prefix_tree import Match, Run, num_common, path_to
from runtime.kv.reader import SlotRead, SlotReader
from runtime.kv.reshape import divide
from runtime.kv.state import TierState
from runtime.slot_events import SlotBad, SlotsUsed, SlotsWanted
from runtime.types import CacheTier, CacheUse, MissReason
from store.errors import SlotDamaged, SlotMissing, StoreError
from store.slots import CheckedSlot
from store.types import SlotHeader

_MAX_PEEKS = 8
_WORTH = 0.8
_PATIENCE_S = 1.0

Report = Callable[[SlotBad | SlotsUsed | SlotsWanted], None]


class Found(NamedTuple):
    """The runs that hold the first `num_tokens` tokens, each with where to leave it.

    `match` is how far the prompt is known, which may be further than it can be taken up: with
    `is_retreat` it ended inside a picture.
    """

    match: Match
    num_tokens: int
    path: list[tuple[Run, int]]
    is_retreat: bool = False


class Restorer:
    """Looks prompts up and brings their KV back. `report` sends an event to the server."""

    def __init__(self, tier_state: TierState, reader: SlotReader | None, report: Report) -> None:
        self._state = tier_state
        self._hot = tier_state.hot
        self._reader = reader
        self._report = report
        self._reading: dict[Run, list[CacheCursor]] = {}
        self._loading: set[Run] = set()

    # Looking up

    def find(self, cursor: CacheCursor) -> Found:
        """How much of a prompt can be taken up, its last token excepted."""
        tree, prompt = self._hot.tree, (cursor.token_ids, cursor.block_hashes)
        match = tree.match(*prompt, cursor.root)
        num_tokens = min(match.num_tokens, len(cursor.token_ids) - 1)
        if cursor.limit is not None:
            num_tokens = min(num_tokens, cursor.limit)
        span = around(cursor.media, num_tokens)
        num_tokens = span.start if span is not None else num_tokens
        run = match.run
        if self._state.needs_state:
            run = tree.state(*prompt, num_tokens, cursor.root)
            num_tokens = run.end if run is not None else 0
        return Found(match, num_tokens, path_to(run, num_tokens), span is not None)

    def _following(self, cursor: CacheCursor, position: int) -> list[Run]:
        """What is known of a prompt again behind pieces after `position` that are lost."""
        if self._state.needs_state or cursor.limit is not None:
            return []
        following: list[Run] = []
        prompt = cursor.token_ids, cursor.block_hashes
        while more := self._hot.tree.next_loose(*prompt, position, cursor.root):
            following += [run for run, _ in more]
            position = more[-1][1]
        return following

    def num_at_hand(self, cursor: CacheCursor) -> int:
        """How many of a prompt's tokens are in memory."""
        found = self.find(cursor)
        missing = (run.start for run, _ in found.path if self._hot[run].kv is None)
        return min(missing, default=found.num_tokens)

    def begin(self, cursor: CacheCursor) -> None:
        """Look a prompt up and ask for what is only on disk; `cursor.is_waiting` says whether."""
        if cursor.mode == "off":
            return
        cursor.started_s = time.perf_counter()
        found = self.find(cursor)
        cursor.give_up_s = cursor.started_s + _patience_s(self._state, found)
        self._ask(cursor, found)
        cursor.use = CacheUse(tier=_tier_of(cursor, found), num_tokens=found.num_tokens)

    def bring(self, runs: Sequence[Run]) -> CacheCursor:
        """Have runs read for nobody yet; the cursor must be released when it waits no longer."""
        cursor = CacheCursor(mode="off")
        for run in runs:
            self._read(cursor, run, tokens_only=False)
        return cursor

    def _ask(self, cursor: CacheCursor, found: Found) -> None:
        """Have read what is missing on the way, or the tokens that might lead further."""
        self._pin(cursor, [run for run, _ in found.path])
        missing = [run for run, _ in found.path if self._hot[run].kv is None]
        if missing and not _is_worth_reading(self._state, missing, found):
            cursor.limit, cursor.reason = missing[0].start, "slower_than_prefill"
            return
        following = self._following(cursor, found.num_tokens)
        for run in (*missing, *(one for one in following if self._hot[one].kv is None)):
            self._read(cursor, run, tokens_only=False)
        limit = len(cursor.token_ids) - 1
        if missing or self._state.needs_state or found.num_tokens >= limit:
            return
        unread = sorted(found.match.unread, key=lambda run: -self._hot[run].last_used_s)
        for run in unread[:_MAX_PEEKS]:
            self._read(cursor, run, tokens_only=True)

    def _read(self, cursor: CacheCursor, run: Run, *, tokens_only: bool) -> None:
        held = self._hot[run]
        if self._reader is None or (tokens_only and (run in cursor.asked or held.tier == "cold")):
            return
        cursor.asked[run] = "hot" if tokens_only else held.tier
        cursor.waiting.add(run)
        self._pin(cursor, [run])
        waiting = self._reading.setdefault(run, [])
        waiting.append(cursor)
        if held.tier == "cold":
            self._report(SlotsWanted(ids=(held.id,)))
        else:
            self._load(run, tokens_only=tokens_only)

    def _load(self, run: Run, *, tokens_only: bool = False) -> None:
        """Have a slot read; all of it once, for everybody who waits for any of it."""
        if self._reader is not None and run not in self._loading:
            if not tokens_only:
                self._loading.add(run)
            self._reader.read(run, self._hot[run].id, tokens_only=tokens_only)

    def on_promoted(self, slot_ids: Sequence[str]) -> None:
        """Cold slots are warm now."""
        for run in filter(None, map(self._hot.find, slot_ids)):
            self._hot[run].tier = "warm"
            if self._reader is not None and run in self._reading:
                # Even if one is under way: it may have missed it.
                self._reader.read(run, self._hot[run].id)

    def on_away(self, slot_ids: Sequence[str]) -> None:
        """Cold slots stay where they are; who waits for one goes on with what is before it."""
        for run in filter(None, map(self._hot.find, slot_ids)):
            for cursor in self._reading.pop(run, []):
                cursor.limit = run.start if cursor.limit is None else min(run.start, cursor.limit)
                cursor.reason = cursor.reason or "away"
                self._arrived(cursor, run)

    # What the readers bring

    def on_read(self, read: SlotRead) -> None:
        """Take in what was read, and go on for the cursors that waited for it."""
        run = read.run
        if read.slot is not None or read.error is not None:
            self._loading.discard(run)
        cursors = self._reading.pop(run, [])
        if run in self._hot:
            try:
                self._take_in(read)
                if run not in self._hot:
                    for cursor in cursors:
                        cursor.reason = "damaged"
            except SlotMissing as error:
                # It left under its reader; the news that it is cold, or gone, is on its way.
                self._reading[run] = cursors
                self._report(_bad(self._hot[run].id, error))
                return
            except StoreError as error:
                self._on_damaged(run, error, cursors)
        for cursor in cursors:
            self._arrived(cursor, run)

    def on_lost(self, run: Run) -> None:
        """A run is forgotten; nobody needs to wait for it any more."""
        for cursor in self._reading.pop(run, []):
            self._arrived(cursor, run)

    def _arrived(self, cursor: CacheCursor, run: Run) -> None:
        cursor.waiting.discard(run)
        if not cursor.waiting and cursor.mode != "off":
            self._ask(cursor, self.find(cursor))

    def _take_in(self, read: SlotRead) -> None:
        if read.error is not None:
            raise read.error
        run = read.run
        assert read.token_ids is not None
        if len(read.token_ids) != run.num_tokens:
            raise SlotDamaged(f"it holds {len(read.token_ids)} tokens, not {run.num_tokens}")
        slot = read.slot
        if slot is not None and not _is_expected(run, slot.checked.header, self._state.model_hash):
            raise SlotDamaged("it holds another piece than the index says")
        run.token_ids = read.token_ids
        if slot is None or self._hot[run].kv is not None:
            return
        checked, header = slot.checked, slot.checked.header
        run.media, run.rope_delta = header.media, header.rope_delta
        if checked.damage and not self._state.parts.can_divide:
            raise SlotDamaged(str(checked.damage))
        kv = self._state.parts.take(header, slot.tensors)
        if checked.damage:
            self._divide(run, checked, kv)
        else:
            self._hot.attach(run, kv)
        self._state.shrink()
        self._state.counts.num_restored_bytes += checked.num_bytes
        self._state.rates.on_read(checked.num_bytes, read.seconds)

    def _divide(self, run: Run, slot: CheckedSlot, kv: RunKv) -> None:
        """Keep what is whole of a damaged slot. Raises SlotDamaged where nothing is."""
        slot_id, error = self._hot[run].id, SlotDamaged(str(slot.damage))
        parts = divide(self._state, run, kv, slot.header, slot.damage)
        if not parts:
            raise error
        self._state.counts.num_damaged += 1
        self._report(structs.replace(_bad(slot_id, error), parts=parts))

    def _on_damaged(self, run: Run, error: StoreError, cursors: Sequence[CacheCursor]) -> None:
        self._state.counts.num_damaged += 1
        for cursor in cursors:
            cursor.reason = "damaged"
        self._report(_bad(self._hot[run].id, error))
        self._state.forget(run, "damaged")

    def give_up(self, cursor: CacheCursor) -> None:
        """Reading takes longer than prefill would; go on with what is in memory."""
        self._stop_waiting(cursor)
        cursor.reason = cursor.reason or "slower_than_prefill"

    def release(self, cursor: CacheCursor) -> None:
        """The cursor needs its runs no longer."""
        self._stop_waiting(cursor)
        for run in cursor.pinned:
            if run in self._hot:
                self._hot[run].num_readers -= 1
        cursor.pinned.clear()
        self._state.shrink()

    def _stop_waiting(self, cursor: CacheCursor) -> None:
        for run in cursor.waiting:
            if cursor in self._reading.get(run, []):
                self._reading[run].remove(cursor)
        cursor.waiting.clear()

    def _pin(self, cursor: CacheCursor, runs: Sequence[Run]) -> None:
        for run in (one for one in runs if one not in cursor.pinned):
            cursor.pinned[run] = None
            self._hot[run].num_readers += 1

    # Taking up

    def restore(self, cursor: CacheCursor, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        Of those the request had the first `num_had` before.
        """
        if cursor.mode == "off":
            cursor.use = CacheUse(reason=cursor.reason or "off")
            return self._state.model.new_kv(), 0
        start_s = cursor.started_s if cursor.asked else time.perf_counter()
        found = self._usable(cursor)
        kv = self._taken_up(found, len(cursor.token_ids) - found.num_tokens)
        self._state.counts.vlm_retreat += found.is_retreat
        if found.num_tokens:
            self._mark_used(found, cursor)
        reason, at = _why_no_more(self._state, cursor, found, num_had)
        num_gained = found.num_tokens - num_had
        restore_s = time.perf_counter() - start_s if found.num_tokens else 0.0
        cursor.use = CacheUse(
            tier=_tier_of(cursor, found),
            num_tokens=cursor.use.num_tokens + num_gained if num_had else num_gained,
            restore_ms=restore_s * 1000,
            reason=reason,
            at=at,
        )
        cursor.leaf = found.path[-1][0] if found.path else None
        cursor.num_kept = found.num_tokens
        if following := self._following(cursor, found.num_tokens):
            # Each is taken up as soon as what is before it is computed, and kept.
            starts = (run.start for run in following if run.parent is None)
            cursor.boundaries = (*cursor.boundaries, *starts)
        self._state.counts.restore_s += restore_s
        self._state.counts.num_reused_tokens += num_gained
        return kv, found.num_tokens

    def _usable(self, cursor: CacheCursor) -> Found:
        """What was found, as far as it is in memory and holds these very tokens."""
        while True:
            found = self.find(cursor)
            useless = (run for run, end in found.path if not self._holds(run, end, cursor))
            if (run := next(useless, None)) is None:
                return found
            cursor.limit = run.start

    def _holds(self, run: Run, end: int, cursor: CacheCursor) -> bool:
        """Hashes only find; the tokens themselves decide, and the pictures among them."""
        if self._hot[run].kv is None or run.token_ids is None:
            return False
        is_same = num_common(run.token_ids, 0, cursor.token_ids, run.start) >= end - run.start
        pictures = overlapping(cursor.media, run.start, end)
        is_same &= overlapping(run.media, run.start, end) == pictures
        is_same &= end < run.end or run.rope_delta == rope_delta(cursor.media, end)
        if not is_same:
            self._state.counts.exact_key_rejected_by_model_lcp += 1
        return is_same

    def _taken_up(self, found: Found, num_room: int) -> list[Any]:
        if (idle := self._state.idle_caches.take(found.path)) is not None:
            return idle
        kv, parts = self._state.model.new_kv(found.num_tokens), self._state.parts
        given = _to_give(self._hot, found) if parts.can_divide else []
        if pieces := _pieces(self._hot, found):
            for run in given:
                self._hot.give_away(run)
            (parts.move if given else parts.assemble)(kv, pieces, num_room)
        return kv

    def _mark_used(self, found: Found, cursor: CacheCursor) -> None:
        saved: list[str] = []
        longer: dict[str, float] = {}
        for run, end in found.path:
            self._hot.use(run)
            held = self._hot[run]
            held.used_by(cursor.asker, end)
            if held.is_saved:
                saved.append(held.id)
            if (longer_s := held.keep_for(*cursor.worth(run.start))) is not None:
                longer[held.id] = longer_s
        if saved:
            self._report(SlotsUsed(ids=tuple(saved), longer=longer))


def _pieces(hot: HotTier, found: Found) -> list[tuple[RunKv, int]]:
    """The KV of what was found, each up to where it is left."""
    kept = [(hot[run].kv, end - run.start) for run, end in found.path]
    return [(kv, num_tokens) for kv, num_tokens in kept if kv is not None]


def _to_give(hot: HotTier, found: Found) -> list[Run]:
    """What would be evicted once the request has its own copy: so it is never in memory twice.

    It is on disk, and nobody else is about to use it.
    """
    excess, given = hot.num_bytes - hot.budget_bytes, list[Run]()
    for run, _ in reversed(found.path):
        held = hot[run]
        if excess > 0 and held.is_saved and held.num_readers <= 1 and not held.is_state_hot:
            given.append(run)
            excess -= held.hot_bytes
    return given


def _patience_s(tier_state: TierState, found: Found) -> float:
    """How long reading may take: as long as computing that anew, on a disk a moment at least.

    With states it would begin before that. Until it is measured, what it took once counts.
    """
    path = [run for run, _ in found.path]
    if not (missing := [run for run in path if tier_state.hot[run].kv is None]):
        return _PATIENCE_S
    anew = path if tier_state.needs_state else missing
    prefill_s = tier_state.rates.prefill_s(found.num_tokens - anew[0].start)
    if prefill_s and any(tier_state.hot[run].tier == "cold" for run in missing):
        return prefill_s
    once_s = sum(tier_state.hot[run].recompute_ms for run in anew) / 1000
    return max(_PATIENCE_S, prefill_s or once_s)


def _is_worth_reading(tier_state: TierState, missing: list[Run], found: Found) -> bool:
    rates = tier_state.rates
    num_bytes = sum(tier_state.hot[run].disk_bytes for run in missing)
    prefill_s = rates.prefill_s(found.num_tokens - missing[0].start)
    read_s = rates.read_s(num_bytes, len(missing))
    return not prefill_s or rates.pays(read_s, prefill_s * _WORTH, time.monotonic())


def _why_no_more(
    tier_state: TierState, cursor: CacheCursor, found: Found, num_had: int
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
    if found.match.num_tokens > at:
        return ("no_checkpoint" if tier_state.needs_state else "evicted"), at
    if (ghost := tier_state.ghost_of(cursor, at)) is not None:
        return ghost, at
    if tier_state.is_apart:
        return "away", at
    run = found.match.run
    if at and run is not None and (at < run.end or run.children):
        return "diverged", at
    return "first_seen", at


def _bad(slot_id: str, error: StoreError) -> SlotBad:
    return SlotBad(id=slot_id, reason=error.reason, message=str(error))


def _tier_of(cursor: CacheCursor, found: Found) -> CacheTier:
    """The slowest one that was needed."""
    if not found.num_tokens:
        return "none"
    order: tuple[CacheTier, ...] = ("hot", "warm", "cold")
    needed: list[CacheTier] = [cursor.asked.get(run, "hot") for run, _ in found.path]
    return max(needed, key=order.index)


def _is_expected(run: Run, header: SlotHeader, model_hash: bytes) -> bool:
    """The index only says where to look; the file decides what it holds."""
    said = (header.model, header.start, header.end, header.has_state, header.root)
    known = (model_hash, run.start, run.end, run.has_state, run.root)
    hashes = (header.start_hash, header.block_hashes, header.end_hash)
    return said == known and hashes == (run.start_hash, run.block_hashes, run.end_hash)
