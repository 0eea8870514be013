"""Restore: how far a prompt is known, reading what is only on disk, filling fresh layer caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from runtime.kv.divide import divide
from runtime.kv.ground import Ground
from runtime.kv.media import around, overlapping, rope_delta
from runtime.kv.pack import RunKv
from runtime.kv.prefix import Match, Run, num_common, path_to
from runtime.kv.reader import LoadedSlot, SlotRead, SlotReader
from runtime.kv.trail import Trail
from runtime.types import CacheTier, CacheUse, MissReason
from runtime.wire import SlotBad, SlotsUsed, SlotsWanted
from store.errors import SlotDamaged, SlotMissing, StoreError
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

    def __init__(self, ground: Ground, reader: SlotReader | None, report: Report) -> None:
        self._ground = ground
        self._hot = ground.hot
        self._reader = reader
        self._report = report
        self._reading: dict[Run, list[Trail]] = {}
        self._loading: set[Run] = set()

    # Looking up

    def find(self, trail: Trail) -> Found:
        """How much of a prompt can be taken up, its last token excepted."""
        match = self._hot.tree.match(trail.token_ids, trail.block_hashes, trail.root)
        num_tokens = min(match.num_tokens, len(trail.token_ids) - 1)
        if trail.limit is not None:
            num_tokens = min(num_tokens, trail.limit)
        span = around(trail.media, num_tokens)
        num_tokens = span.start if span is not None else num_tokens
        run = match.run
        if self._ground.needs_state:
            run = self._hot.tree.state(trail.token_ids, trail.block_hashes, num_tokens, trail.root)
            num_tokens = run.end if run is not None else 0
        return Found(match, num_tokens, path_to(run, num_tokens), span is not None)

    def _following(self, trail: Trail, position: int) -> list[Run]:
        """What is known of a prompt again behind pieces after `position` that are lost."""
        if self._ground.needs_state or trail.limit is not None:
            return []
        following: list[Run] = []
        prompt = trail.token_ids, trail.block_hashes
        while more := self._hot.tree.next_loose(*prompt, position, trail.root):
            following += [run for run, _ in more]
            position = more[-1][1]
        return following

    def num_at_hand(self, trail: Trail) -> int:
        """How many of a prompt's tokens are in memory."""
        found = self.find(trail)
        missing = (run.start for run, _ in found.path if self._hot[run].kv is None)
        return min(missing, default=found.num_tokens)

    def begin(self, trail: Trail) -> None:
        """Look a prompt up and ask for what is only on disk; `trail.is_waiting` says whether."""
        if trail.mode == "off":
            return
        trail.started_s = time.perf_counter()
        found = self.find(trail)
        trail.give_up_s = trail.started_s + _patience_s(self._ground, found)
        self._ask(trail, found)
        trail.use = CacheUse(tier=_tier_of(trail, found), num_tokens=found.num_tokens)

    def bring(self, runs: Sequence[Run]) -> Trail:
        """Have runs read for nobody yet; the trail must be released when it waits no longer."""
        trail = Trail(mode="off")
        for run in runs:
            self._read(trail, run, tokens_only=False)
        return trail

    def _ask(self, trail: Trail, found: Found) -> None:
        """Have read what is missing on the way, or the tokens that might lead further."""
        self._pin(trail, [run for run, _ in found.path])
        missing = [run for run, _ in found.path if self._hot[run].kv is None]
        if missing and not _is_worth_reading(self._ground, missing, found):
            trail.limit, trail.reason = missing[0].start, "slower_than_prefill"
            return
        following = self._following(trail, found.num_tokens)
        for run in (*missing, *(one for one in following if self._hot[one].kv is None)):
            self._read(trail, run, tokens_only=False)
        limit = len(trail.token_ids) - 1
        if missing or self._ground.needs_state or found.num_tokens >= limit:
            return
        unread = sorted(found.match.unread, key=lambda run: -self._hot[run].last_used_s)
        for run in unread[:_MAX_PEEKS]:
            self._read(trail, run, tokens_only=True)

    def _read(self, trail: Trail, run: Run, *, tokens_only: bool) -> None:
        held = self._hot[run]
        if self._reader is None or (tokens_only and (run in trail.asked or held.tier == "cold")):
            return
        trail.asked[run] = "hot" if tokens_only else held.tier
        trail.waiting.add(run)
        self._pin(trail, [run])
        waiting = self._reading.setdefault(run, [])
        waiting.append(trail)
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
        for slot_id in slot_ids:
            if (run := self._hot.find(slot_id)) is None:
                continue
            self._hot[run].tier = "warm"
            if self._reader is not None and run in self._reading:
                self._reader.read(run, slot_id)  # even if one is under way: it may have missed it

    def on_away(self, slot_ids: Sequence[str]) -> None:
        """Cold slots stay where they are; who waits for one goes on with what is before it."""
        for run in filter(None, map(self._hot.find, slot_ids)):
            for trail in self._reading.pop(run, []):
                trail.limit = run.start if trail.limit is None else min(run.start, trail.limit)
                trail.reason = trail.reason or "away"
                self._arrived(trail, run)

    # What the readers bring

    def on_read(self, read: SlotRead) -> None:
        """Take in what was read, and go on for the trails that waited for it."""
        run = read.run
        if read.slot is not None or read.error is not None:
            self._loading.discard(run)
        trails = self._reading.pop(run, [])
        if run in self._hot:
            try:
                self._take_in(read)
                if run not in self._hot:
                    for trail in trails:
                        trail.reason = "damaged"
            except SlotMissing as error:
                # It left under its reader; the news that it is cold, or gone, is on its way.
                self._reading[run] = trails
                self._report(_bad(self._hot[run].id, error))
                return
            except StoreError as error:
                self._on_damaged(run, error, trails)
        for trail in trails:
            self._arrived(trail, run)

    def on_lost(self, run: Run) -> None:
        """A run is forgotten; nobody needs to wait for it any more."""
        for trail in self._reading.pop(run, []):
            self._arrived(trail, run)

    def _arrived(self, trail: Trail, run: Run) -> None:
        trail.waiting.discard(run)
        if not trail.waiting and trail.mode != "off":
            self._ask(trail, self.find(trail))

    def _take_in(self, read: SlotRead) -> None:
        if read.error is not None:
            raise read.error
        run = read.run
        assert read.token_ids is not None
        if len(read.token_ids) != run.num_tokens:
            raise SlotDamaged(f"it holds {len(read.token_ids)} tokens, not {run.num_tokens}")
        slot = read.slot
        if slot is not None and not _is_expected(run, slot.header, self._ground.model_hash):
            raise SlotDamaged("it holds another piece than the index says")
        run.token_ids = read.token_ids
        if slot is None or self._hot[run].kv is not None:
            return
        run.media, run.rope_delta = slot.header.media, slot.header.rope_delta
        if slot.damage and not self._ground.parts.can_divide:
            raise SlotDamaged(str(slot.damage))
        kv = self._ground.parts.take(slot.header, slot.tensors)
        if slot.damage:
            self._divide(run, slot, kv)
        else:
            self._hot.attach(run, kv)
        self._ground.shrink()
        self._ground.counts.num_restored_bytes += slot.num_bytes
        self._ground.rates.on_read(slot.num_bytes, read.seconds)

    def _divide(self, run: Run, slot: LoadedSlot, kv: RunKv) -> None:
        """Keep what is whole of a damaged slot. Raises SlotDamaged where nothing is."""
        slot_id, error = self._hot[run].id, SlotDamaged(str(slot.damage))
        parts = divide(self._ground, run, kv, slot.header, slot.damage)
        if not parts:
            raise error
        self._ground.counts.num_damaged += 1
        self._report(structs.replace(_bad(slot_id, error), parts=parts))

    def _on_damaged(self, run: Run, error: StoreError, trails: Sequence[Trail]) -> None:
        self._ground.counts.num_damaged += 1
        for trail in trails:
            trail.reason = "damaged"
        self._report(_bad(self._hot[run].id, error))
        self._ground.forget(run, "damaged")

    def give_up(self, trail: Trail) -> None:
        """Reading takes longer than prefill would; go on with what is in memory."""
        self._stop_waiting(trail)
        trail.reason = trail.reason or "slower_than_prefill"

    def release(self, trail: Trail) -> None:
        """The trail needs its runs no longer."""
        self._stop_waiting(trail)
        for run in trail.pinned:
            if run in self._hot:
                self._hot[run].num_readers -= 1
        trail.pinned.clear()
        self._ground.shrink()

    def _stop_waiting(self, trail: Trail) -> None:
        for run in trail.waiting:
            if trail in self._reading.get(run, []):
                self._reading[run].remove(trail)
        trail.waiting.clear()

    def _pin(self, trail: Trail, runs: Sequence[Run]) -> None:
        for run in runs:
            if run not in trail.pinned:
                trail.pinned.append(run)
                self._hot[run].num_readers += 1

    # Taking up

    def restore(self, trail: Trail, num_had: int = 0) -> tuple[list[Any], int]:
        """Fresh layer caches with the KV of the first n tokens in them, and n.

        Of those the request had the first `num_had` before.
        """
        kv = self._ground.model.new_kv()
        if trail.mode == "off":
            trail.use = CacheUse(reason=trail.reason or "off")
            return kv, 0
        start_s = trail.started_s if trail.asked else time.perf_counter()
        found = self._usable(trail)
        self._ground.counts.vlm_retreat += found.is_retreat
        if found.num_tokens:
            self._assemble(kv, found, len(trail.token_ids) - found.num_tokens)
            self._mark_used(found, trail)
        reason, at = _why_no_more(self._ground, trail, found)
        num_gained = found.num_tokens - num_had
        restore_s = time.perf_counter() - start_s if found.num_tokens else 0.0
        trail.use = CacheUse(
            tier=_tier_of(trail, found),
            num_tokens=trail.use.num_tokens + num_gained if num_had else num_gained,
            restore_ms=restore_s * 1000,
            reason=reason,
            at=at,
        )
        trail.leaf = found.path[-1][0] if found.path else None
        trail.num_kept = found.num_tokens
        if following := self._following(trail, found.num_tokens):
            # Each is taken up as soon as what is before it is computed, and kept.
            starts = (run.start for run in following if run.parent is None)
            trail.boundaries = (*trail.boundaries, *starts)
        self._ground.counts.restore_s += restore_s
        self._ground.counts.num_reused_tokens += num_gained
        return kv, found.num_tokens

    def _usable(self, trail: Trail) -> Found:
        """What was found, as far as it is in memory and holds these very tokens."""
        while True:
            found = self.find(trail)
            useless = (run for run, end in found.path if not self._holds(run, end, trail))
            if (run := next(useless, None)) is None:
                return found
            trail.limit = run.start

    def _holds(self, run: Run, end: int, trail: Trail) -> bool:
        """Hashes only find; the tokens themselves decide, and the pictures among them."""
        if self._hot[run].kv is None or run.token_ids is None:
            return False
        is_same = num_common(run.token_ids, 0, trail.token_ids, run.start) >= end - run.start
        is_same &= overlapping(run.media, run.start, end) == overlapping(
            trail.media, run.start, end
        )
        is_same &= end < run.end or run.rope_delta == rope_delta(trail.media, end)
        if not is_same:
            self._ground.counts.exact_key_rejected_by_model_lcp += 1
        return is_same

    def _assemble(self, kv: list[Any], found: Found, num_room: int) -> None:
        pieces: list[tuple[RunKv, int]] = []
        for run, end in found.path:
            held = self._hot[run].kv
            assert held is not None
            pieces.append((held, end - run.start))
        self._ground.parts.assemble(kv, pieces, num_room)

    def _mark_used(self, found: Found, trail: Trail) -> None:
        saved: list[str] = []
        longer: dict[str, float] = {}
        for run, end in found.path:
            self._hot.use(run)
            held = self._hot[run]
            held.used_by(trail.asker, end)
            if not held.is_saved:
                continue
            saved.append(held.id)
            wished_class, wished_s = trail.worth(end)
            if held.ttl_s is not None and wished_s is not None and wished_s > held.ttl_s:
                held.ttl_class, held.ttl_s = wished_class, wished_s
                longer[held.id] = wished_s
        if saved:
            self._report(SlotsUsed(ids=tuple(saved), longer=longer))


