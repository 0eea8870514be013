"""Names that come late: the store is opened, perhaps again, while there is KV in memory.

What is in memory stays, whatever it was called before, and is written once it is known what the
disk has. Belongs to the mlx thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from runtime.kv.commit import Committer
from runtime.kv.cursor import CacheCursor
from runtime.kv.prefix_tree import Run, path_to
from runtime.kv.reshape import take_over
from runtime.kv.restore import Restorer
from runtime.kv.state import TierState
from runtime.kv.writer import SlotWriter
from runtime.slot_events import Attach, PinWanted
from store.block_names import HashChain


class LateNames:
    """First `attach`, then what is on disk, then `on_told`; and that as often as need be."""

    def __init__(
        self,
        tier_state: TierState,
        committer: Committer,
        restorer: Restorer,
        writer: SlotWriter | None,
        report: Callable[[PinWanted], None],
    ) -> None:
        self._state = tier_state
        self._hot = tier_state.hot
        self._committer = committer
        self._restorer = restorer
        self._writer = writer
        self._report = report
        self._untold: set[Run] = set()
        self._pins: dict[Run, tuple[str, str]] = {}
        self._is_behind = False

    def attach(self, names: Attach, cursors: Iterable[CacheCursor]) -> None:
        """The store is open, and this is what everything is called there; what it has follows."""
        tier_state = self._state
        chain = HashChain(names.secret, names.model_hash, block_size=tier_state.chain.block_size)
        if chain.root != tier_state.chain.root:
            if self._writer is not None:
                self._writer.drop_all()
            for run in tier_state.rename(chain, names.model_hash):
                self._restorer.on_lost(run)
            for cursor in cursors:
                cursor.rename(chain)
        self._untold = {run for run in self._hot.tree if self._hot[run].is_saved}
        tier_state.is_apart = True

    def on_slots(self, ids: Collection[str]) -> None:
        """These are on disk."""
        self._untold -= {run for one in ids if (run := self._hot.find(one)) is not None}

    def untold(self) -> list[str]:
        """What was on disk when the store was opened last, and is not any more."""
        untold, self._untold = self._untold, set()
        return [self._hot[run].id for run in untold if run in self._hot]

    def on_told(self) -> None:
        """All that is on disk was told, or the store works again: keep what is in memory only.

        Not before it has a name: what is written without would be found by other models.
        """
        if not self._state.model_hash:
            return
        self._state.is_apart = False
        self._join_twins()
        self._tell_pins()
        if self._writer is not None:
            self._writer.resume()
        self._is_behind = True
        self.persist()

    def persist(self) -> None:
        """Go on with writing what is in memory only, if there is any of that."""
        if self._is_behind and not self._state.is_apart:
            self._is_behind = not self._committer.persist()

    def pin(self, run: Run, source: str, model: str) -> None:
        """Have the server pin it for who asked that model, once it can be told what it is."""
        self._pins[run] = source, model
        self._tell_pins()

    def _tell_pins(self) -> None:
        if self._state.is_apart:
            return
        for run, (source, model) in self._pins.items():
            if run in self._hot:
                held = (self._hot[one] for one, _ in path_to(run, run.end))
                num_bytes = sum(one.disk_bytes or one.hot_bytes for one in held)
                wanted = PinWanted(run.end_hash, source, model, num_bytes)
                self._report(wanted)
        self._pins.clear()

    def _join_twins(self) -> None:
        """What was computed while the disk was away, and lies there as well, is written once."""
        hot = self._hot
        kept = {_content(run): run for run in hot.tree if hot[run].is_written}
        for run in hot.unwritten():
            twin = kept.get(_content(run))
            if twin is not None and not hot[run].is_state_hot:
                stand_for(self._state, self._restorer, [run], [twin])


def stand_for(
    tier_state: TierState, restorer: Restorer, old: Sequence[Run], new: Sequence[Run]
) -> None:
    """Runs stand for others from now on; who waits for an old one is given the new one."""
    for run in new:
        take_over(tier_state, old, run)
    for run in reversed(old):
        if run in tier_state.hot:
            tier_state.forget(run, "evicted")
            restorer.on_lost(run)


def _content(run: Run) -> tuple[object, ...]:
    return run.start, run.end, run.end_hash, run.has_state, run.root
