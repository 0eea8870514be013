"""Commit: what was computed becomes runs in the hot tier, and slots behind the requests."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.kv.cursor import CacheCursor
from runtime.kv.hot import Ended, Held
from runtime.kv.media import around, overlapping, rope_delta
from runtime.kv.notes import Notes
from runtime.kv.parts import Span
from runtime.kv.prefix_tree import Match, Run, path_to, run_of
from runtime.kv.state import TierState
from runtime.kv.writer import SlotWriter, WriteJob
from store.eviction import densest
from store.keyed_names import Asker
from store.types import PrefixPiece, SlotHeader

RUN_TOKENS = 2048
RUN_BYTES = 256 * 1024 * 1024
STRAY_TOKENS = 64
"""Of the end of an answer, which the client gives back in another way."""

MAX_PASSING = 8
"""Checkpoints of one chain that are in memory only."""


class Committer:
    """Cuts live caches into runs. `writer` is None without a disk."""

    def __init__(self, tier_state: TierState, writer: SlotWriter | None, notes: Notes) -> None:
        self._state = tier_state
        self._hot = tier_state.hot
        self._writer = writer
        self._notes = notes

    def commit(
        self, cursor: CacheCursor, kv: Sequence[Any], end: int, *, ends_turn: bool = False
    ) -> None:
        """Keep the KV of the cursor's tokens up to `end`, of which `kv` holds at least that many.

        With layers that cannot be sliced the caches must stand exactly at `end`. A picture is kept
        once all of it is there. `ends_turn` says that a whole answer ends there.
        """
        if cursor.mode == "off":
            return
        if (span := around(cursor.media, end)) is not None:
            if self._state.needs_state:
                return
            end = span.start
        if cursor.mode == "prefix" and end > cursor.prefix_end:
            if self._state.needs_state:
                return
            end = cursor.prefix_end
        self._catch_up(cursor, end)
        whole = end
        end = self._fitting(cursor, kv, end)
        while cursor.num_kept < end and self._state.parts.has(kv, cursor.num_kept):
            stop = self._to_next_known(cursor, end)
            self._append(cursor, kv, stop)
            if stop < end:
                self._catch_up(cursor, end)
        if ends_turn and cursor.leaf is not None and cursor.num_kept == whole:
            held = self._hot[cursor.leaf]
            held.ends_turn = True
            if self._writer is not None and cursor.ttl_s != 0:
                held.ends(cursor.asker, Ended(cursor.num_kept, cursor.ttl_s))
        self._write(cursor)
        if ends_turn:
            self._prefer(cursor)
        self._state.shrink()

    def commit_begun(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> None:
        """Keep what is computed of a prompt that may go no further: whole blocks of it.

        With layers that cannot be sliced it is the state at `end`, in memory only.
        """
        if self._state.needs_state:
            cursor.passing |= {end}
        else:
            end -= end % self._state.chain.block_size
        if end > cursor.num_kept:
            self.commit(cursor, kv, end)

    def keep_exactly(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> Run | None:
        """The run that ends at `end`, with what comes before it fit for the disk.

        It is made from `kv` if need be, or from memory where `kv` is quantised by now: whole blocks
        are those of the runs that have them, only the last tokens are its own. None where layers
        that cannot be sliced have passed `end` already, or where there is no room.
        """
        run = self._ending(cursor, end)
        if run is not None or self._state.needs_state:
            return run
        copy = cursor.fork()
        copy.leaf, copy.num_kept = None, 0
        if self._fitting(copy, kv, end) < end:
            return None
        self._catch_up(copy, end)
        if not self._state.parts.has(kv, end - 1):
            kept = _assembled(self._state, copy.leaf, copy.num_kept)
            if copy.num_kept < end or kept is None:
                return None
            kv = kept
        copy.num_kept = min(copy.num_kept, end - 1)
        self._append(copy, kv, end)
        self._write(copy)
        return copy.leaf

    def _known(self, cursor: CacheCursor, end: int) -> Match:
        """How far the first `end` tokens of a cursor are in the tree."""
        hashes = cursor.block_hashes[: end // self._state.chain.block_size]
        return self._hot.tree.match(cursor.token_ids[:end], hashes, cursor.root)

    def _ending(self, cursor: CacheCursor, end: int) -> Run | None:
        chain = self._state.chain
        size = chain.block_size
        root = cursor.root or chain.root
        last_block = cursor.block_hashes[end // size - 1] if end >= size else root
        end_hash = chain.end_hash(last_block, cursor.token_ids[end - end % size : end])
        fitting = (run for run in self._hot.tree if (run.end, run.end_hash) == (end, end_hash))
        there = (run for run in fitting if not run.is_loose)
        return next((run for run in there if not self._is_barred(cursor, run, end)), None)

    def extend_hashes(self, cursor: CacheCursor) -> None:
        """The cursor has grown: hash the blocks that are complete now."""
        cursor.block_hashes = self._state.chain.block_hashes(
            cursor.token_ids, known=cursor.block_hashes, root=cursor.root
        )

    def _catch_up(self, cursor: CacheCursor, end: int) -> None:
        """Somebody else may have kept these tokens meanwhile, or the cursor's leaf may be gone."""
        match = self._known(cursor, end)
        leaf = cursor.leaf
        lost = leaf is not None and (leaf not in self._hot or leaf.is_loose)
        if lost or match.num_tokens > cursor.num_kept:
            cursor.leaf, cursor.num_kept = match.run, match.num_tokens
        if self._is_barred(cursor, cursor.leaf, cursor.num_kept):
            match = self._hot.tree.match_visible(
                cursor.token_ids[:end], cursor.root, self._is_private
            )
            cursor.leaf, cursor.num_kept = match.run, match.num_tokens
        if self._state.needs_state and cursor.num_kept == end:
            self._branch_for_state(cursor, end)

    def _is_private(self, run: Run) -> bool:
        """Who wanted it wants nothing of it on disk."""
        return self._hot[run].ttl_s == 0

    def _is_barred(self, cursor: CacheCursor, leaf: Run | None, end: int) -> bool:
        """It is to be on disk, and cannot be there: it goes off in the midst of a private run."""
        if self._writer is None or cursor.ttl_s == 0:
            return False
        path = path_to(leaf, end)
        return any(leave < run.end and self._is_private(run) for run, leave in path)

    def _branch_for_state(self, cursor: CacheCursor, end: int) -> None:
        """All tokens are kept, but no state of them: a run of the last token is to carry it."""
        tree = self._hot.tree
        run = tree.state(cursor.token_ids, cursor.block_hashes, end, cursor.root)
        is_there = run is not None and run.end == end and not self._is_barred(cursor, run, end)
        if run is not None and is_there and self._is_enough(run, cursor):
            cursor.leaf = run
        elif cursor.leaf is not None and end > 0:
            cursor.num_kept = end - 1
            cursor.leaf = path_to(cursor.leaf, end - 1)[-1][0] if end > 1 else None

    def _is_enough(self, run: Run, cursor: CacheCursor) -> bool:
        """Its state lives as long as this request wants it to."""
        return run.end in cursor.passing or not self._hot[run].is_state_hot

    def _fitting(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> int:
        """Up to where it is worth keeping: what no disk takes must fit into memory, or it would be
        cut only to be evicted, and cut again with the next slice.
        """
        if self._writer is not None and self._writer.takes(cursor.ttl_class) and cursor.ttl_s != 0:
            return end
        path = path_to(cursor.leaf, cursor.num_kept)
        room = self._hot.budget_bytes - sum(self._hot[run].hot_bytes for run, _ in path)
        each = max(1, self._state.parts.bytes_per_token(kv))
        fitting = cursor.num_kept + max(room, 0) // each
        if fitting >= end:
            return end
        return cursor.num_kept if self._state.needs_state else fitting

    def _to_next_known(self, cursor: CacheCursor, end: int) -> int:
        """Where what comes after the cursor's leaf is known again, `end` at the latest."""
        if self._state.needs_state:
            return end
        hashes = cursor.block_hashes[: end // self._state.chain.block_size]
        tree = self._hot.tree
        following = tree.next_loose(cursor.token_ids[:end], hashes, cursor.num_kept, cursor.root)
        return following[0][0].start if following else end

    def _append(self, cursor: CacheCursor, kv: Sequence[Any], end: int) -> None:
        self._go_back_to_block(cursor)
        parts = self._state.parts
        size = max(1, min(RUN_TOKENS, RUN_BYTES // max(1, parts.bytes_per_token(kv))))
        spans: list[Span] = []
        start = cursor.num_kept
        while start < end:
            stop = _whole(cursor, start, min(start + size, end))
            spans.append(Span(start, stop, parts.needs_state and stop == end))
            start = stop
        leaf = cursor.leaf
        for span, one in zip(spans, parts.cut(kv, spans), strict=True):
            leaf = self._new_run(cursor, leaf, span.start, span.end)
            leaf.has_state = span.has_state
            self._hot.add(leaf, self._held(cursor, leaf))
            self._hot.attach(leaf, one)
            self._hot[leaf].is_state_hot = leaf.has_state and leaf.end in cursor.passing
        cursor.leaf, cursor.num_kept = leaf, end
        self._thin(leaf)

    def _go_back_to_block(self, cursor: CacheCursor) -> None:
        """What leaves a run before its end shares whole blocks with it: fewer than one is none.

        Else each conversation would hang on the first one by the tokens that all templates begin
        with, and be lost with it. What goes on right before the end of a turn is the next one, of
        whose answer a client gives the last tokens in another way.
        """
        if cursor.leaf is None or cursor.num_kept == cursor.leaf.end:
            return
        if self._hot[cursor.leaf].ends_turn and cursor.leaf.end - cursor.num_kept <= STRAY_TOKENS:
            return
        start = cursor.num_kept - cursor.num_kept % self._state.chain.block_size
        path = path_to(cursor.leaf, start)
        cursor.leaf, cursor.num_kept = (path[-1][0] if path else None), start

    def _thin(self, leaf: Run | None) -> None:
        """Of the states on a chain that are in memory only, keep a few: dense at its end."""
        passing = [
            run for run, _ in path_to(leaf, leaf.end if leaf else 0) if self._hot[run].is_state_hot
        ]
        while len(passing) > MAX_PASSING:
            run = passing.pop(densest([run.end for run in passing]))
            kv = self._hot[run].kv
            assert kv is not None
            self._hot.attach(run, self._state.parts.bare(kv))

    def _new_run(self, cursor: CacheCursor, parent: Run | None, start: int, end: int) -> Run:
        chain = self._state.chain
        size = chain.block_size
        above = (
            cursor.block_hashes[start // size - 1] if start >= size else cursor.root or chain.root
        )
        start_hash = chain.end_hash(above, cursor.token_ids[start - start % size : start])
        hashes = cursor.block_hashes[start // size : end // size]
        hashes = (start_hash if start else b"", *hashes)
        run = run_of(chain, parent, start, end, hashes, root=cursor.root)
        run.token_ids = array("I", cursor.token_ids[start:end])
        run.end_hash = chain.end_hash(run.last_block, cursor.token_ids[end - end % size : end])
        run.media = overlapping(cursor.media, start, end)
        run.rope_delta = rope_delta(cursor.media, end)
        return run

    def _held(self, cursor: CacheCursor, run: Run) -> Held:
        ttl_class, ttl_s = cursor.worth(run.start)
        return Held(
            id=os.urandom(16).hex(),
            last_used_s=time.time(),
            recompute_ms=run.num_tokens * self._state.rates.prefill_s_per_token * 1000,
            ttl_class=ttl_class,
            ttl_s=ttl_s,
            askers={cursor.asker: run.end},
        )

    def persist(self) -> bool:
        """Queue what is in memory only although it may be on disk, for as long as there is room.

        Whether that was all of it.
        """
        if self._writer is None:
            return True
        for run in self._hot.unwritten():
            held, parent = self._hot[run], run.parent
            is_private = held.ttl_s == 0 or (parent and not self._hot[parent].is_written)
            if held.kv is None or is_private:
                continue
            if not self._writer.has_room:
                return False
            # Nobody is there to compare its tokens: whatever end it may go through.
            ends = self._state.losses.ends_between(run.start, run.end)
            self._queue(self._writer, run, self._hot.asker_of(run), ends)
        return True

    def _write(self, cursor: CacheCursor) -> None:
        """Queue what is not on disk yet on the way to the cursor's leaf, parents first."""
        if self._writer is None or cursor.ttl_s == 0 or self._state.is_apart:
            return
        for run, left in path_to(cursor.leaf, cursor.num_kept):
            held = self._hot[run]
            if held.is_written:
                continue
            if held.ttl_s == 0 and left == run.end:
                # Somebody wanted it in memory only; this request says all of it, and keeps it.
                held.ttl_class, held.ttl_s = cursor.ttl_class, cursor.ttl_s
            if held.kv is None or held.ttl_s == 0:
                return
            losses = self._state.losses
            ends = list(losses.ends_of(self._state.chain, cursor, run.start, left))
            ends += losses.ends_between(left, run.end)
            asker = cursor.asker if left == run.end else self._hot.asker_of(run)
            self._queue(self._writer, run, asker, ends)

    def _queue(
        self, writer: SlotWriter, run: Run, asker: Asker, ends: Iterable[PrefixPiece]
    ) -> None:
        """Have a run written; `ends` are those that were lost and are on disk again with it.

        The server notes first that it is in memory only.
        """
        held = self._hot[run]
        held.is_written = True
        held.ended.pop(asker, None)
        held.note(asker, run.end)
        self._notes.queued(run, asker, ends)
        writer.put(_job(self._state, run, asker))

    def _prefer(self, cursor: CacheCursor) -> None:
        """All of a conversation that waits for its user is written before anything older."""
        if self._writer is not None:
            path = path_to(cursor.leaf, cursor.num_kept)
            self._writer.prefer(
                [held.id for run, _ in path if not (held := self._hot[run]).is_saved]
            )


def _assembled(tier_state: TierState, leaf: Run | None, end: int) -> list[Any] | None:
    """Caches of so many tokens as runs in memory have them; None where one is not there."""
    path = [(run, left, tier_state.hot[run].kv) for run, left in path_to(leaf, end)]
    pieces = [(kv, left - run.start) for run, left, kv in path if kv is not None]
    if not pieces or len(pieces) < len(path):
        return None
    caches = tier_state.model.new_kv(end)
    tier_state.parts.assemble(caches, pieces, 0)
    return caches


def _job(tier_state: TierState, run: Run, asker: Asker) -> WriteJob:
    """What is to be written of a run that is in memory."""
    held = tier_state.hot[run]
    assert held.kv is not None
    assert run.token_ids is not None
    has_state = run.has_state and not held.is_state_hot
    kv = held.kv if has_state else held.kv._replace(state=None)
    packed = tier_state.parts.pack(kv, run.start)
    header = SlotHeader(
        id=held.id,
        model=tier_state.model_hash,
        start_hash=run.start_hash,
        start=run.start,
        end=run.end,
        block_size=tier_state.chain.block_size,
        block_hashes=run.block_hashes,
        end_hash=run.end_hash,
        layout=packed.layout,
        has_state=has_state,
        recompute_ms=held.recompute_ms,
        created_s=held.last_used_s,
        ttl_class=held.ttl_class,
        ttl_s=held.ttl_s,
        root=run.root,
        media=run.media,
        rope_delta=run.rope_delta,
    )
    return WriteJob(
        header,
        run.token_ids,
        packed,
        asker,
        held.ends_turn,
        parent=tier_state.hot[run.parent].id if run.parent is not None else None,
    )


def _whole(cursor: CacheCursor, start: int, stop: int) -> int:
    """Where a run that begins at `start` may end near `stop`: before a picture or after it."""
    span = around(cursor.media, stop)
    if span is None:
        return stop
    return span.start if span.start > start else span.end
