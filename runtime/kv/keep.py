"""Keeping: what was computed becomes pieces in memory, its whole blocks and the end behind them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from runtime.kv.block_memory import Piece
from runtime.kv.cursor import CacheCursor
from runtime.kv.media import around
from runtime.kv.pack import RunKv
from runtime.kv.parts import Span
from runtime.kv.state import KvState
from store.eviction import densest

STATE_TOKENS = 2048
"""Of a long prompt a state is kept each time after so many tokens."""

MAX_STATES = 8
"""Of one sequence, in memory."""


class NewPieces(NamedTuple):
    """What is kept that no slot has; `stated` were kept before, and have a state now."""

    pieces: list[Piece[RunKv]]
    stated: list[Piece[RunKv]]


class Keeper:
    """Cuts live caches into pieces."""

    def __init__(self, state: KvState, *, has_disk: bool) -> None:
        self._state = state
        self._has_disk = has_disk

    def keep(
        self,
        cursor: CacheCursor,
        kv: Sequence[Any],
        end: int,
        *,
        with_end: bool = True,
        with_state: bool = True,
    ) -> NewPieces:
        """Keep the first `end` tokens of a cursor; what is new. `kv` has at least that many.

        Without `with_end` only whole blocks are. The state of layers that cannot be sliced, for
        which the caches must stand exactly at `end`, belongs to the last piece. A picture is not
        divided by an end.
        """
        with_state = with_state and self._state.needs_state
        if cursor.mode == "prefix" and end > cursor.prefix_end:
            end, with_state = cursor.prefix_end, False
        if (span := around(cursor.media, end)) is not None:
            end, with_state = span.start, False
        is_known = end <= cursor.num_kept and not with_state
        if cursor.mode == "off" or not end or is_known:
            return NewPieces([], [])
        lacking = self._lacking(cursor, kv, end, with_end=with_end, with_state=with_state)
        spans = [one for one in lacking if not self._has_end(cursor, one)]
        pieces = [
            self._piece(cursor, span, one)
            for span, one in zip(spans, self._state.parts.cut_blocks(kv, spans), strict=True)
        ]
        there = [self._state.memory.put(piece) for piece in pieces]
        if lacking:
            last = lacking[-1].end
            cursor.num_kept = max(cursor.num_kept, last)
            cursor.ends |= {last} if last % self._state.chain.block_size else set()
        if any(span.has_state for span in spans):
            self._thin(cursor, end)
        kept = [one for one in there if one is not None]
        stated = [one for one in kept if one.has_state and one not in pieces]
        return NewPieces([one for one in kept if not one.is_written], stated)

    def _lacking(
        self, cursor: CacheCursor, kv: Sequence[Any], end: int, *, with_end: bool, with_state: bool
    ) -> list[Span]:
        """What is not in memory of it, as far as there is room for it."""
        memory, size = self._state.memory, self._state.chain.block_size
        whole = end // size
        # What left memory meanwhile may be nowhere else: with an end all of it is kept.
        is_on_disk = self._has_disk and not cursor.has_lost_slots
        first = cursor.num_kept // size if is_on_disk or not with_end else 0
        numbers = [n for n in range(first, whole) if cursor.block_hashes[n] not in memory]
        spans = [Span(n * size, (n + 1) * size, has_state=False) for n in numbers]
        if with_end and end > whole * size:
            spans.append(Span(whole * size, end, with_state))
        elif with_state and end == whole * size and whole:
            last = memory.get(cursor.block_hashes[whole - 1])
            if last is None or not last.has_state:
                spans = [one for one in spans if one.end < end]
                spans.append(Span(end - size, end, has_state=True))
        if not spans:
            cursor.num_kept = max(cursor.num_kept, whole * size)
        spans = [one for one in spans if self._state.parts.has(kv, one.start)]
        return self._fitting(cursor, kv, spans)

    def _has_end(self, cursor: CacheCursor, span: Span) -> bool:
        """It is less than a block, and in memory: whoever asks the same again says the same."""
        memory, chain = self._state.memory, self._state.chain
        if span.end - span.start == chain.block_size:
            return False
        above = cursor.above(chain, span.start // chain.block_size)
        token_ids = array("I", cursor.token_ids[span.start : span.end])
        name = chain.end_hash(above, token_ids)
        there = memory.get(name)
        if span.has_state:
            return there is not None and there.has_state
        return there is not None or memory.has_as_beginning(name, above, token_ids)

    def _fitting(self, cursor: CacheCursor, kv: Sequence[Any], spans: list[Span]) -> list[Span]:
        """What no disk takes must fit into memory, or it would be cut only to be evicted, and cut
        again with the next slice.
        """
        if not spans or (self._has_disk and cursor.ttl_s != 0):
            return spans
        memory = self._state.memory
        there = (memory.get(name) for name in cursor.block_hashes)
        room = memory.budget_bytes - sum(one.num_bytes for one in there if one is not None)
        each = max(1, self._state.parts.bytes_per_token(kv))
        fitting = spans[0].start + max(room, 0) // each
        kept = [one for one in spans if one.end <= fitting]
        return [] if self._state.needs_state and len(kept) < len(spans) else kept

    def _piece(self, cursor: CacheCursor, span: Span, kv: RunKv) -> Piece[RunKv]:
        chain, number = self._state.chain, span.start // self._state.chain.block_size
        above = cursor.above(chain, number)
        token_ids = array("I", cursor.token_ids[span.start : span.end])
        is_block = len(token_ids) == chain.block_size
        ttl_class, _ = cursor.worth(span.start)
        name = cursor.block_hashes[number] if is_block else chain.end_hash(above, token_ids)
        there = self._state.memory.get(name)
        if there is not None and there.kv.slab is not None:  # it stays a view, with a state now
            kv = there.kv._replace(state=kv.state)
        piece = Piece(
            name=name,
            above=above,
            start=span.start,
            token_ids=token_ids,
            kv=kv,
            num_bytes=kv.nbytes,
            has_state=span.has_state,
            recompute_ms=len(token_ids) * self._state.rates.prefill_s_per_token * 1000,
            ttl_class=ttl_class,
            last_used_s=time.time(),
        )
        if kv.slab is not None:
            kv.slab.pieces.add(piece)
        return piece

    def path(self, cursor: CacheCursor, end: int) -> list[Piece[RunKv]]:
        """The pieces of a cursor up to this position that are in memory."""
        memory, size = self._state.memory, self._state.chain.block_size
        names = [*cursor.block_hashes[: end // size]]
        if end % size:
            names.append(cursor.name_at(self._state.chain, end))
        return [piece for name in names if (piece := memory.get(name)) is not None]

    def _thin(self, cursor: CacheCursor, end: int) -> None:
        """Of the states of one sequence keep a few: dense at its end."""
        memory, chain = self._state.memory, self._state.chain
        ends = (cursor.name_at(chain, one) for one in cursor.ends if one <= end)
        names = dict.fromkeys([*cursor.block_hashes[: end // chain.block_size], *ends])
        pieces = (memory.get(name) for name in names)
        kept = [one for one in pieces if one is not None and one.has_state]
        kept = sorted(kept, key=lambda one: one.end)
        while len(kept) > MAX_STATES:
            one = kept.pop(densest([piece.end for piece in kept]))
            bare = self._state.parts.bare(one.kv)
            memory.without_state(one, bare, bare.nbytes)