def _patience_s(ground: Ground, found: Found) -> float:
    """How long reading may take: as long as computing that anew, on a disk a moment at least.

    With states it would begin before that. Until it is measured, what it took once counts.
    """
    path = [run for run, _ in found.path]
    if not (missing := [run for run in path if ground.hot[run].kv is None]):
        return _PATIENCE_S
    anew = path if ground.needs_state else missing
    prefill_s = ground.rates.prefill_s(found.num_tokens - anew[0].start)
    if prefill_s and any(ground.hot[run].tier == "cold" for run in missing):
        return prefill_s
    once_s = sum(ground.hot[run].recompute_ms for run in anew) / 1000
    return max(_PATIENCE_S, prefill_s or once_s)


def _is_worth_reading(ground: Ground, missing: list[Run], found: Found) -> bool:
    rates = ground.rates
    num_bytes = sum(ground.hot[run].disk_bytes for run in missing)
    prefill_s = rates.prefill_s(found.num_tokens - missing[0].start)
    read_s = rates.read_s(num_bytes, len(missing))
    return not prefill_s or rates.pays(read_s, prefill_s * _WORTH, time.monotonic())


def _why_no_more(ground: Ground, trail: Trail, found: Found) -> tuple[MissReason | None, int]:
    at = found.num_tokens
    if at >= len(trail.token_ids) - 1:
        return None, at
    if trail.reason is not None:
        return trail.reason, at
    if found.match.num_tokens > at:
        return ("no_checkpoint" if ground.needs_state else "evicted"), at
    if (ghost := ground.ghost_of(trail, at)) is not None:
        return ghost, at
    if ground.is_apart:
        return "away", at
    run = found.match.run
    if at and run is not None and (at < run.end or run.children):
        return "diverged", at
    return "first_seen", at


def _bad(slot_id: str, error: StoreError) -> SlotBad:
    return SlotBad(id=slot_id, reason=error.reason, message=str(error))


def _tier_of(trail: Trail, found: Found) -> CacheTier:
    """The slowest one that was needed."""
    if not found.num_tokens:
        return "none"
    order: tuple[CacheTier, ...] = ("hot", "warm", "cold")
    needed: list[CacheTier] = [trail.asked.get(run, "hot") for run, _ in found.path]
    return max(needed, key=order.index)


def _is_expected(run: Run, header: SlotHeader, model_hash: bytes) -> bool:
    """The index only says where to look; the file decides what it holds."""
    said = (header.model, header.start, header.end, header.has_state, header.root)
    known = (model_hash, run.start, run.end, run.has_state, run.root)
    hashes = (header.start_hash, header.block_hashes, header.end_hash)
    return said == known and hashes == (run.start_hash, run.block_hashes, run.end_hash)
