"""Commit: what was computed becomes runs in the hot tier, and slots behind the requests."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.kv.eviction import densest
from runtime.kv.ground import Ground
from runtime.kv.hot import Ended, Held
from runtime.kv.media import around, overlapping, rope_delta
from runtime.kv.notes import Notes
from runtime.kv.parts import Span
from runtime.kv.prefix import Match, Run, path_to, run_of
from runtime.kv.trail import Trail
from runtime.kv.writer import SlotWriter, WriteJob
from store.keyed_names import Asker
from store.types import Piece, SlotHeader

RUN_TOKENS = 2048
RUN_BYTES = 256 * 1024 * 1024
MAX_PASSING = 8
"""Checkpoints of one chain that are in memory only."""


class Committer:
    """Cuts live caches into runs. `writer` is None without a disk."""

    def __init__(self, ground: Ground, writer: SlotWriter | None, notes: Notes) -> None:
        self._ground = ground
        self._hot = ground.hot
        self._writer = writer
        self._notes = notes

    def commit(self, trail: Trail, kv: Sequence[Any], end: int, *, ends_turn: bool = False) -> None:
        """Keep the KV of the trail's tokens up to `end`, of which `kv` holds at least that many.

        With layers that cannot be sliced the caches must stand exactly at `end`. A picture is kept
        once all of it is there. `ends_turn` says that a whole answer ends there.
        """
        if trail.mode == "off":
            return
        if (span := around(trail.media, end)) is not None:
            if self._ground.needs_state:
                return
            end = span.start
        if trail.mode == "prefix" and end > trail.prefix_end:
            if self._ground.needs_state:
                return
            end = trail.prefix_end
        self._catch_up(trail, end)
        whole = end
        end = self._fitting(trail, kv, end)
        while trail.num_kept < end:
            stop = self._to_next_known(trail, end)
            self._append(trail, kv, stop)
            if stop < end:
                self._catch_up(trail, end)
        if ends_turn and trail.leaf is not None and trail.num_kept == whole:
            held = self._hot[trail.leaf]
            held.ends_turn = True
            if self._writer is not None and trail.ttl_s != 0:
                held.ends(trail.asker, Ended(trail.num_kept, trail.ttl_s))
        self._write(trail)
        if ends_turn:
            self._prefer(trail)
        self._ground.shrink()

    def commit_begun(self, trail: Trail, kv: Sequence[Any], end: int) -> None:
        """Keep what is computed of a prompt that may go no further: whole blocks of it.

        With layers that cannot be sliced it is the state at `end`, in memory only.
        """
        if self._ground.needs_state:
            trail.passing |= {end}
        else:
            end -= end % self._ground.chain.block_size
        if end > trail.num_kept:
            self.commit(trail, kv, end)

    def keep_exactly(self, trail: Trail, kv: Sequence[Any], end: int) -> Run | None:
        """The run that ends at `end`, with what comes before it fit for the disk.

        It is made from `kv` if need be: whole blocks are those of the runs that have them, only
        the last tokens are its own. None where layers that cannot be sliced have passed `end`
        already, or where there is no room.
        """
        run = self._ending(trail, end)
        if run is not None or self._ground.needs_state:
            return run
        copy = trail.fork()
        copy.leaf, copy.num_kept = None, 0
        if self._fitting(copy, kv, end) < end:
            return None
        self._catch_up(copy, end)
        copy.num_kept = min(copy.num_kept, end - 1)
        self._append(copy, kv, end)
        self._write(copy)
        return copy.leaf

    def _known(self, trail: Trail, end: int) -> Match:
        """How far the first `end` tokens of a trail are in the tree."""
        hashes = trail.block_hashes[: end // self._ground.chain.block_size]
        return self._hot.tree.match(trail.token_ids[:end], hashes, trail.root)

    def _ending(self, trail: Trail, end: int) -> Run | None:
        chain = self._ground.chain
        size = chain.block_size
        root = trail.root or chain.root
        last_block = trail.block_hashes[end // size - 1] if end >= size else root
        end_hash = chain.end_hash(last_block, trail.token_ids[end - end % size : end])
        fitting = (run for run in self._hot.tree if (run.end, run.end_hash) == (end, end_hash))
        there = (run for run in fitting if not run.is_loose)
        return next((run for run in there if not self._is_barred(trail, run, end)), None)

    def extend_hashes(self, trail: Trail) -> None:
        """The trail has grown: hash the blocks that are complete now."""
        trail.block_hashes = self._ground.chain.block_hashes(
            trail.token_ids, known=trail.block_hashes, root=trail.root
        )

    def _catch_up(self, trail: Trail, end: int) -> None:
        """Somebody else may have kept these tokens meanwhile, or the trail's leaf may be gone."""
        match = self._known(trail, end)
        leaf = trail.leaf
        lost = leaf is not None and (leaf not in self._hot or leaf.is_loose)
        if lost or match.num_tokens > trail.num_kept:
            trail.leaf, trail.num_kept = match.run, match.num_tokens
        if self._is_barred(trail, trail.leaf, trail.num_kept):
            match = self._hot.tree.match_visible(
                trail.token_ids[:end], trail.root, self._is_private
            )
            trail.leaf, trail.num_kept = match.run, match.num_tokens
        if self._ground.needs_state and trail.num_kept == end:
            self._branch_for_state(trail, end)

    def _is_private(self, run: Run) -> bool:
        """Who wanted it wants nothing of it on disk."""
        return self._hot[run].ttl_s == 0

    def _is_barred(self, trail: Trail, leaf: Run | None, end: int) -> bool:
        """It is to be on disk, and cannot be there: it goes off in the midst of a private run."""
        if self._writer is None or trail.ttl_s == 0:
            return False
        path = path_to(leaf, end)
        return any(leave < run.end and self._is_private(run) for run, leave in path)

    def _branch_for_state(self, trail: Trail, end: int) -> None:
        """All tokens are kept, but no state of them: a run of the last token is to carry it."""
        tree = self._hot.tree
        run = tree.state(trail.token_ids, trail.block_hashes, end, trail.root)
        is_there = run is not None and run.end == end and not self._is_barred(trail, run, end)
        if run is not None and is_there and self._is_enough(run, trail):
            trail.leaf = run
        elif trail.leaf is not None and end > 0:
            trail.num_kept = end - 1
            trail.leaf = path_to(trail.leaf, end - 1)[-1][0] if end > 1 else None

    def _is_enough(self, run: Run, trail: Trail) -> bool:
        """Its state lives as long as this request wants it to."""
        return run.end in trail.passing or not self._hot[run].is_state_hot

    def _fitting(self, trail: Trail, kv: Sequence[Any], end: int) -> int:
        """Up to where it is worth keeping: what no disk takes must fit into memory, or it would be
        cut only to be evicted, and cut again with the next slice.
        """
        if self._writer is not None and self._writer.takes(trail.ttl_class) and trail.ttl_s != 0:
            return end
        path = path_to(trail.leaf, trail.num_kept)
        room = self._hot.budget_bytes - sum(self._hot[run].hot_bytes for run, _ in path)
        each = max(1, self._ground.parts.bytes_per_token(kv))
        fitting = trail.num_kept + max(room, 0) // each
        if fitting >= end:
            return end
        return trail.num_kept if self._ground.needs_state else fitting

    def _to_next_known(self, trail: Trail, end: int) -> int:
        """Where what comes after the trail's leaf is known again, `end` at the latest."""
        if self._ground.needs_state:
            return end
        hashes = trail.block_hashes[: end // self._ground.chain.block_size]
        tree = self._hot.tree
        following = tree.next_loose(trail.token_ids[:end], hashes, trail.num_kept, trail.root)
        return following[0][0].start if following else end

    def _append(self, trail: Trail, kv: Sequence[Any], end: int) -> None:
        self._go_back_to_block(trail)
        parts = self._ground.parts
        size = max(1, min(RUN_TOKENS, RUN_BYTES // max(1, parts.bytes_per_token(kv))))
        spans: list[Span] = []
        start = trail.num_kept
        while start < end:
            stop = _whole(trail, start, min(start + size, end))
            spans.append(Span(start, stop, parts.needs_state and stop == end))
            start = stop
        leaf = trail.leaf
        for span, one in zip(spans, parts.cut(kv, spans), strict=True):
            leaf = self._new_run(trail, leaf, span.start, span.end)
            leaf.has_state = span.has_state
            self._hot.add(leaf, self._held(trail, leaf))
            self._hot.attach(leaf, one)
            self._hot[leaf].is_state_hot = leaf.has_state and leaf.end in trail.passing
        trail.leaf, trail.num_kept = leaf, end
        self._thin(leaf)

    def _go_back_to_block(self, trail: Trail) -> None:
        """What leaves a run before its end shares whole blocks with it: fewer than one is none.

        Else each conversation would hang on the first one by the tokens that all templates begin
        with, and be lost with it.
        """
        if trail.leaf is None or trail.num_kept == trail.leaf.end:
            return
        start = trail.num_kept - trail.num_kept % self._ground.chain.block_size
        path = path_to(trail.leaf, start)
        trail.leaf, trail.num_kept = (path[-1][0] if path else None), start

    def _thin(self, leaf: Run | None) -> None:
        """Of the states on a chain that are in memory only, keep a few: dense at its end."""
        passing = [
            run for run, _ in path_to(leaf, leaf.end if leaf else 0) if self._hot[run].is_state_hot
        ]
        while len(passing) > MAX_PASSING:
            run = passing.pop(densest([run.end for run in passing]))
            kv = self._hot[run].kv
            assert kv is not None
            self._hot.attach(run, self._ground.parts.bare(kv))

    def _new_run(self, trail: Trail, parent: Run | None, start: int, end: int) -> Run:
        chain = self._ground.chain
        size = chain.block_size
        above = trail.block_hashes[start // size - 1] if start >= size else trail.root or chain.root
        start_hash = chain.end_hash(above, trail.token_ids[start - start % size : start])
        hashes = trail.block_hashes[start // size : end // size]
        hashes = (start_hash if start else b"", *hashes)
        run = run_of(chain, parent, start, end, hashes, root=trail.root)
        run.token_ids = array("I", trail.token_ids[start:end])
        run.end_hash = chain.end_hash(run.last_block, trail.token_ids[end - end % size : end])
        run.media = overlapping(trail.media, start, end)
        run.rope_delta = rope_delta(trail.media, end)
        return run

    def _held(self, trail: Trail, run: Run) -> Held:
        ttl_class, ttl_s = trail.worth(run.end)
        return Held(
            id=os.urandom(16).hex(),
            last_used_s=time.time(),
            recompute_ms=run.num_tokens * self._ground.rates.prefill_s_per_token * 1000,
            ttl_class=ttl_class,
            ttl_s=ttl_s,
            askers={trail.asker: run.end},
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
            ends = self._ground.losses.ends_between(run.start, run.end)
            self._queue(self._writer, run, self._hot.asker_of(run), ends)
        return True

    def _write(self, trail: Trail) -> None:
        """Queue what is not on disk yet on the way to the trail's leaf, parents first."""
        if self._writer is None or trail.ttl_s == 0 or self._ground.is_apart:
            return
        for run, left in path_to(trail.leaf, trail.num_kept):
            held = self._hot[run]
            if held.is_written:
                continue
            if held.ttl_s == 0 and left == run.end:
                # Somebody wanted it in memory only; this request says all of it, and keeps it.
                held.ttl_class, held.ttl_s = trail.ttl_class, trail.ttl_s
            if held.kv is None or held.ttl_s == 0:
                return
            losses = self._ground.losses
            ends = list(losses.ends_of(self._ground.chain, trail, run.start, left))
            ends += losses.ends_between(left, run.end)
            asker = trail.asker if left == run.end else self._hot.asker_of(run)
            self._queue(self._writer, run, asker, ends)

    def _queue(self, writer: SlotWriter, run: Run, asker: Asker, ends: Iterable[Piece]) -> None:
        """Have a run written; `ends` are those that were lost and are on disk again with it.

        The server notes first that it is in memory only.
        """
        held = self._hot[run]
        held.is_written = True
        held.ended.pop(asker, None)
        held.note(asker, run.end)
        self._notes.queued(run, asker, ends)
        writer.put(_job(self._ground, run, asker))

    def _prefer(self, trail: Trail) -> None:
        """All of a conversation that waits for its user is written before anything older."""
        if self._writer is not None:
            path = path_to(trail.leaf, trail.num_kept)
            self._writer.prefer(
                [held.id for run, _ in path if not (held := self._hot[run]).is_saved]
            )


def _job(ground: Ground, run: Run, asker: Asker) -> WriteJob:
    """What is to be written of a run that is in memory."""
    held = ground.hot[run]
    assert held.kv is not None
    assert run.token_ids is not None
    has_state = run.has_state and not held.is_state_hot
    packed = ground.parts.pack(held.kv if has_state else held.kv._replace(state=None))
    header = SlotHeader(
        id=held.id,
        model=ground.model_hash,
        start_hash=run.start_hash,
        start=run.start,
        end=run.end,
        block_size=ground.chain.block_size,
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
        packed.tensors,
        asker,
        held.ends_turn,
        parent=ground.hot[run.parent].id if run.parent is not None else None,
        num_parts=packed.num_parts,
        whole=packed.whole,
    )


def _whole(trail: Trail, start: int, stop: int) -> int:
    """Where a run that begins at `start` may end near `stop`: before a picture or after it."""
    span = around(trail.media, stop)
    if span is None:
        return stop
    return span.start if span.start > start else span.end
