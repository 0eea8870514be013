"""What the server is told of KV in memory: what a crash would take, and whose it is on disk.

A slot is its writer's as soon as it is there. What others wrote, and a conversation goes through as
well, is told apart: by that it stays when they are deleted. Belongs to the mlx thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.kv.cursor import CacheCursor
from runtime.kv.prefix_tree import Run, path_to
from runtime.kv.state import TierState
from runtime.slot_events import SlotQueued, SlotsLeft, TurnEnded
from store.keyed_names import Asker
from store.types import PrefixPiece


class Notes:
    """`report` tells the server. Without a disk (`has_disk`) nothing is told."""

    def __init__(
        self,
        tier_state: TierState,
        report: Callable[[SlotQueued | SlotsLeft | TurnEnded], None],
        *,
        has_disk: bool,
    ) -> None:
        self._state = tier_state
        self._hot = tier_state.hot
        self._report = report
        self._has_disk = has_disk

    def queued(self, run: Run, asker: Asker, ends: Iterable[PrefixPiece]) -> None:
        """A run is about to be queued; `ends` were lost, and are on disk again with it."""
        held = self._hot[run]
        held.is_queued, held.completes = True, tuple(ends)
        inside = run.end % self._state.chain.block_size > 0
        pieces = {one: PrefixPiece(one) for one in run.block_hashes}
        pieces |= {one.hash: one for one in held.completes}
        pieces[run.end_hash] = PrefixPiece(run.end_hash, run.last_block if inside else b"", run.end)
        told = tuple(pieces.values())
        self._report(SlotQueued(held.id, asker, told, run.start, held.ttl_s))

    def saved(self, run: Run) -> None:
        """A run is on disk: what was lost of it is not any more."""
        held = self._hot[run]
        held.is_written = held.is_saved = True
        ends = (one.hash for one in held.completes)
        self._state.losses.found((*run.block_hashes, run.end_hash, *ends))

    def settle(self) -> None:
        """Tell what changed hands, or left memory before anything of it was on disk.

        What was written for a conversation that is forgotten is noted as whose it is now.
        """
        others, self._hot.others = self._hot.others, []
        if self._has_disk and not self._state.is_apart:
            for run in (one for one in others if one in self._hot):
                held = self._hot[run]
                if held.kv is not None and not held.is_saved and held.ttl_s != 0:
                    ends = held.completes or self._state.losses.ends_between(run.start, run.end)
                    self.queued(run, self._hot.asker_of(run), ends)
        if left := self._hot.left:
            self._report(SlotsLeft(ids=tuple(left)))
            left.clear()

    def ended(self, run: Run) -> None:
        """Whose turns ended in a slot of others, once it is published: it is theirs as well."""
        held = self._hot[run]
        if held.is_saved and held.ended and not self._state.is_apart:
            for asker, ended in held.ended.items():
                held.note(asker, ended.num_tokens)
                self._report(TurnEnded(asker=asker, slot_id=held.id, **ended._asdict()))
            held.ended.clear()

    def reached(self, cursor: CacheCursor) -> None:
        """How much of a turn is on disk while the rest is not: a crash would leave so much."""
        path = path_to(cursor.leaf, self._hot.num_saved(cursor.leaf, cursor.num_kept))
        if not path or self._state.is_apart or cursor.ttl_s == 0:
            return
        run, end = path[-1]
        held = self._hot[run]
        if run is not cursor.leaf and held.note(cursor.asker, end):
            self._report(TurnEnded(cursor.asker, held.id, end, cursor.ttl_s, num_turns=0))
